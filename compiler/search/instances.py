"""Searches for the fastest right instance of a kernel: one choice per kernel, threads and phase.

In: cases of a kernel with the instances and schedules to choose from, and a `Measurer`. Out: for
each kernel under each plan the request of the winner over all cases, its schedule and its time.
Where the default could not be measured, or is right and no other is surely faster, it stays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from dovetail.codegen.catalog import KernelRequest
from dovetail.compiler.measure.meter import (
    ARRAY_BYTES,
    SKIPPED,
    AttentionCase,
    CallCase,
    Candidate,
    GateCase,
    Measurement,
    Measurer,
    RowsCase,
)
from dovetail.ir.errors import ScheduleError, SpecError
from dovetail.ir.schedule import ScheduleTable
from dovetail.ir.tuning import CRASH, OK, TIMEOUT, WRONG, WorkKey

Tiles = Mapping[str, int]
Schedule = tuple[int, ...]
USER = "user_"
"""How the names of modules of users' kernels begin."""
GAIN = 0.03
"""What a variant must be faster by than the default to take its place."""
ROUNDS = 21


@dataclass(frozen=True, slots=True)
class InstanceTask:
    """One case of an attention kernel, or of a user's kernel beside ours, under a plan.

    rivals: the instances to choose from, the default first. schedules: those to choose from. user:
    the file of the user's kernel, which is refused where it is wrong. phase: where a choice is for
    one alone.
    """

    case: AttentionCase | RowsCase | GateCase | CallCase
    rivals: tuple[KernelRequest, ...]
    schedules: tuple[Schedule, ...]
    user: str = ""
    phase: str = ""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All instances with the default schedule, then the default one with all other schedules.

        The two choices are independent: how work is shared, and how a thread does its share.
        """
        tiles = [Candidate(request.name, self.schedules[0]) for request in self.rivals]
        parts = [Candidate(self.rivals[0].name, schedule) for schedule in self.schedules[1:]]
        return (*tiles, *parts)

    @property
    def work(self) -> WorkKey:
        """What its records are found by."""
        return self.case.work


@dataclass(frozen=True, slots=True)
class InstanceChoice:
    """The kernel and schedule for a family under a plan, the kernel's seconds in all cases."""

    family: str
    threads: int
    request: KernelRequest
    schedule: Schedule
    seconds: float
    phase: str = ""


def change_tiles(request: KernelRequest, tiles: Tiles) -> KernelRequest:
    """Return the instance with other tiles, which its name tells."""
    names = "".join(f"_{name.lower()}{size}" for name, size in tiles.items())
    return replace(request, binding={**request.binding, **tiles}, name=request.name + names)


def search_instances(
    tasks: Iterable[InstanceTask], measurer: Measurer, seconds: float
) -> tuple[InstanceChoice, ...]:
    """Return the best instance of each kernel under each plan, over all of its cases.

    The `measurer` is one of a library with all of them; `seconds` are for a kernel under a plan.
    Where the default was not measured there is no choice, nor for a phase of which anything was not
    measured; where it failed the fastest right one takes its place. Raises ScheduleError where
    there is none.
    """
    groups: dict[tuple[str, int, str], list[InstanceTask]] = {}
    for task in tasks:
        groups.setdefault((task.case.kind, task.case.threads, task.phase), []).append(task)
    found = (_search_kernel(group, measurer, seconds) for group in groups.values())
    return tuple(choice for choice in found if choice)


def _search_kernel(
    tasks: Sequence[InstanceTask], measurer: Measurer, seconds: float
) -> InstanceChoice | None:
    case, rivals, schedules = tasks[0].case, tasks[0].rivals, tasks[0].schedules
    share = seconds / len(tasks)
    found = [measurer.measure(t.case, t.candidates, rounds=ROUNDS, seconds=share) for t in tasks]
    if tasks[0].user:
        refuse_wrong(tasks, found)
    known = [times for times in found if times[0].status != SKIPPED]
    some_skipped = any(m.status == SKIPPED for times in found for m in times)
    if not known or (tasks[0].phase and some_skipped):
        return None
    times = list(zip(*known, strict=True))
    by_rival, by_schedule = times[: len(rivals)], [times[0], *times[len(rivals) :]]
    best = find_best(by_rival)
    if best is None:
        failed = ", ".join(f"{m.candidate.kernel} {m.status}" for m in known[0])
        raise ScheduleError(
            f"no kernel for {case.kind} is right on this machine ({failed}); "
            "name another target with --target, or measure all again with dovetail tune "
            "--effort full if the machine was at fault"
        )
    schedule = schedules[find_best(by_schedule) or 0]
    total, phase = _total(by_rival[best]), tasks[0].phase
    return InstanceChoice(case.kind, case.threads, rivals[best], schedule, total, phase)


def refuse_wrong(tasks: Sequence[InstanceTask], found: Sequence[Sequence[Measurement]]) -> None:
    """Raise SpecError unless the user's kernel, as it stands, is right in all cases.

    What serves one phase alone, and was not measured there, does not serve.
    """
    for task, times in zip(tasks, found, strict=True):
        own = next(i for i, r in enumerate(task.rivals) if r.module.startswith(USER))
        status, what = times[own].status, f"{task.user} as {task.case.kind} of {task.case.shape}"
        if status == SKIPPED and not task.phase:
            raise SpecError(
                f"{what} was not measured: the budget is spent, or other work was in the way; "
                "give a larger --budget, or try again on a quiet machine"
            )
        if status not in (OK, SKIPPED):
            why = REFUSED[status]
            if status == CRASH and isinstance(task.case, CallCase) and task.case.may_overrun:
                why += f", perhaps beyond the {ARRAY_BYTES >> 20} MiB of an array: give less"
            raise SpecError(f"{what} is refused: {why}. `dovetail kernel lift` shows what it does")


REFUSED = {
    WRONG: "its numbers differ from the operator's in float64",
    CRASH: "it crashes",
    TIMEOUT: "it does not end",
}


def find_best(by_rival: Sequence[Sequence[Measurement]]) -> int | None:
    """Return the place of the winner, the first one where no other is surely faster; None right."""
    right = [i for i, times in enumerate(by_rival) if all(m.status == OK for m in times)]
    if not right:
        return None
    if right[0] != 0:
        return min(right, key=lambda i: _total(by_rival[i]))
    best = min(right, key=lambda i: _rank(by_rival[i]))
    return best if _surely_faster(by_rival[best]) else 0


def _rank(times: Sequence[Measurement]) -> float:
    """Return the geometric mean of the ratios to the default."""
    return statistics.geometric_mean(m.ratio.median or math.inf for m in times)


def _total(times: Sequence[Measurement]) -> float:
    """Return the seconds of all cases together."""
    return sum(m.low for m in times)


def _surely_faster(times: Sequence[Measurement]) -> bool:
    """Tell whether an instance is worth taking, surely faster, and in no case clearly slower."""
    bound = statistics.geometric_mean(m.ratio.bound or math.inf for m in times)
    clearly_slower = any(m.ratio.median > 1 + GAIN for m in times)
    return _rank(times) < 1 - GAIN and bound < 1 and not clearly_slower


def apply_choices(
    tables: Iterable[ScheduleTable], choices: Sequence[InstanceChoice]
) -> tuple[ScheduleTable, ...]:
    """Return the tables with the chosen kernels in the rows of the attention operators."""
    chosen = {(choice.family, choice.threads): choice for choice in choices}

    def changed(table: ScheduleTable) -> ScheduleTable:
        choice = chosen.get((table.op, table.threads))
        if choice is None:
            return table
        row = replace_struct(
            table.rows[0],
            kernel=choice.request.name,
            schedule=choice.schedule,
            source="measured",
            seconds=choice.seconds,
        )
        return replace_struct(table, rows=(row,))

    return tuple(changed(table) for table in tables)
