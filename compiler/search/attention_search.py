"""Which tiles and parts of attention kernels are tried: for each model, threads and phase.

In: a model, a target and plans. Out: for each attention kernel under each plan its searches over
several contexts, with the instances and the fewest keys of a part to choose from; and the instances
that tables name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dovetail.codegen.catalog import KernelRequest, head_shape, kernel_request, load_kernel_module
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec
from dovetail.codegen.lower import find_kernel
from dovetail.compiler.measure.meter import DECODE, PREFILL, AttentionCase
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.compiler.rules.tables import OWN_SCHEDULES
from dovetail.compiler.search.instances import InstanceTask, Schedule, Tiles, change_tiles
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.model import ModelSpec
from dovetail.ir.schedule import ScheduleTable
from dovetail.runtime.native.step import PART_TOKENS, count_parts

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


def attention_library(spec: ModelSpec, target: Target) -> LibrarySpec:
    """Return the library of all instances."""
    rivals = [r for f in (DECODE, PREFILL) for r in variant_requests(f, target, spec)]
    merge = kernel_request("decode_attention_merge", target, spec.kv_dtype)
    kernels = (*rivals, merge)
    return LibrarySpec(target, kernels, name="attention", tvm_ffi=False)


def attention_tasks(
    spec: ModelSpec, target: Target, plans: Iterable[PhasePlan]
) -> tuple[InstanceTask, ...]:
    """Return a search for each case of each attention kernel under each plan."""
    tasks: list[InstanceTask] = []
    for plan in dict.fromkeys(plans):
        for family in (DECODE, PREFILL):
            cases = attention_cases(spec, family, plan)
            rivals = variant_requests(family, target, spec)
            schedules = variant_schedules(family, cases)
            tasks += (InstanceTask(case, rivals, schedules) for case in cases)
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
