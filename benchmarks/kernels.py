"""Generated GEMM kernels against torch/MKL, oneDNN, OpenVINO and OpenBLAS, interleaved.

Run `python benchmarks/kernels.py --json F`; `--quick` takes a minute, all cells about 30 on two
cores, and `--resume` goes on where a run that wrote F was stopped. `--dtype bf16|int8|int4` takes
weights of that type, with the peers that have products of it; ours gets float32 rows and rounds
them in the call. Results are compared with float64 of the weight before it was rounded. Each cell
cycles through copies of the weight that together are at least 4x the last-level cache. A time is
that of a batch of calls, divided by their number; a batch during which other processes were busy is
run again.
`roofline_fraction` is the time that the multiply-add rate and read bandwidth allow at least, over
ours; both are measured beside every cell, and the run's median counts. `..._under_load` takes the
rate right after batches of ours instead: a register loop after a pause runs at a higher clock.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from common import (
    QUIET_TRIES,
    Patience,
    Report,
    Sample,
    add_report_options,
    geometric_mean,
    interleave,
    open_report,
    origin,
    parse_numbers,
    parse_shapes,
    show,
)
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import get_target, host_target
from dovetail.compiler.formats.weight_dtype import CHOICES
from dovetail.compiler.measure.expected import Wide, rows_to_check
from dovetail.compiler.measure.meter import CACHE_FACTOR, Meter
from dovetail.compiler.measure.roofline import measure_fma_rate, measure_read_bandwidth
from dovetail.compiler.rules.schedules import LINEAR, GemmOp, gemm_requests
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.schedule import Row
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.tape import Team
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import read_hardware
from gemm_ours import Operands, OurGemm, Setting, pick_rows, row_for
from gemm_peers import PEERS, Peer, Product, as_array, describe_peers, present_peers

SHAPES = (
    *((6144, 2048), (2048, 2048), (11008, 2048), (2048, 5504)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
)
"""(N, K) of the projections of a Llama of 1.3B parameters and of Llama 3 8B."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
QUICK_SHAPES, QUICK_ROWS = SHAPES[1:2], (1, 16, 512)
SMALL_M = range(2, 33)
"""Row counts of small decode batches, for which the summary has a mean of its own."""
BATCH_SECONDS = 0.1
"""Least duration of a timed batch: shorter ones cannot be judged as disturbed or not."""
SETTLE_SECONDS, SETTLE_AT_MOST = 0.005, 1.0
"""Pauses before a batch until the threads of the library that ran before no longer spin: OpenBLAS's
do for 0.1 s."""
LOW_RATIO, MEASURED_AGAIN = 0.95, 3
"""A cell below this share of torch's speed is measured again, so many times at most."""
UNDER_LOAD = 3
"""Batches after which the multiply-add rate is measured at the clock they leave, and its passes:
the first one begins slowly (vectors were idle for a while), the clock stays for milliseconds."""
SPIN = 2000
ERRORS = {"f32": 1e-5, "bf16": 1e-2, "int8": 3e-2, "int4": 0.2}
"""How large errors may be, all together, beside a right result: rounding weights and rows to 8 bits
makes 0.01 of it, weights to 4 bits 0.1."""
LINE = 4
"""How many times as large the error of one row or column may be, beside what is usual in one: else
a wrong one among thousands would be lost in the sum."""
LAST_ROWS = 16
"""Rows at the end that are compared, beside some others: the last tile of any kernel ends there."""
CHECKED_COLUMNS = 2048
"""Columns whose weights are widened to float64 at once."""
ISA_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    *sorted({p.held_by for peers in PEERS.values() for p in peers.values() if p.held_by}),
)
"""What holds peers to an older instruction set, for comparisons with `--target`. Those for which
there is nothing are left out of `vs_best_held_peer`."""
SPEEDS = {f"{name}_gflops" for peers in PEERS.values() for name in peers if name != "torch"}
ROOFLINES = {
    "roofline_geomean": "roofline_fraction",
    "roofline_under_load_geomean": "roofline_fraction_under_load",
}
"""Keys of the summary: means of columns that only float32 has."""
SAME = ("dtype", "target", "search_seconds", "peers")
"""Settings in which a report must agree with the run that goes on with it."""


def shown_columns(dtype: str) -> tuple[str, ...]:
    """Return the columns of the printed table; the JSON file has more."""
    speeds = (f"{name}_gflops" for name in ("ours", *PEERS[dtype]))
    fraction = ("roofline_fraction",) if dtype == "f32" else ()
    return ("threads", "n", "k", "m", *speeds, "ratio", "vs_best_peer", *fraction, "noisy")


@dataclass(frozen=True, slots=True)
class Roofline:
    """FLOP and bytes per second that this machine reaches."""

    flops: float
    bandwidth: float

    def seconds(self, n: int, k: int, m: int) -> float:
        """Return the least time of one product, whose operands and result pass memory once."""
        moved = 4 * (n * k + m * k + m * n)
        return max(2 * n * k * m / self.flops, moved / self.bandwidth)


@dataclass(frozen=True, slots=True)
class Shape:
    """One (N, K) and thread count with everybody's weights, of one type, in place."""

    dtype: str
    setting: Setting
    operands: Operands
    team: Team
    rows: tuple[Row, ...]
    peers: Mapping[str, Peer]


@dataclass(slots=True)
class Timed:
    """A cell's seconds per call and samples, by side; `ours` is among them."""

    seconds: dict[str, float] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Return our speed over torch's."""
        return self.seconds["torch"] / self.seconds["ours"]


def batch_size(run: Product, copies: int) -> int:
    """Return how many calls make a batch of BATCH_SECONDS; at least one."""
    start = time.perf_counter()
    run(copies)
    once = (time.perf_counter() - start) / copies
    return max(1, math.ceil(BATCH_SECONDS / once))


def check(shape: Shape, sides: Mapping[str, Product], m: int) -> None:
    """Stop unless all sides give numbers, and some rows are those of float64, in all columns."""
    operands, rows = shape.operands, sorted({*rows_to_check(m, 0), *range(m)[-LAST_ROWS:]})
    operands.c[:] = np.nan
    weight, a = operands.plain[0], operands.dense[rows].astype(np.float64)
    parts = (weight[i : i + CHECKED_COLUMNS] for i in range(0, operands.n, CHECKED_COLUMNS))
    wanted = np.concatenate([a @ part.T.astype(np.float64) for part in parts], axis=1)
    for name, run in sides.items():
        found = as_array(run(1))
        error = worst_error(found[rows], wanted)
        if not (error < ERRORS[shape.dtype] and np.isfinite(found).all()):
            n, k = operands.n, operands.k
            raise SystemExit(f"{name}: wrong result at M={m}, N={n}, K={k}: {error:.2e}")


def worst_error(found: Wide, wanted: Wide) -> float:
    """Return the relative error of all together, or that of one row or column over LINE if more."""
    square = (found - wanted) ** 2
    lines = (square.mean(axis).max() / LINE**2 for axis in (0, 1))
    return float(np.sqrt(np.max([square.mean(), *lines]) / np.mean(wanted**2)))


def settle() -> None:
    """Wait until this process takes next to no CPU time while it sleeps."""
    give_up = time.perf_counter() + SETTLE_AT_MOST
    while time.perf_counter() < give_up:
        spent = time.process_time()
        time.sleep(SETTLE_SECONDS)
        if time.process_time() - spent < SETTLE_SECONDS / 10:
            return


def time_sides(shape: Shape, sides: Mapping[str, Product]) -> Timed:
    """Return the times of all sides, measured in turns."""
    copies = len(shape.operands.plain)
    calls = {name: batch_size(run, copies) for name, run in sides.items()}
    batches = {name: lambda run=run, n=calls[name]: run(n) for name, run in sides.items()}
    setting = shape.setting
    samples = interleave(
        batches,
        setting.rounds,
        warmups=0,
        patience=setting.patience,
        before=settle,
    )
    return Timed({name: samples[name].median / calls[name] for name in sides}, samples)


def measure_cell(shape: Shape, m: int) -> dict[str, Any]:
    """Return one row of the report, all but its share of the roofline."""
    row = row_for(shape.rows, m)
    ours = OurGemm(shape.setting, shape.team, row, shape.operands, m)
    sides: dict[str, Product] = {name: peer.bind(m) for name, peer in shape.peers.items()}
    sides["ours"] = ours
    check(shape, sides, m)
    timed, again = time_sides(shape, sides), 0
    while timed.ratio < LOW_RATIO and again < MEASURED_AGAIN:
        timed, again = max(timed, time_sides(shape, sides), key=lambda t: t.ratio), again + 1
    flop = 2 * shape.operands.n * shape.operands.k * m
    best = min(shape.peers, key=timed.seconds.__getitem__)
    held = [timed.seconds[n] for n, peer in shape.peers.items() if peer.held_by in os.environ]
    roofline = {}
    if shape.dtype == "f32":
        target = get_target(shape.setting.built.index.target)
        roofline = measure_roofline(ours, shape.team.threads, target)
    return {
        **origin(),
        "n": shape.operands.n,
        "k": shape.operands.k,
        "m": m,
        "threads": shape.team.threads,
        **{f"{name}_gflops": 1e-9 * flop / timed.seconds[name] for name in ("ours", *shape.peers)},
        "ratio": timed.ratio,
        "vs_best_peer": timed.seconds[best] / timed.seconds["ours"],
        "best_peer": best,
        "setting": {name: peer.chosen for name, peer in shape.peers.items() if peer.chosen},
        **({"vs_best_held_peer": min(held) / timed.seconds["ours"]} if held else {}),
        "measured_again": again,
        "ours_seconds": timed.seconds["ours"],
        **roofline,
        **{f"{name}_spread": found.spread for name, found in timed.samples.items()},
        "noisy": sum(found.noisy for found in timed.samples.values()),
        "kernel": row.kernel,
        "schedule": list(row.schedule),
    }


def measure_roofline(ours: OurGemm, threads: int, target: Target) -> dict[str, float]:
    """Return what this machine does at most here and now with a target's vectors, as columns.

    The rate of multiply-adds is measured a second time, at the clock that batches of ours leave.
    """
    settle()
    columns = {
        "peak_gflops": 1e-9 * measure_fma_rate(threads, target=target),
        "read_gbs": 1e-9 * measure_read_bandwidth(threads),
    }
    calls, rates = batch_size(ours, 1), []
    for _ in range(UNDER_LOAD):
        ours(calls)
        rates.append(measure_fma_rate(threads, UNDER_LOAD, target))
    return columns | {"peak_under_load_gflops": 1e-9 * median(rates)}


def add_roofline(rows: Sequence[dict[str, Any]]) -> None:
    """Set each row's share of the roofline: the median of what stood beside its thread count's.

    Rows of float32; what this machine multiplies of others at most is not measured.
    """
    rows = [row for row in rows if "peak_gflops" in row]
    for threads in {row["threads"] for row in rows}:
        same = [row for row in rows if row["threads"] == threads]
        flops, bandwidth = (
            1e9 * median(row[column] for row in same) for column in ("peak_gflops", "read_gbs")
        )
        for row in same:
            least = Roofline(flops, bandwidth).seconds(row["n"], row["k"], row["m"])
            row["roofline_fraction"] = least / row["ours_seconds"]
            if "peak_under_load_gflops" in row:  # reports of earlier versions lack it
                loaded = Roofline(1e9 * row["peak_under_load_gflops"], bandwidth)
                least = loaded.seconds(row["n"], row["k"], row["m"])
                row["roofline_fraction_under_load"] = least / row["ours_seconds"]


def measure_shape(
    setting: Setting, size: tuple[int, int], dtype: str, threads: int, points: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one (N, K), type of weights and thread count."""
    n, k = size
    phase = PhasePlan(threads=threads, cpus=choose_pus(setting.hardware, threads))
    rows = pick_rows(setting, GemmOp("linear", LINEAR, n, k, CHOICES[dtype]), phase, points)
    operands = Operands(n, k, max(points), setting.hardware.l3_bytes, dtype)
    peers = {name: peer(operands, threads) for name, peer in present_peers(dtype).items()}
    team = Team(setting.library, threads, SPIN)
    team.set_active(phase)
    shape = Shape(dtype, setting, operands, team, rows, peers)
    for m in points:
        yield measure_cell(shape, m)
    team.close()


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures the issue names."""
    return {
        "geomean_vs_torch": geometric_mean(row["ratio"] for row in rows),
        "min_vs_torch": min(row["ratio"] for row in rows),
        "geomean_vs_best_peer": geometric_mean(row["vs_best_peer"] for row in rows),
        "geomean_vs_best_peer_small_m": geometric_mean(
            row["vs_best_peer"] for row in rows if row["m"] in SMALL_M
        ),
        **held_summary([row for row in rows if "vs_best_held_peer" in row]),
        **{
            f"geomean_vs_{name}": geometric_mean(
                row["ours_gflops"] / row[f"{name}_gflops"] for row in rows
            )
            for name in (key.removesuffix("_gflops") for key in rows[0] if key in SPEEDS)
        },
        "least_vs_best_peer_small_m": min(
            (row["vs_best_peer"] for row in rows if row["m"] in SMALL_M), default=None
        ),
        "cells_small_m_below_1": sum(
            row["vs_best_peer"] < 1 for row in rows if row["m"] in SMALL_M
        ),
        "least_vs_best_peer_elsewhere": min(
            (row["vs_best_peer"] for row in rows if row["m"] not in SMALL_M), default=None
        ),
        **{
            name: geometric_mean(row[column] for row in rows if column in row)
            for name, column in ROOFLINES.items()
            if column in rows[0]
        },
        "cells": len(rows),
        "cells_measured_again": sum(row["measured_again"] > 0 for row in rows),
        "noisy_batches": sum(row["noisy"] for row in rows),
    }


def held_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures beside the peers that were held to an instruction set, none without."""
    small = [row["vs_best_held_peer"] for row in rows if row["m"] in SMALL_M]
    means = {
        "geomean_vs_best_held_peer": geometric_mean(row["vs_best_held_peer"] for row in rows),
        "geomean_vs_best_held_peer_small_m": geometric_mean(small),
    }
    return {name: mean for name, mean in means.items() if mean is not None}


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_report_options(parser)
    parser.add_argument("--quick", action="store_true", help="one shape, three M, fewer rounds")
    parser.add_argument("--dtype", choices=sorted(ERRORS), default="f32", help="of the weights")
    parser.add_argument("--threads", type=parse_numbers, default=(1, 2), help="default 1,2")
    parser.add_argument("--shapes", type=parse_shapes, metavar="NxK,...", help="default all eight")
    parser.add_argument("--m", type=parse_numbers, help="rows, default 1,2,3,...,512")
    parser.add_argument("--target", help="kernels of another target than this machine's best")
    parser.add_argument("--rounds", type=int, help="timed batches per cell and side")
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=8.0,
        help="measured search per shape and thread count; 0 = schedules by rules alone",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        help="seconds the whole run may wait for other processes to finish, default 300",
    )
    return parser.parse_args()


def describe(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Return how the run was made."""
    return {
        "dtype": options.dtype,
        "target": setting.built.index.target,
        "compiler": setting.built.index.compiler,
        "search_seconds": setting.search_seconds,
        "rounds": setting.rounds,
        "batch_seconds": BATCH_SECONDS,
        "tries": QUIET_TRIES,
        "patience_seconds": setting.patience.seconds,
        "weight_pool_bytes": CACHE_FACTOR * setting.hardware.l3_bytes,
        "memory": "page-aligned arrays on all sides; our activation rows padded, the peers' dense",
        "activations": "ours float32, rounded in the call; the peers' as their settings say",
        "threads": list(options.threads),
        "peers_held_to": {n: os.environ[n] for n in ISA_VARIABLES if n in os.environ},
        "peers": describe_peers(present_peers(options.dtype)),
        "absent_peers": sorted(PEERS[options.dtype].keys() - present_peers(options.dtype)),
    }


def measure_all(report: Report, setting: Setting, options: argparse.Namespace) -> None:
    """Measure the cells that `report` lacks; write it after each."""
    points = options.m or (QUICK_ROWS if options.quick else ROWS)
    done = {(row["threads"], row["n"], row["k"], row["m"]) for row in report.rows}
    absent = {f"{name}_gflops" for name in report.config["absent_peers"]}
    progress = [
        c for c in shown_columns(options.dtype) if c != "roofline_fraction" and c not in absent
    ]
    for threads in options.threads:
        for size in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
            missing = [m for m in points if (threads, *size, m) not in done]
            if not missing:
                continue
            for row in measure_shape(setting, size, options.dtype, threads, missing):
                report.rows.append(row)
                print(*(show(row[column]) for column in progress), flush=True)
                add_roofline(report.rows)
                report.summary = summarize(report.rows)
                report.write(options.json)


def main() -> None:
    """Measure all cells, print the table, write the report."""
    options = parse_options()
    hardware = read_hardware()
    target = get_target(options.target) if options.target else host_target()
    # the library that the search of a model builds too
    requests = gemm_requests((CHOICES[options.dtype],), target)
    built = build_library(LibrarySpec(target, requests, name="tuning", tvm_ffi=False))
    pool = CACHE_FACTOR * hardware.l3_bytes
    meter = Meter(built.path, built.index, pool_bytes=pool) if options.search_seconds else None
    rounds = options.rounds or (3 if options.quick else 5)
    library = KernelLibrary(built.path, built.index)
    patience = Patience(options.patience)
    setting = Setting(hardware, built, library, meter, options.search_seconds, rounds, patience)
    report = open_report("kernels", options, describe(options, setting), SAME)
    start = time.perf_counter()
    measure_all(report, setting, options)
    report.summary = summarize(report.rows)
    report.summary["minutes"] = (time.perf_counter() - start) / 60
    if meter is not None:
        meter.close()
    report.print(shown_columns(options.dtype))
    report.write(options.json)


if __name__ == "__main__":
    main()
