"""One cell of the tuning benchmark: our table's kernel and MetaSchedule's, timed in turns.

In: the setting of the machine, a cell, what our policy found. Out: a row of the report, or a
`TvmError` where the baseline cannot be had.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from common import Patience, Sample, sample
from dovetail.compiler.search.policy import SearchResult, SearchTask
from dovetail.compiler.search.rows import make_rows
from dovetail.runtime.native.tape import Team
from gemm_ours import Operands, OurGemm, Setting, row_for
from tvm_cells import SPIN, Cell, TvmError, TvmProduct, tune

TVM_ROUNDS = 9
BATCH_SECONDS, ERROR = 0.12, 1e-3


def compare_with_tvm(
    setting: Setting, python: Path, cell: Cell, task: SearchTask, found: SearchResult
) -> dict[str, Any]:
    """Return a row: our table's kernel and MetaSchedule's, timed in turns on cold weights."""
    tuned = tune(python, cell)
    hardware = setting.hardware
    operands = Operands(cell.n, cell.k, cell.m, hardware.l3_bytes)
    row = row_for(make_rows(task, found.choices), cell.m)
    with (
        closing(Team(setting.library, cell.threads, SPIN)) as team,
        TvmProduct(python, cell, len(operands.plain)) as theirs,
    ):
        if not theirs.error < ERROR:
            raise TvmError(f"its kernel is wrong by {theirs.error:.2e}")
        team.set_active(task.phase)
        ours = OurGemm(setting, team, row, operands, cell.m)
        pair = time_in_turns(ours, theirs, len(operands.plain), setting.patience)
    per_shape = found.seconds / len(task.points)
    flop = 2e-9 * cell.n * cell.k * cell.m
    return {
        "part": "tvm",
        "n": cell.n,
        "k": cell.k,
        "m": cell.m,
        "dtype": "f32",
        "threads": cell.threads,
        "policy": f"MetaSchedule {cell.trials}",
        "gflops": flop / pair["tvm"].low,
        "spread": pair["tvm"].spread,
        "ours_gflops": flop / pair["ours"].low,
        "ours_spread": pair["ours"].spread,
        "ratio": pair["tvm"].low / pair["ours"].low,
        "tuning_seconds": tuned.seconds,
        "trials": cell.trials,
        "records": tuned.records,
        "seconds_per_shape": per_shape,
        "cost_ratio": per_shape / tuned.seconds,
        "packed": theirs.packed,
        "tuned_on": tuned.cpu,
        "kernel": row.kernel,
    }


def time_in_turns(
    ours: OurGemm, theirs: TvmProduct, copies: int, patience: Patience
) -> dict[str, Sample]:
    """Return both sides' seconds per call, in rounds that begin in quiet."""

    def run_ours(calls: int) -> float:
        start = time.perf_counter()
        ours(calls)
        return time.perf_counter() - start

    sides = {"ours": run_ours, "tvm": theirs.run}
    calls = {}
    for name, side in sides.items():
        side(copies)
        calls[name] = max(1, math.ceil(BATCH_SECONDS * copies / side(copies)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(TVM_ROUNDS):
        patience.wait()
        for name, side in sides.items():
            times[name].append(side(calls[name]) / calls[name])
    return {name: sample(found) for name, found in times.items()}
