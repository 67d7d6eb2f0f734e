"""What every search policy gets and gives, and the bench on which its programs are timed.

In: a `SearchTask` (a product, its M values, a target, threads, a budget) and a `Measurer`. Out: a
`SearchResult`, one `Choice` per M. Policies are pure: same measurements, same choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dovetail.codegen.isa.target import Target
from dovetail.compiler.measure.meter import SKIPPED, Candidate, Measurement, Measurer
from dovetail.compiler.measure.paired import PairedRatio
from dovetail.compiler.rules.schedules import GemmOp, MicroKernel, default_prefetch, default_row
from dovetail.compiler.search.space import WHOLE, Problem, Program, Scheme, Slice
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ScheduleError
from dovetail.ir.schedule import ORDERS
from dovetail.ir.tuning import OK, WorkKey
from dovetail.topology.hardware import HardwareSpec

MEASURED, REUSED, PREDICTED, DEFAULT = "measured", "reused", "predicted", "default"
"""Where a choice comes from: its own timing, a like M's slice, a model, the rules."""
CANDIDATE_GAIN = 0.03
"""What a program must be faster by than the default to guide the search: less is noise."""
LEAST_GAIN = 0.01
"""What a choice must be faster by than the default, and surely faster at all."""
STAGES = ((9, 8), (25, 3))
"""Rounds and challengers of the comparisons with the default that a choice has to win one after the
other: of many programs that were timed briefly the luckiest look best."""
FINAL_ROUNDS = STAGES[-1][0]
LEAST_SECONDS = 1e-3
"""What a run takes at least, however short the kernel: it is timed over several calls."""
FINAL_SHARE = 0.35
"""Of a bench's seconds, kept for these comparisons."""
UNTIMED_BATCH = 8
"""Programs timed at once where the default failed, so that nothing tells how long they take."""
LEAST_RUNS = 3
"""What a Measurer runs of each candidate at least: a check and two rounds."""


@dataclass(frozen=True, slots=True)
class SearchTask:
    """One matrix product to find schedules for at all `points`, sorted M values.

    sizes: M -> share of the workload's steps, may be empty. seconds: the budget, on the measurer's
    clock. rounds: how often a candidate is timed.
    """

    op: GemmOp
    target: Target
    phase: PhasePlan
    hardware: HardwareSpec
    points: tuple[int, ...]
    seconds: float = math.inf
    rounds: int = 5
    sizes: Mapping[int, float] = field(default_factory=dict)

    @property
    def work(self) -> WorkKey:
        """What its records are found by."""
        return self.op.work(self.phase.threads)

    def problem(self, m: int) -> Problem:
        """Return the product at one M."""
        return Problem(self.op, m, self.target, self.phase.threads, self.phase.cpus)

    def default(self, m: int) -> Program:
        """Return what the rules choose at one M."""
        row = default_row(self.op, self.target, m, self.phase.threads, self.hardware)
        program = self.problem(m).program(Candidate(row.kernel, row.schedule))
        assert program is not None
        return program

    def program(
        self, m: int, tile: MicroKernel, part: Slice, scheme: Scheme, order: str = ORDERS[0]
    ) -> Program:
        """Return a program with the prefetch distance that the rules give its tile."""
        part = self.problem(m).canonical(tile, part, scheme)
        prefetch = default_prefetch(self.op, self.target, tile, m, part.k)
        return Program(tile, part, scheme, prefetch, order)


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves one M: a program, its seconds where timed, and where it comes from.

    by_panels: the best program of each panel count that may serve, and its seconds.
    """

    program: Program
    source: str
    seconds: float | None = None
    by_panels: Mapping[int, tuple[Program, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The choices by M, how many trials they took, their seconds on the measurer's clock."""

    choices: dict[int, Choice]
    trials: int
    seconds: float


class Policy(Protocol):
    """A way to find schedules; all policies share the micro-kernels and the measuring."""

    def search(self, task: SearchTask, measurer: Measurer) -> SearchResult:
        """Return a choice for every M of `task.points`; those without budget get the rules'.

        Raises ScheduleError where the rules' program failed, and no other is right.
        """


class Bench:
    """Times programs of one product at one M, its default program first, and remembers them.

    After `end` on the measurer's clock nothing more is timed: programs then cost infinity. The last
    `final` share of the time until then is for `choice` alone.
    """

    def __init__(
        self,
        task: SearchTask,
        measurer: Measurer,
        m: int,
        end: float = math.inf,
        *,
        final: float = FINAL_SHARE,
    ) -> None:
        self.task, self.m, self.problem = task, m, task.problem(m)
        self.default = task.default(m)
        self.found: dict[Program, Measurement] = {}
        self.trials = 0
        self._measurer = measurer
        self._final_end = self.end = end
        if math.isfinite(end):
            self.end -= final * max(0.0, self.left)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - self._measurer.now()

    def time(self, programs: Iterable[Program], rounds: int | None = None) -> list[float]:
        """Return the lower quartile of each program's seconds, infinity for a failed one.

        That quartile is what other processes disturb least. A program timed before is not timed
        again unless `rounds` asks for more. The default is timed first of all: it is the reference.
        """
        wanted = list(programs)
        if not self.found and math.isfinite(self.end) and self.left > 0:
            self._measure((), self.task.rounds)  # how long the default takes bounds the others
        again = rounds is not None
        missing = [p for p in dict.fromkeys(wanted) if again or p not in self.found]
        if self.left > 0:
            self._measure(missing[: self._affordable()], rounds or self.task.rounds)
        return [self.cost(program) for program in wanted]

    def cost(self, program: Program) -> float:
        """Return what a program cost when it was timed, infinity where it failed or was not."""
        found = self.found.get(program)
        return found.low if found is not None and found.status == OK else math.inf

    def _affordable(self) -> int | None:
        """Return how many programs about as slow as the default fit, each checked and run twice."""
        if not math.isfinite(self.end):
            return None
        default = self.cost(self.default)
        if default == math.inf:
            return UNTIMED_BATCH
        return max(0, int(self.left / (LEAST_RUNS * default)))

    def _measure(self, programs: Sequence[Program], rounds: int) -> None:
        asked = tuple(dict.fromkeys(programs if self.found else (self.default, *programs)))
        if not asked:
            return
        candidates: list[Candidate] = [self.problem.candidate(p) for p in asked]
        measured = self._measurer.measure(
            self.problem.case, candidates, rounds=rounds, seconds=min(self.left, 1e9)
        )
        self.trials += len(asked)
        for program, found in zip(asked, measured, strict=True):
            if found.status != SKIPPED or program not in self.found:
                self.found[program] = found

    def best(self, programs: Iterable[Program] = ()) -> Program:
        """Return the fastest of some programs, or of all timed ones.

        The default is always among them and keeps its place unless beaten clearly.
        """

        def cost(program: Program) -> float:
            favour = 1 - CANDIDATE_GAIN if program == self.default else 1
            return favour * self.cost(program)

        return min((self.default, *(programs or self.found)), key=cost)

    def _confirmed(self) -> list[Program]:
        """Return the programs that are surely faster than the default, the best first.

        They have beaten it in every stage, by the ratios of times taken in the same rounds. What
        there is no time to compare is not sure.
        """
        self.end = self._final_end
        base, same = self.cost(self.default), self.problem.effective(self.default)
        faster = sorted((p for p in self.found if self.cost(p) < base), key=self.cost)
        unlike = {self.problem.effective(p): p for p in reversed(faster)}
        rivals = [p for p in faster if unlike[self.problem.effective(p)] == p]
        rivals = [p for p in rivals if self.problem.effective(p) != same]
        for rounds, count in STAGES:
            run = rounds * max(base, LEAST_SECONDS)
            affordable = max(1, int(min(self.left / run, 1e9)) - 1)
            rivals = rivals[: min(count, affordable)]
            if rivals:
                self.time((self.default, *rivals), rounds=rounds)
            better = (p for p in rivals if self._ratio(p).median < 1 - LEAST_GAIN)
            rivals = sorted(better, key=lambda p: self._ratio(p).median)
        return [program for program in rivals if self._ratio(program).bound < 1]

    def beats_default(self, program: Program) -> bool:
        """Tell whether a program takes no longer than the default, or that one fails."""
        rounds, _ = STAGES[0]
        self.time((self.default, program), rounds=rounds)
        known = self.found.get(self.default)
        if known and known.status not in (OK, SKIPPED):
            return self.cost(program) < math.inf
        return self._ratio(program).median <= 1

    def _ratio(self, program: Program) -> PairedRatio:
        """Return a program's time over the default's, infinite where no bound of it is known."""
        known = [self.found[p].ratio for p in (program, self.default) if p in self.found]
        if len(known) < 2 or not known[0].bound or not known[1].median:
            return PairedRatio(math.inf, math.inf)
        mine, base = known[0], known[1].median
        return PairedRatio(mine.median / base, mine.bound / base)

    def _right(self) -> list[Program]:
        """Return the programs that are right, the fastest first."""
        return sorted((p for p in self.found if self.cost(p) < math.inf), key=self.cost)

    def _simple(self) -> list[Program]:
        """Return the programs of every micro-kernel without slices that were not timed."""
        tiles = self.problem.tiles()
        programs = (self.task.program(self.m, t, WHOLE, self.default.scheme) for t in tiles)
        return [program for program in programs if program not in self.found]

    def _describe_failure(self) -> str:
        op, statuses = self.task.op, Counter(found.status for found in self.found.values())
        counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
        return (
            f"no kernel for {op.kind} {op.n}x{op.k} in {op.dtype} with {self.m} rows is right on "
            f"{self.task.target.name} ({counts}); name another target with --target, or measure "
            "all anew with dovetail tune if the machine was at fault"
        )

    def choice(self, source: str = MEASURED) -> Choice:
        """Return the default, or the best of the programs that are surely faster.

        Without times of the default nothing is known to be better; where it failed, the fastest
        right one takes its place. Raises ScheduleError where none is right.
        """
        known = self.found.get(self.default)
        if known is None or known.status == SKIPPED:
            return Choice(self.default, DEFAULT)
        if known.status == OK:
            best = [*self._confirmed(), self.default]
        else:
            best = self._replacements()
        by_panels: dict[int, tuple[Program, float]] = {}
        for program in best:
            by_panels.setdefault(program.tile.panels, (program, self.cost(program)))
        return Choice(best[0], source, self.found[best[0]].seconds, by_panels)

    def _replacements(self) -> list[Program]:
        """Return what is right where the default is not, the fastest first."""
        if not self._right():
            self._measure(self._simple(), self.task.rounds)  # whatever the budget: one must serve
        if not (right := self._right()):
            raise ScheduleError(self._describe_failure())
        return right
