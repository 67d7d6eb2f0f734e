"""The TIR backend's kernels beside the C road's: same operands, same thread, interleaved.

Run `python benchmarks/backends.py --json F` (a minute; needs the extra `tvm`). Operands stay in the
caches, so that it is the code that is compared. `equal`: the results have the same bits.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import Patience, Report, geometric_mean, interleave
from dovetail.codegen.catalog import KernelRequest, load_kernel_module
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.ir.formats import FORMATS
from tir import build_tir_kernel

BATCH_SECONDS = 0.06
ROWS = (1, 8, 32, 128)
COLUMNS, DEPTH = 1024, 1024
"""N and K of the products; the length of a row of the norm is K."""
TILES = {"avx512": (14, 2), "avx2": (6, 1), "neon": (6, 1), "generic": (2, 1)}
SCHEDULE = {"grid_m": 1, "grid_n": 1, "grid_k": 1, "block_n": 1, "nth": 1}
"""One thread, all of K at once; other schedule values are 0, the tile's height is set."""
SHOWN = ("kernel", "m", "c_gflops", "tir_gflops", "ratio", "equal", "noisy")

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its operands by parameter name; `result` names what it writes."""

    request: KernelRequest
    values: Values
    result: str
    flop: float


def random(*shape: int) -> np.ndarray:
    """Return standard normal float32."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def norm_case(m: int) -> Case:
    """Return RMSNorm of `m` rows."""
    values = {"T": m, "H": DEPTH, "x": random(m, DEPTH), "ldx": DEPTH, "w": random(DEPTH)}
    values |= {"eps": 1e-5, "out": np.zeros((m, DEPTH), np.float32), "ldo": DEPTH}
    return Case(KernelRequest("norm", "rmsnorm", {}, "rmsnorm"), values, "out", 4.0 * m * DEPTH)


def gemm_case(m: int, dtype: str, *, silu: bool) -> Case:
    """Return a product of `m` rows; with `silu`, of gate and up."""
    tile, panels = TILES[host_target().isa]
    panels = max(panels, 2) if silu else panels
    kernel = "gemm_silu" if silu else "gemm_linear"
    weight = random(COLUMNS * (2 if silu else 1), DEPTH)
    if dtype == "bf16":
        weight = (weight.view(np.uint32) >> 16).astype(np.uint16)
    packed = FORMATS[dtype].pack(weight)
    binding = {"W": dtype, "MR": tile if not silu else min(tile, 14), "NP": panels}
    values = {"M": m, "N": COLUMNS, "K": DEPTH, "A": random(m, DEPTH), "lda": DEPTH, "B": packed}
    values |= {"panel_stride": packed.shape[1], "C": np.zeros((m, COLUMNS), np.float32)}
    values |= {"ldc": COLUMNS, "m_tile": tile}
    request = KernelRequest("gemm", kernel, binding, f"{kernel}_{dtype}")
    return Case(request, values, "C", 2.0 * m * COLUMNS * DEPTH * (2 if silu else 1))


def cases(m: int) -> tuple[Case, ...]:
    """Return all cases of `m` rows."""
    return (
        norm_case(m),
        gemm_case(m, "f32", silu=False),
        gemm_case(m, "bf16", silu=False),
        gemm_case(m, "f32", silu=True),
    )


def arguments(case: Case) -> list[float | int]:
    """Return the kernel's arguments in order, arrays as addresses; what is not named is 0."""
    function = load_kernel_module(case.request.module).function(case.request.kernel)
    given = {**SCHEDULE, **case.values}
    found = [given.get(param.name, 0) for param in function.params]
    return [value.ctypes.data if isinstance(value, np.ndarray) else value for value in found]


def to_c(value: float) -> Any:
    """Return a C argument."""
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


def build_both(case: Case) -> dict[str, Callable[[], None]]:
    """Return the case's kernel of both backends, bound to the operands."""
    spec = LibrarySpec(host_target(), (case.request,), name="backends", team=False, tvm_ffi=False)
    function = ctypes.CDLL(str(build_library(spec).path))[case.request.name]
    kernel, plain = build_tir_kernel(case.request), arguments(case)
    converted = [to_c(value) for value in plain]
    return {"c": lambda: function(*converted), "tir": lambda: kernel(*plain)}


def measure(case: Case, sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    """Return one row of the report."""
    m = case.values.get("M", case.values.get("T"))
    results = []
    for side in sides.values():
        case.values[case.result][:] = np.nan
        side()
        results.append(case.values[case.result].copy())
    if not np.allclose(*results, rtol=1e-4, atol=1e-4):
        raise SystemExit(f"{case.request.name}: the backends differ at M={m}")
    start = time.perf_counter()
    sides["c"]()
    calls = max(1, math.ceil(BATCH_SECONDS / (time.perf_counter() - start)))
    batches = {
        name: lambda side=side: [side() for _ in range(calls)] for name, side in sides.items()
    }
    samples = interleave(batches, rounds, patience=Patience(0))
    speed = {name: 1e-9 * case.flop * calls / found.low for name, found in samples.items()}
    return {
        "kernel": case.request.name,
        "m": m,
        "c_gflops": speed["c"],
        "tir_gflops": speed["tir"],
        "ratio": speed["tir"] / speed["c"],
        "equal": bool(np.array_equal(*results)),
        "noisy": sum(found.noisy for found in samples.values()),
    }


def main() -> None:
    """Measure all cases, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one row count")
    options = parser.parse_args()
    report = Report("backends", {"rounds": options.rounds, "threads": 1})
    for m in ROWS[1:2] if options.quick else ROWS:
        for case in cases(m):
            report.rows.append(measure(case, build_both(case), options.rounds))
    report.summary = {
        "geomean_tir_vs_c": geometric_mean(row["ratio"] for row in report.rows),
        "equal": sum(row["equal"] for row in report.rows) / len(report.rows),
    }
    report.print(SHOWN)
    report.write(options.json)


if __name__ == "__main__":
    main()
