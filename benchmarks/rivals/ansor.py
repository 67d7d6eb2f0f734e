"""Ansor (OSDI 2020), whose search MetaSchedule has: evolution under a cost model that is learnt.

Programs are drawn at random from all that our micro-kernels, slices, loop orders, thread grids and
prefetch distances make. In rounds, populations evolve (a side is drawn anew, or taken from another
program) under a model of the times so far; the best unseen, and some at random, are timed, and the
model learns anew. The fastest program that was timed serves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.rules.schedules import GATED, K_UNIT
from dovetail.compiler.search.cost_model import describe_program
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.space import PREFETCHES, Program, Slice, ceil_div
from dovetail.ir.schedule import ORDERS
from rivals.learner import fit_logarithms
from rivals.result import Found, Regions, Trials, whole

MUTATION = 0.85
"""Share of the next generation that is mutated; the others are crossed."""
RANDOM = 0.05
"""Share of a round that the model does not choose."""


@dataclass(frozen=True, slots=True)
class Ansor:
    """trials: timed at each M (MetaSchedule's per shape). batch: of a round."""

    trials: int = 192
    batch: int = 32
    population: int = 128
    generations: int = 4
    seed: int = 0

    def search(self, task: SearchTask, measurer: Measurer) -> Found:
        """Return the fastest program timed at each M; none where none was right."""
        start, count = measurer.now(), 0
        picks: dict[int, Regions] = {}
        for i, m in enumerate(task.points):
            left = start + task.seconds - measurer.now()
            end = measurer.now() + left / (len(task.points) - i)
            trials = Trials(task, measurer, end)
            self._search_at(m, trials)
            best = trials.fastest(m)
            picks[m] = whole(task, m, best) if best else ()
            count += trials.count
        return Found(picks, count, measurer.now() - start)

    def _search_at(self, m: int, trials: Trials) -> None:
        space, draw = Space(trials.task, m), random.Random(self.seed)
        model: Any = None
        while trials.count < self.trials and trials.left > 0:
            fresh = [space.draw(draw) for _ in range(self.population)]
            known = sorted(trials.found, key=trials.found.__getitem__)[: self.population // 4]
            pool = [program for _, program in known] + fresh
            for _ in range(0 if model is None else self.generations):
                pool = self._evolve(pool, space, model, draw)
            new = [p for p in dict.fromkeys(pool) if (m, p) not in trials.found]
            if not new:
                break
            luck = math.ceil(RANDOM * self.batch)
            chosen = space.ranked(new, model)[: self.batch - luck] + fresh[:luck]
            trials.time(m, chosen[: self.trials - trials.count])
            model = space.learn(trials)

    def _evolve(
        self, pool: Sequence[Program], space: Space, model: Any, draw: random.Random
    ) -> list[Program]:
        """Return the next generation: better programs have more offspring; the best stay."""
        ranked = space.ranked(pool, model)
        weights = [1 / (1 + place) for place in range(len(ranked))]
        parents = draw.choices(ranked, weights, k=2 * self.population)
        children = [
            space.mutate(first, draw) if draw.random() < MUTATION else space.cross(first, other)
            for first, other in zip(parents[::2], parents[1::2], strict=True)
        ]
        return ranked[: self.population // 4] + children


@dataclass(frozen=True, slots=True)
class Space:
    """All programs of one product at one M."""

    task: SearchTask
    m: int

    def draw(self, draw: random.Random) -> Program:
        """Return a program drawn at random."""
        problem = self.task.problem(self.m)
        tile = draw.choice(problem.tiles())
        scheme = draw.choice(problem.schemes())
        extent = problem.extents(tile, scheme)

        def side(size: int, unit: int) -> int:
            """Return whole units, as many as a power of two, or 0 for the whole side."""
            if draw.random() < 0.5:
                return 0
            return unit * 2 ** draw.randrange(ceil_div(size, unit).bit_length())

        deep = 0 if self.task.op.kind in GATED else side(extent.k, K_UNIT)
        part = Slice(side(extent.m, tile.rows), side(extent.n, 1), deep)
        return self._made(Program(tile, part, scheme, draw.choice(PREFETCHES), draw.choice(ORDERS)))

    def mutate(self, program: Program, draw: random.Random) -> Program:
        """Return a program with one side drawn anew."""
        other = self.draw(draw)
        sides: tuple[Callable[[], Program], ...] = (
            lambda: replace(program, tile=other.tile),
            lambda: replace(program, slice=replace(program.slice, m=other.slice.m)),
            lambda: replace(program, slice=replace(program.slice, n=other.slice.n)),
            lambda: replace(program, slice=replace(program.slice, k=other.slice.k)),
            lambda: replace(program, scheme=other.scheme),
            lambda: replace(program, prefetch=other.prefetch),
            lambda: replace(program, order=other.order),
        )
        return self._made(draw.choice(sides)())

    def cross(self, one: Program, other: Program) -> Program:
        """Return a program with the tile and grid of one and the loops of another."""
        return self._made(replace(other, tile=one.tile, scheme=one.scheme))

    def _made(self, program: Program) -> Program:
        """Return what a program does: equal ones are timed once."""
        problem = self.task.problem(self.m)
        part = problem.canonical(program.tile, program.slice, program.scheme)
        made = replace(program, slice=part)
        one_nest = len(problem.orders(made)) == 1
        return replace(made, order=ORDERS[0]) if one_nest else made

    def ranked(self, programs: Sequence[Program], model: Any) -> list[Program]:
        """Return programs, each once, best first by the model; in their order without one."""
        known = list(dict.fromkeys(programs))
        if model is None:
            return known
        found = model.predict(np.array([describe_program(self.task, self.m, p) for p in known]))
        return [known[i] for i in np.argsort(found, kind="stable")]

    def learn(self, trials: Trials) -> Any:
        """Return a model of what was timed; None of nothing."""
        timed = {p: s for (_, p), s in trials.found.items() if s < math.inf}
        features = [describe_program(self.task, self.m, p) for p in timed]
        return fit_logarithms(features, list(timed.values()))
