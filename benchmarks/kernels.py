"""Generated GEMM kernels against torch: same inputs, same kind of memory, interleaved.

Run `python benchmarks/kernels.py --json F`. Each cell cycles through copies of the weight that
together are at least 4x the last-level cache. A time is that of a batch of calls, divided by their
number; a batch during which other processes were busy is run again. `roofline_fraction` is the time
that the multiply-add rate and read bandwidth measured beside the cell allow at least, over ours.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import QUIET_TRIES, Patience, Report, geometric_mean, interleave, parse_numbers
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.codegen.targets import get_target, host_target
from dovetail.compiler.measure import CACHE_FACTOR, Meter
from dovetail.compiler.roofline import measure_fma_rate, measure_read_bandwidth
from dovetail.compiler.schedules import (
    LINEAR,
    GemmOp,
    default_gemm_rows,
    gemm_requests,
)
from dovetail.compiler.search import SearchSetting, rows_from, search_op
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.model import PANEL
from dovetail.ir.schedule import Row
from dovetail.runtime import abi
from dovetail.runtime.library import KernelLibrary, Team
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec, read_hardware

SHAPES = ((6144, 2048), (2048, 2048), (11008, 2048), (2048, 5504))
"""(N, K) of the projections of a Llama of 1.3B parameters."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_SHAPES, QUICK_ROWS = SHAPES[1:2], (1, 16, 512)
PADDING = 16
"""Elements between rows of our activations, as in the runtime's buffers; torch gets dense rows."""
BATCH_SECONDS = 0.12
"""Least duration of a timed batch: shorter ones cannot be judged as disturbed or not."""
SPIN = 2000
RELATIVE_ERROR = 1e-5
SHOWN = (
    "threads",
    "n",
    "k",
    "m",
    "ours_gflops",
    "torch_gflops",
    "ratio",
    "roofline_fraction",
    "noisy",
)
"""Columns of the printed table; the JSON file has more."""
PROGRESS = tuple(column for column in SHOWN if column != "roofline_fraction")

Batch = Callable[[], None]


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
class Setting:
    """What all cells share."""

    hardware: HardwareSpec
    built: BuiltLibrary
    library: KernelLibrary
    meter: Meter | None
    search_seconds: float
    rounds: int
    patience: Patience


class Operands:
    """One weight in both layouts, in as many copies as outgrow the cache, and activations."""

    def __init__(self, n: int, k: int, m: int, cache_bytes: int) -> None:
        self.n, self.k = n, k
        count = max(2, math.ceil(CACHE_FACTOR * cache_bytes / (4 * n * k)))
        random = np.random.default_rng(0)
        weight = random.standard_normal((n, k), np.float32) * np.float32(k**-0.5)
        packed = weight.reshape(n // PANEL, PANEL, k).transpose(0, 2, 1)
        self.plain = [torch.from_numpy(weight.copy()) for _ in range(count)]
        self.packed = [np.ascontiguousarray(packed) for _ in range(count)]
        self.a = np.zeros((m, k + PADDING), np.float32)
        self.a[:, :k] = random.standard_normal((m, k), np.float32)
        self.dense = torch.from_numpy(np.ascontiguousarray(self.a[:, :k]))
        self.c = np.zeros((m, n + PADDING), np.float32)


class OurGemm:
    """Calls a schedule row on the copies of a weight in turn, each call one run of a bound tape."""

    def __init__(self, setting: Setting, team: Team, row: Row, operands: Operands, m: int) -> None:
        self._library, self._team, self._turn = setting.library, team, 0
        self._keep: list[Any] = [operands]
        self._tapes = [self._tape(row, operands, weight, m) for weight in operands.packed]
        self._args = (abi.Slot * 1)(abi.Slot(i=m))

    def _tape(self, row: Row, operands: Operands, weight: np.ndarray, m: int) -> abi.Tape:
        n, k, a, c = operands.n, operands.k, operands.a, operands.c
        values = [m, n, k, a.ctypes.data, a.shape[1], weight.ctypes.data, k * PANEL, 0, 0, 0]
        values += [c.ctypes.data, c.shape[1]]
        slots = (abi.Slot * len(values))(*(abi.Slot(i=value) for value in values))
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*row.schedule)
        rows = (abi.Row * 1)(abi.Row(1, self._library.entry(row.kernel), None, schedule))
        entries = (abi.Entry * 1)(abi.Entry(rows, 1, 0, 0, -1, 0))
        self._keep += [slots, rows, entries]
        return abi.Tape(entries, 1, slots, None, 0)

    def run(self, calls: int) -> None:
        """Run `calls` products."""
        for _ in range(calls):
            tape = self._tapes[self._turn % len(self._tapes)]
            self._turn += 1
            self._library.run(self._team, tape, self._args, range(1))


class TorchGemm:
    """torch.nn.functional.linear on the copies of a weight in turn."""

    def __init__(self, operands: Operands, m: int) -> None:
        self._weights, self._a, self._turn = operands.plain, operands.dense[:m], 0

    def run(self, calls: int) -> torch.Tensor:
        """Run `calls` products; return the last one's result."""
        out = self._a
        for _ in range(calls):
            weight = self._weights[self._turn % len(self._weights)]
            self._turn += 1
            out = torch.nn.functional.linear(self._a, weight)
        return out


def batch_size(run: Callable[[int], object], copies: int) -> int:
    """Return how many calls make a batch of BATCH_SECONDS; at least one round of the copies."""
    run(1)
    start = time.perf_counter()
    run(copies)
    once = (time.perf_counter() - start) / copies
    return max(1, math.ceil(BATCH_SECONDS / once))


def pick_rows(
    setting: Setting, op: GemmOp, phase: PhasePlan, points: Sequence[int]
) -> tuple[Row, ...]:
    """Return the schedule rows of a product: by rules, refined by a search if one is asked for."""
    target = get_target(setting.built.index.target)
    defaults = default_gemm_rows(op, target, phase.threads, setting.hardware.cache_bytes(3))
    if setting.meter is None:
        return defaults
    search = SearchSetting(target, setting.hardware, setting.meter)
    winners = search_op(search, op, phase, points, setting.search_seconds)
    return rows_from(winners, defaults)


def row_for(rows: Sequence[Row], m: int) -> Row:
    """Return the row that serves `m`."""
    return [row for row in rows if row.m_lo <= m][-1]


def check(operands: Operands, ours: OurGemm, peer: TorchGemm, m: int) -> None:
    """Stop unless both sides give the same product."""
    operands.c[:] = np.nan
    ours.run(1)
    wanted = peer.run(1).numpy()
    error = float(np.abs(operands.c[:m, : operands.n] - wanted).max() / np.abs(wanted).max())
    if not error < RELATIVE_ERROR:
        raise SystemExit(f"wrong result at M={m}, N={operands.n}, K={operands.k}: {error:.2e}")


def measure_cell(
    setting: Setting, operands: Operands, team: Team, row: Row, m: int
) -> dict[str, Any]:
    """Return one row of the report, all but the roofline."""
    ours, peer = OurGemm(setting, team, row, operands, m), TorchGemm(operands, m)
    check(operands, ours, peer, m)
    copies = len(operands.plain)
    ours_calls, peer_calls = batch_size(ours.run, copies), batch_size(peer.run, copies)
    batches: dict[str, Batch] = {
        "ours": lambda: ours.run(ours_calls),
        "torch": lambda: (peer.run(peer_calls), None)[1],
    }
    samples = interleave(batches, setting.rounds, patience=setting.patience)
    n, k = operands.n, operands.k
    ours_seconds = samples["ours"].median / ours_calls
    torch_seconds = samples["torch"].median / peer_calls
    return {
        "n": n,
        "k": k,
        "m": m,
        "threads": team.threads,
        "ours_gflops": 2e-9 * n * k * m / ours_seconds,
        "torch_gflops": 2e-9 * n * k * m / torch_seconds,
        "ratio": torch_seconds / ours_seconds,
        "ours_seconds": ours_seconds,
        "ours_spread": samples["ours"].spread,
        "torch_spread": samples["torch"].spread,
        "noisy": samples["ours"].noisy + samples["torch"].noisy,
        "kernel": row.kernel,
        "schedule": list(row.schedule),
    }


def measure_roofline(threads: int, before: Roofline | None = None) -> Roofline:
    """Measure this machine's roofline now; keep the better figures of `before`."""
    now = Roofline(measure_fma_rate(threads), measure_read_bandwidth(threads))
    if before is None:
        return now
    return Roofline(max(now.flops, before.flops), max(now.bandwidth, before.bandwidth))


def add_roofline(rows: Sequence[dict[str, Any]], rooflines: dict[int, Roofline]) -> None:
    """Set each row's share of the best roofline that its thread count showed during the run."""
    for row in rows:
        roofline = rooflines[row["threads"]]
        least = roofline.seconds(row["n"], row["k"], row["m"])
        row["roofline_fraction"] = least / row["ours_seconds"]
        row["peak_gflops"] = roofline.flops * 1e-9
        row["read_gbs"] = roofline.bandwidth * 1e-9


def measure_shape(
    setting: Setting, shape: tuple[int, int], threads: int, points: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one (N, K) and thread count."""
    n, k = shape
    phase = PhasePlan(threads=threads, cpus=choose_pus(setting.hardware, threads))
    rows = pick_rows(setting, GemmOp("linear", LINEAR, n, k, "f32"), phase, points)
    operands = Operands(n, k, max(points), setting.hardware.cache_bytes(3))
    team = setting.library.make_team(threads, SPIN)
    team.set_active(phase)
    torch.set_num_threads(threads)
    for m in points:
        yield measure_cell(setting, operands, team, row_for(rows, m), m)
    team.close()


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures the issue names."""
    return {
        "geomean_vs_torch": geometric_mean(row["ratio"] for row in rows),
        "min_vs_torch": min(row["ratio"] for row in rows),
        "roofline_geomean": geometric_mean(row["roofline_fraction"] for row in rows),
        "noisy_batches": sum(row["noisy"] for row in rows),
    }


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument("--quick", action="store_true", help="one shape, three M, fewer rounds")
    parser.add_argument("--threads", type=parse_numbers, default=(1, 2), help="default 1,2")
    parser.add_argument("--m", type=parse_numbers, help="rows, default 1,2,4,...,512")
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
        "dtype": "f32",
        "target": setting.built.index.target,
        "compiler": setting.built.index.compiler,
        "search_seconds": setting.search_seconds,
        "rounds": setting.rounds,
        "batch_seconds": BATCH_SECONDS,
        "tries": QUIET_TRIES,
        "patience_seconds": setting.patience.seconds,
        "weight_pool_bytes": CACHE_FACTOR * setting.hardware.cache_bytes(3),
        "memory": "numpy arrays on both sides; our activation rows padded, torch's dense",
        "threads": list(options.threads),
        "peers": [
            {
                "name": "torch.nn.functional.linear",
                "version": str(torch.__version__),
                "threads": "as the row says, set by torch.set_num_threads",
                "build": torch.__config__.show().splitlines()[1:8],
            }
        ],
    }


def main() -> None:
    """Measure all cells, print the table, write the report."""
    options = parse_options()
    hardware = read_hardware()
    target = get_target(options.target) if options.target else host_target()
    built = build_library(LibrarySpec(target=target, kernels=gemm_requests(("f32",), target)))
    pool = CACHE_FACTOR * hardware.cache_bytes(3)
    meter = Meter(built.path, built.index, pool_bytes=pool) if options.search_seconds else None
    rounds = options.rounds or (3 if options.quick else 5)
    library = KernelLibrary(built.path, built.index)
    patience = Patience(options.patience)
    setting = Setting(hardware, built, library, meter, options.search_seconds, rounds, patience)
    report = Report("kernels", describe(options, setting))
    points = options.m or (QUICK_ROWS if options.quick else ROWS)
    rooflines: dict[int, Roofline] = {}
    for threads in options.threads:
        for shape in QUICK_SHAPES if options.quick else SHAPES:
            rooflines[threads] = measure_roofline(threads, rooflines.get(threads))
            for row in measure_shape(setting, shape, threads, points):
                report.rows.append(row)
                print(*(_short(row[column]) for column in PROGRESS), flush=True)
    add_roofline(report.rows, rooflines)
    if meter is not None:
        meter.close()
    report.summary = summarize(report.rows)
    report.print(SHOWN)
    report.write(options.json)


if __name__ == "__main__":
    main()
