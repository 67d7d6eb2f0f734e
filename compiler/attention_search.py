"""Chooses the tiles of the attention kernels by measuring: one choice per model, threads and phase.

In: a model, a target and a plan. Out: for each attention kernel the request of the winner and its
time. The candidates run in a child process (`attention_child`), which checks their numbers first;
where it crashes, hangs or finds one wrong, the default stays.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as replace_struct

from dovetail.codegen.catalog import TILES, KernelRequest, kernel_request
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.ir.artifact import KernelIndex, PhasePlan
from dovetail.ir.model import ModelSpec
from dovetail.ir.schedule import ScheduleTable

DECODE, PREFILL = "decode_attention", "prefill_attention"
VARIANTS: dict[tuple[str, str], tuple[dict[str, int], ...]] = {
    (DECODE, "avx512"): (
        {"CHUNK": 64, "AHEAD": 1},
        {"CHUNK": 256},
        {"AHEAD": 0},
        {"VT": 8, "DV": 2},
    ),
    (DECODE, "avx2"): ({"CHUNK": 64, "AHEAD": 1}, {"HT": 4, "KT": 2}, {"AHEAD": 0}),
    (PREFILL, "avx512"): (
        {"KT": 4, "RV": 3, "STRIPS": 2, "RT": 6, "DV": 4},
        {"KT": 8, "RV": 2, "STRIPS": 4, "RT": 4, "DV": 4},
        {"KB": 128},
    ),
    (PREFILL, "avx2"): ({"KT": 4, "RV": 2, "STRIPS": 4}, {"KB": 128}),
}
"""(family, instruction set) to what other instances have in place of the default tiles."""
CONTEXT = 1024
PROMPT = 256
GAIN = 0.03
"""What a variant must be faster by than the default to take its place."""
TIMEOUT = 120.0


class AttentionCase(msgspec.Struct, frozen=True, kw_only=True):
    """What is timed: one sequence, its `rows` last tokens of `context`, on pinned threads."""

    family: str
    n_q: int
    n_kv: int
    head_dim: int
    kv_dtype: str
    rows: int
    context: int
    threads: int
    cpus: tuple[int, ...]


class AttentionJob(msgspec.Struct, frozen=True, kw_only=True):
    """The line to the child: kernels of one library, the first being the default, for each case."""

    library: str
    index: KernelIndex
    cases: tuple[tuple[AttentionCase, tuple[str, ...]], ...]


class AttentionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The child's answer: per case the seconds of each kernel, infinite where it was wrong."""

    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The kernel for a family under a plan, and its seconds in the measured case."""

    family: str
    threads: int
    request: KernelRequest
    seconds: float


def variant_requests(family: str, target: Target, dtype: str) -> tuple[KernelRequest, ...]:
    """Return the default instance of `family` first, then its variants."""
    default = kernel_request(family, target, dtype)
    found = [default]
    for number, tiles in enumerate(VARIANTS.get((family, target.isa), ()), 1):
        binding: dict[str, int | str] = {
            **TILES.get((family, target.isa), {}),
            "KV": dtype,
            **tiles,
        }
        found.append(replace(default, binding=binding, name=f"{default.name}_v{number}"))
    return tuple(found)


def search_attention(
    spec: ModelSpec, target: Target, plans: Iterable[PhasePlan], cache: Path | None
) -> tuple[AttentionChoice, ...]:
    """Return the best instance of each attention kernel for each plan; () where none was measured.

    Raises ToolchainError when the library of the candidates does not build.
    """
    requests = {f: variant_requests(f, target, spec.kv_dtype) for f in (DECODE, PREFILL)}
    merge = kernel_request("decode_attention_merge", target, spec.kv_dtype)
    kernels = (*requests[DECODE], *requests[PREFILL], merge)
    built = build_library(LibrarySpec(target, kernels, name="attention", tvm_ffi=False), cache)
    cases = [(attention_case(spec, f, plan), requests[f]) for plan in plans for f in requests]
    job = AttentionJob(
        library=str(built.path),
        index=built.index,
        cases=tuple((case, tuple(r.name for r in rivals)) for case, rivals in cases),
    )
    times = measure_attention(job)
    return tuple(
        choose(case, rivals, seconds)
        for (case, rivals), seconds in zip(cases, times, strict=False)
        if seconds[0] < float("inf")
    )


def attention_case(spec: ModelSpec, family: str, plan: PhasePlan) -> AttentionCase:
    """Return the case that stands for `family` under `plan`."""
    return AttentionCase(
        family=family,
        n_q=spec.n_heads,
        n_kv=spec.n_kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=spec.kv_dtype,
        rows=1 if family == DECODE else min(PROMPT, spec.max_context),
        context=min(CONTEXT if family == DECODE else PROMPT, spec.max_context),
        threads=plan.threads,
        cpus=plan.cpus,
    )


def choose(
    case: AttentionCase, rivals: Sequence[KernelRequest], seconds: Sequence[float]
) -> AttentionChoice:
    """Return the fastest; the default, `rivals[0]`, unless it is beaten by GAIN."""
    best = min(range(len(rivals)), key=lambda i: seconds[i] * (1 - GAIN if i == 0 else 1))
    return AttentionChoice(case.family, case.threads, rivals[best], seconds[best])


def measure_attention(job: AttentionJob) -> tuple[tuple[float, ...], ...]:
    """Return the child's times; nothing where it crashed or hung."""
    command = [sys.executable, "-P", "-m", "dovetail.compiler.attention_child"]
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(job),
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        return msgspec.json.decode(done.stdout, type=AttentionTimes).seconds
    except (subprocess.TimeoutExpired, msgspec.MsgspecError):
        return ()


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
            table.rows[0], kernel=choice.request.name, source="measured", seconds=choice.seconds
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
        for request in variant_requests(family, target, spec.kv_dtype)[1:]
        if request.name in used
    )
