"""Attention kernels beside what the machine reads, and beside torch's on the same thread.

Run `python benchmarks/attention.py --json F` (about 10 minutes; `--threads 2` half). Decode: one
token over a long context, in as many layers as fill the memory that the read bandwidth of the same
rounds is taken over, all in one native call. `bandwidth` is its share of that; `bound` the most
that products allow at the rate of the same rounds (twice that for pairs of bfloat16; widening, sums
and softmax come on top); `roofline` the share of what the lesser of memory and products allows.
Prefill: whole causal prompts on one thread, against `scaled_dot_product_attention` in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from common import Patience, Report, geometric_mean, interleave, parse_numbers, sample
from dovetail.codegen.catalog import (
    HeadShape,
    KernelRequest,
    kernel_request,
    multiplies_pairs,
)
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.attention import AttentionRun
from dovetail.compiler.measure.meter import DECODE, PREFILL, AttentionCase, Candidate
from dovetail.compiler.measure.roofline import (
    measure_fma_rate,
    measure_read_bandwidth,
    stream_bytes,
)
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.compiler.rules.tables import OWN_SCHEDULES
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.dtypes import DTYPES
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.tape import Team
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import read_hardware

DTYPE_NAMES = ("f32", "bf16", "f16")
HEAD_DIMS, GROUPS, KV_HEADS = (64, 128), (1, 4, 8), 8
LENGTHS = (128, 512, 1024, 2048)
BAR_THREADS, BAR_LENGTH = 2, 1024
"""The threads, and least context, of the cells whose mean is a figure of its own."""
SPIN = 2000
SHOWN = (
    *("kernel", "dtype", "head_dim", "group", "length", "threads"),
    *("gbytes", "bandwidth", "bound", "roofline", "gflops", "vs_torch"),
)


def head_shape(case: AttentionCase) -> HeadShape:
    """Return what the case's decode kernel is made for."""
    return HeadShape(case.head_dim, case.n_q // case.n_kv)


def kernel_name(case: AttentionCase) -> str:
    """Return the name of the kernel that runs `case`."""
    heads = head_shape(case)
    suffix = f"_{heads.head_dim}_{heads.group}" if case.kind == DECODE else ""
    return f"{case.kind}_{case.dtype}{suffix}"


def open_library(cases: Iterable[AttentionCase]) -> KernelLibrary:
    """Build and load the kernels of `cases`: decode has one per dtype and shape."""
    target = host_target()
    requests: dict[str, KernelRequest] = {}
    for case in cases:
        request = kernel_request(case.kind, target, case.dtype, head_shape(case))
        name = kernel_name(case)
        requests[name] = replace(request, name=name)
        if case.kind == DECODE:
            merge = kernel_request(f"{DECODE}_merge", target, case.dtype)
            requests[merge.name] = merge
    built = build_library(
        LibrarySpec(target, tuple(requests.values()), name="attention", tvm_ffi=False)
    )
    return KernelLibrary(built.path, built.index)


def open_run(library: KernelLibrary, case: AttentionCase, pool_bytes: int) -> AttentionRun:
    """Return `case` bound to operands and to threads of its own."""
    team = Team(library, case.threads, SPIN)
    cpus = tuple(choose_pus(read_hardware(), case.threads))
    team.set_active(PhasePlan(threads=case.threads, cpus=cpus))
    return AttentionRun(library, team, case, pool_bytes)


def make_case(
    kind: str, dtype: str, heads: HeadShape, *, length: int, threads: int
) -> AttentionCase:
    """Return one token over `length` keys, or a prompt of `length`."""
    return AttentionCase(
        kind=kind,
        n_q=KV_HEADS * heads.group,
        n_kv=KV_HEADS,
        head_dim=heads.head_dim,
        rows=1 if kind == DECODE else length,
        context=length,
        dtype=dtype,
        threads=threads,
    )


def measure_decode(library: KernelLibrary, case: AttentionCase, rounds: int) -> dict[str, Any]:
    """Return a row: what one token reads per second, and its share of what this machine does."""
    run = open_run(library, case, stream_bytes(read_hardware(), case.threads))
    kernel = Candidate(kernel_name(case), OWN_SCHEDULES[DECODE])
    if not run.check(kernel):
        raise SystemExit(f"{kernel.kernel}: the numbers are wrong")
    size = 2 * case.n_kv * case.context * case.head_dim * DTYPES[case.dtype].size
    flop = 4 * case.n_q * case.context * case.head_dim
    seconds, reads, rates = [], [], []
    for _ in range(rounds):
        reads.append(1 / measure_read_bandwidth(case.threads, 2))
        seconds.append(run.bind(kernel, run.layers).run(run.team) / run.layers)
        rates.append(measure_fma_rate(case.threads, 1))
    best, read = sample(seconds).low, 1 / sample(reads).low
    at_once = 2 if multiplies_pairs(host_target(), case.dtype, head_shape(case)) else 1
    products, memory = flop / (at_once * max(rates)), size / read
    return {
        **row_head(case),
        "gbytes": 1e-9 * size / best,
        "bandwidth": memory / best,
        "bound": min(1.0, memory / products),
        "roofline": max(memory, products) / best,
    }


def measure_prefill(library: KernelLibrary, case: AttentionCase, rounds: int) -> dict[str, Any]:
    """Return a row: GFLOP/s of a causal prompt on one thread, and the ratio to torch's."""
    import torch

    torch.set_num_threads(1)
    run = open_run(library, case, 0)
    kernel = Candidate(kernel_name(case), make_schedule())
    if not run.check(kernel):
        raise SystemExit(f"{kernel.kernel}: the numbers are wrong")
    shape = (1, case.n_q, case.rows, case.head_dim)
    q, k, v = (torch.randn(shape) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = max(1, (1 << 19) // case.rows**2)
    found = interleave(
        {
            "ours": lambda: run.bind(kernel, calls).run(run.team),
            "torch": lambda: [attend(q, k, v, is_causal=True) for _ in range(calls)],
        },
        rounds,
        patience=Patience(0),
    )
    ours, theirs = found["ours"].low, found["torch"].low
    flop = 2 * case.n_q * case.rows * (case.rows + 1) * case.head_dim * calls
    return {**row_head(case), "gflops": 1e-9 * flop / ours, "vs_torch": theirs / ours}


def row_head(case: AttentionCase) -> dict[str, Any]:
    """Return what names a cell."""
    return {
        "kernel": case.kind,
        "dtype": case.dtype,
        "head_dim": case.head_dim,
        "group": case.n_q // case.n_kv,
        "length": case.context,
        "threads": case.threads,
    }


def is_at_bar(row: dict[str, Any]) -> bool:
    """Return whether a decode cell is one of those that the figures of the bar are made of."""
    return bool(row["threads"] == BAR_THREADS and row["length"] >= BAR_LENGTH)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means by dtype, of all cells and of those at the bar; the least ratio to torch."""
    found: dict[str, Any] = {}
    for key, dtype in product(("bandwidth", "roofline"), DTYPE_NAMES):
        cells = [row for row in rows if row["kernel"] == DECODE and row["dtype"] == dtype]
        found[f"{DECODE}_{key}_{dtype}"] = geometric_mean([row[key] for row in cells])
        at_bar = [row[key] for row in cells if is_at_bar(row)]
        found[f"{DECODE}_{key}_{dtype}_{BAR_THREADS}_threads"] = geometric_mean(at_bar)
        found[f"{DECODE}_min_{key}_{dtype}_{BAR_THREADS}_threads"] = min(at_bar, default=None)
    ratios = [row["vs_torch"] for row in rows if "vs_torch" in row]
    found[f"{PREFILL}_vs_torch"] = geometric_mean(ratios)
    found[f"{PREFILL}_min_vs_torch"] = min(ratios, default=None)
    return found


def main() -> None:
    """Measure all cells, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=parse_numbers, default=(1, 2), help="of decode: 1,2")
    parser.add_argument("--contexts", type=parse_numbers, default=(1024, 4096))
    parser.add_argument("--quick", action="store_true", help="one cell of each kind")
    options = parser.parse_args()
    usable = [n for n in options.threads if n <= read_hardware().usable_threads]
    decode = [
        make_case(DECODE, dtype, HeadShape(*shape), length=length, threads=threads)
        for threads, dtype, *shape, length in product(  # the stream is made anew for other threads
            usable, DTYPE_NAMES, HEAD_DIMS, GROUPS, options.contexts
        )
    ]
    prefill = [
        make_case(PREFILL, "f32", HeadShape(hd, 1), length=length, threads=1)
        for hd, length in product(HEAD_DIMS, LENGTHS)
    ]
    if options.quick:
        decode, prefill = decode[:1], prefill[:1]
    library = open_library([*decode, *prefill])
    config = {"rounds": options.rounds, "kv_heads": KV_HEADS}
    report = Report("attention", config)
    report.rows += [measure_decode(library, case, options.rounds) for case in decode]
    report.rows += [measure_prefill(library, case, options.rounds) for case in prefill]
    report.summary = summarise(report.rows)
    report.print(SHOWN)
    report.write(options.json)


if __name__ == "__main__":
    main()
