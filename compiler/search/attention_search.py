"""Chooses attention kernels' tiles and parts by measuring: one choice per model, threads and phase.

In: a model, a target, plans and a `Measurer`. Out: for each attention kernel under each plan the
request of the winner over several contexts, its time, and the fewest keys of a part. Where the
default could not be measured, or is right and no other is surely faster, it stays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from dovetail.codegen.catalog import KernelRequest, head_shape, kernel_request, load_kernel_module
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec
from dovetail.codegen.lower import find_kernel
from dovetail.compiler.measure.meter import (
    DECODE,
    PREFILL,
    SKIPPED,
    AttentionCase,
    CallCase,
    Candidate,
    GateCase,
    Measurement,
    Measurer,
    RowsCase,
)
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.compiler.rules.tables import OWN_SCHEDULES
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ScheduleError, SpecError
from dovetail.ir.model import ModelSpec
from dovetail.ir.schedule import ScheduleTable
from dovetail.ir.tuning import CRASH, OK, TIMEOUT, WRONG, WorkKey
from dovetail.runtime.native.step import PART_TOKENS, count_parts

Tiles = Mapping[str, int]
Schedule = tuple[int, ...]
COMBINATIONS: dict[tuple[str, str], tuple[Tiles, ...]] = {
    (DECODE, "avx2"): ({"VT": 4, "DV": 2},),
    (PREFILL, "avx512"): (
        {"KT": 4, "RV": 3, "STRIPS": 2, "RT": 6, "DV": 4},
        {"KT": 8, "RV": 2, "STRIPS": 4, "RT": 4, "DV": 4},
    ),
}
"""(family, instruction set) to tiles that were found good, more than a step off the default."""
STEPS = {DECODE: ("CHUNK", "VT", "DV", "BY_KEY", "FETCH"), PREFILL: ("KB", "KT", "STRIPS")}
"""The tunables of a family that are tried one choice down and one up, whatever the others are."""
SIZES = {
    DECODE: ((1, 256), (1, 1024), (1, 4096)),
    PREFILL: ((64, 64), (256, 256), (256, 1024)),
}
"""Rows and context of the cases that stand for a family: the kernel has to serve all of them."""
PARTS = (16, 32, 128, 256, 512, 1024)
"""Fewest keys of a part of a sequence in decode attention that are tried beside the default."""
USER = "user_"
"""How the names of modules of users' kernels begin."""
GAIN = 0.03
"""What a variant must be faster by than the default to take its place."""
ROUNDS = 21


@dataclass(frozen=True, slots=True)
class AttentionTask:
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
class AttentionChoice:
    """The kernel and schedule for a family under a plan, the kernel's seconds in all cases."""

    family: str
    threads: int
    request: KernelRequest
    schedule: Schedule
    seconds: float
    phase: str = ""


def variant_requests(family: str, target: Target, spec: ModelSpec) -> tuple[KernelRequest, ...]:
    """Return the default instance of `family` for a model first, then its variants."""
    default = kernel_request(family, target, spec.kv_dtype, head_shape(spec))
    rivals = (*COMBINATIONS.get((family, target.isa), ()), *single_steps(default))
    return (default, *(change_tiles(default, tiles) for tiles in rivals))


def single_steps(request: KernelRequest) -> Iterator[Tiles]:
    """Yield what the kernel's own choices offer beside the tiles of `request`, one at a time."""
    function = find_kernel(load_kernel_module(request.module), request.kernel)
    tunables = {tunable.name: tunable for tunable in function.tunables}
    for name in STEPS[request.kernel]:
        choices = [choice for choice in tunables[name].choices if isinstance(choice, int)]
        at = choices.index(int(request.binding.get(name, tunables[name].default)))
        beside = (*choices[max(at - 1, 0) : at], *choices[at + 1 : at + 2])
        yield from ({name: choice} for choice in beside)


def change_tiles(request: KernelRequest, tiles: Tiles) -> KernelRequest:
    """Return the instance with other tiles, which its name tells."""
    names = "".join(f"_{name.lower()}{size}" for name, size in tiles.items())
    return replace(request, binding={**request.binding, **tiles}, name=request.name + names)


def attention_library(spec: ModelSpec, target: Target) -> LibrarySpec:
    """Return the library of all instances."""
    rivals = [r for f in (DECODE, PREFILL) for r in variant_requests(f, target, spec)]
    merge = kernel_request("decode_attention_merge", target, spec.kv_dtype)
    kernels = (*rivals, merge)
    return LibrarySpec(target, kernels, name="attention", tvm_ffi=False)


def attention_tasks(
    spec: ModelSpec, target: Target, plans: Iterable[PhasePlan]
) -> tuple[AttentionTask, ...]:
    """Return a search for each case of each attention kernel under each plan."""
    tasks: list[AttentionTask] = []
    for plan in dict.fromkeys(plans):
        for family in (DECODE, PREFILL):
            cases = attention_cases(spec, family, plan)
            rivals = variant_requests(family, target, spec)
            schedules = variant_schedules(family, cases)
            tasks += (AttentionTask(case, rivals, schedules) for case in cases)
    return tuple(tasks)


def variant_schedules(family: str, cases: Sequence[AttentionCase]) -> tuple[Schedule, ...]:
    """Return the default schedule first, then those that cut the keys of a case otherwise."""
    default = OWN_SCHEDULES.get(family, make_schedule())
    if family != DECODE:
        return (default,)
    cuts: dict[tuple[int, ...], Schedule] = {}
    for least in (PART_TOKENS, *PARTS):
        parts = tuple(count_parts(1, c.n_kv, c.context, c.threads, least) for c in cases)
        cuts.setdefault(parts, make_schedule(block_k=least))
    return tuple(cuts.values())


def attention_cases(spec: ModelSpec, family: str, plan: PhasePlan) -> tuple[AttentionCase, ...]:
    """Return the cases that stand for `family` under `plan`, as far as the model's context goes."""
    sizes = {tuple(min(size, spec.max_context) for size in each): None for each in SIZES[family]}
    return tuple(
        AttentionCase(
            kind=family,
            n_q=spec.n_heads,
            n_kv=spec.n_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.kv_dtype,
            rows=rows,
            context=context,
            threads=plan.threads,
            cpus=plan.cpus,
            cap=spec.attention_cap,
        )
        for rows, context in sizes
    )


def search_attention(
    tasks: Iterable[AttentionTask], measurer: Measurer, seconds: float
) -> tuple[AttentionChoice, ...]:
    """Return the best instance of each kernel under each plan, over all of its cases.

    The `measurer` is one of the `attention_library`; `seconds` are for a kernel under a plan. Where
    the default was not measured there is no choice; where it failed the fastest right one takes its
    place. Raises ScheduleError where there is none.
    """
    groups: dict[tuple[str, int, str], list[AttentionTask]] = {}
    for task in tasks:
        groups.setdefault((task.case.kind, task.case.threads, task.phase), []).append(task)
    found = (_search_kernel(group, measurer, seconds) for group in groups.values())
    return tuple(choice for choice in found if choice)


def _search_kernel(
    tasks: Sequence[AttentionTask], measurer: Measurer, seconds: float
) -> AttentionChoice | None:
    case, rivals, schedules = tasks[0].case, tasks[0].rivals, tasks[0].schedules
    share = seconds / len(tasks)
    found = [measurer.measure(t.case, t.candidates, rounds=ROUNDS, seconds=share) for t in tasks]
    if tasks[0].user:
        refuse_wrong(tasks, found)
    known = [times for times in found if times[0].status != SKIPPED]
    if not known:
        return None
    times = list(zip(*known, strict=True))
    by_rival, by_schedule = times[: len(rivals)], [times[0], *times[len(rivals) :]]
    best = find_best(by_rival)
    if best is None:
        failed = ", ".join(f"{m.candidate.kernel} {m.status}" for m in known[0])
        raise ScheduleError(
            f"no kernel for {case.kind} of these heads is right on this machine ({failed}); "
            "name another target with --target, or measure all again with dovetail tune "
            "--effort full if the machine was at fault"
        )
    schedule = schedules[find_best(by_schedule) or 0]
    total, phase = _total(by_rival[best]), tasks[0].phase
    return AttentionChoice(case.kind, case.threads, rivals[best], schedule, total, phase)


def refuse_wrong(tasks: Sequence[AttentionTask], found: Sequence[Sequence[Measurement]]) -> None:
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
            raise SpecError(
                f"{what} is refused: {REFUSED[status]}. `dovetail kernel lift` shows what it does"
            )


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
    tables: Iterable[ScheduleTable], choices: Sequence[AttentionChoice]
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


def attention_kernels(
    spec: ModelSpec, target: Target, tables: Iterable[ScheduleTable]
) -> tuple[KernelRequest, ...]:
    """Return the attention variants that the tables of `target` name, besides the default ones."""
    used = {row.kernel for t in tables if t.target == target.name for row in t.rows}
    return tuple(
        request
        for family in (DECODE, PREFILL)
        for request in variant_requests(family, target, spec)[1:]
        if request.name in used
    )
