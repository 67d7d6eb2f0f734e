"""What a policy finds, and the bench that rivals time programs on: no default among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.search.policy import SearchResult, SearchTask
from dovetail.compiler.search.space import Program
from dovetail.ir.tuning import OK

AT_ONCE = 16
"""Programs timed between two looks at the clock."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A rectangle of C, in rows and columns, and the program that computes it."""

    row: int
    rows: int
    column: int
    columns: int
    program: Program


Regions = tuple[Region, ...]
"""Between them they cover C once; empty where a policy has no program."""


@dataclass(frozen=True, slots=True)
class Found:
    """Regions by M, how many trials they took, their seconds on the measurer's clock."""

    picks: Mapping[int, Regions]
    trials: int
    seconds: float


class Searcher(Protocol):
    """A policy: one of ours returns whole products, a rival regions."""

    def search(self, task: SearchTask, measurer: Measurer) -> SearchResult | Found:
        """Return what serves each M of `task.points`."""


def whole(task: SearchTask, m: int, program: Program) -> Regions:
    """Return one program for the whole product."""
    return (Region(0, m, 0, task.op.n, program),)


def as_found(task: SearchTask, result: SearchResult | Found) -> Found:
    """Return a result of ours as regions."""
    if isinstance(result, Found):
        return result
    picks = {m: whole(task, m, choice.program) for m, choice in result.choices.items()}
    return Found(picks, result.trials, result.seconds)


@dataclass(slots=True)
class Trials:
    """Times programs, remembers them, and stops at `end` on the measurer's clock.

    found: lower quartile of seconds by (M, program), infinity for one that failed.
    """

    task: SearchTask
    measurer: Measurer
    end: float
    count: int = 0
    found: dict[tuple[int, Program], float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - self.measurer.now()

    def time(self, m: int, programs: Iterable[Program]) -> list[float]:
        """Return the seconds of each program at M = m; infinity for those there was no time for."""
        wanted = list(programs)
        missing = [p for p in dict.fromkeys(wanted) if (m, p) not in self.found]
        problem = self.task.problem(m)
        for first in range(0, len(missing), AT_ONCE):
            if self.left <= 0:
                break
            batch = missing[first : first + AT_ONCE]
            candidates = [problem.candidate(program) for program in batch]
            measured = self.measurer.measure(
                problem.case, candidates, rounds=self.task.rounds, seconds=min(self.left, 1e9)
            )
            self.count += len(batch)
            for program, each in zip(batch, measured, strict=True):
                self.found[m, program] = each.low if each.status == OK else math.inf
        return [self.found.get((m, program), math.inf) for program in wanted]

    def fastest(self, m: int) -> Program | None:
        """Return the fastest program that was right at M = m, None where none was."""
        timed = {p: s for (rows, p), s in self.found.items() if rows == m and s < math.inf}
        return min(timed, key=timed.__getitem__, default=None)
