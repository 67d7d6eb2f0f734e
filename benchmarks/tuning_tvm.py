"""TVM MetaSchedule's side of the tuning benchmark: runs in an environment of its own, without us.

`tuning_tvm.py tune M N K TRIALS DIR` tunes C = A B^T for one static shape, B free to be packed, and
prints one JSON line. `tuning_tvm.py serve M N K TRIALS DIR COPIES` builds the best kernel of the
first so many trials, packs as many copies of B, checks it, then reads numbers of calls from stdin
and prints seconds.
TVM_NUM_THREADS sets the threads. The import of TVM's tensor intrinsics is made short, or every
builder process would run into its time-out.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import te
from tvm.ir.utils import derived_object
from tvm.target import Target, codegen


def import_intrinsics() -> None:
    """Import TVM's tensor intrinsics without a look-up of the source of every caller."""
    kept, inspect.getmodule = inspect.getmodule, lambda *_: None
    try:
        import tvm.s_tir.tensor_intrin  # noqa: F401
    finally:
        inspect.getmodule = kept


import_intrinsics()
from tvm.s_tir import meta_schedule as ms  # noqa: E402  (the intrinsics come first)

ROUND = 50
"""Trials between two lessons of MetaSchedule's cost model."""
WORKLOAD, RECORDS = "database_workload.json", "database_tuning_record.json"


@derived_object
class Clock(ms.measure_callback.PyMeasureCallback):  # type: ignore[misc]
    """Notes (trials on record, seconds since the start) after every round."""

    def __init__(self, database: Any, rounds: list[tuple[int, float]]) -> None:
        self.database, self.rounds, self.start = database, rounds, time.perf_counter()

    def apply(self, *_: Any) -> None:
        """Do so after one round."""
        self.rounds.append((len(self.database), time.perf_counter() - self.start))


def target() -> Target:
    """Return this CPU with the threads that TVM uses."""
    threads = tvm.runtime.num_threads()
    return Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": threads})


def product(m: int, n: int, k: int) -> Any:
    """Return the module to tune: one matrix product, B may be laid out anew."""
    a = te.placeholder((m, k), "float32", name="A")
    b = te.placeholder((n, k), "float32", name="B")
    r = te.reduce_axis((0, k), name="k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[j, r], axis=r), name="C")
    function = te.create_prim_func([a, b, c]).with_attr("layout_free_buffers", [1])
    return tvm.IRModule({"main": function})


def tune(m: int, n: int, k: int, trials: int, folder: Path) -> list[tuple[int, float]]:
    """Tune into `folder`, anew; return (trials so far, seconds so far) of every round."""
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
    folder.mkdir(parents=True)
    database = ms.database.JSONDatabase(work_dir=str(folder))
    rounds: list[tuple[int, float]] = []
    clock = Clock(database, rounds)
    ms.tune_tir(
        product(m, n, k),
        target=target(),
        work_dir=str(folder),
        database=database,
        measure_callbacks=[*ms.measure_callback.MeasureCallback.create("default"), clock],
        max_trials_global=trials,
        num_trials_per_iter=min(ROUND, trials),
        cost_model="xgb",
        seed=1,
        builder=ms.builder.LocalBuilder(max_workers=2, initializer=import_intrinsics),
        runner=ms.runner.LocalRunner(
            timeout_sec=10,
            evaluator_config=ms.runner.EvaluatorConfig(number=1, repeat=1, min_repeat_ms=50),
        ),
    )
    return rounds


def first_records(folder: Path, trials: int) -> Any:
    """Return the database as it was after so many trials."""
    with tempfile.TemporaryDirectory() as part:
        lines = (folder / RECORDS).read_text().splitlines(keepends=True)
        (Path(part) / RECORDS).write_text("".join(lines[:trials]))
        shutil.copy(folder / WORKLOAD, part)
        return ms.database.JSONDatabase(work_dir=part)


def build(
    m: int, n: int, k: int, trials: int, folder: Path
) -> tuple[Any, tuple[np.ndarray, ...] | None]:
    """Return the best kernel on record and where each element of B goes, None if it stays."""
    database, module = first_records(folder, trials), product(m, n, k)
    schedule = ms.tir_integration.compile_tir(database, module["main"], target())
    if schedule is None:
        raise SystemExit("no trial of this cell was right")
    clear = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)
    built = tvm.compile(clear(schedule.mod), target=target())["main"]
    try:
        block = schedule.get(schedule.get_sblock("B_global"))
    except tvm.error.TVMError:
        return built, None
    axes = np.meshgrid(np.arange(n), np.arange(k), indexing="ij", sparse=True)
    names = {str(v.var): axis for v, axis in zip(block.iter_vars, axes, strict=True)}
    places = [eval(str(r.min), {}, names) for r in block.writes[0].region]
    return built, tuple(np.broadcast_arrays(*map(np.asarray, places)))


def pack(weight: np.ndarray, places: tuple[np.ndarray, ...] | None) -> Any:
    """Return `weight` in the kernel's layout, aligned as TVM wants it."""
    if places is None:
        return tvm.runtime.tensor(weight)
    packed = np.empty([int(place.max()) + 1 for place in places], np.float32)
    packed[places] = weight
    return tvm.runtime.tensor(packed)


def serve(m: int, n: int, k: int, trials: int, folder: Path, copies: int) -> None:
    """Time as many calls as each line of stdin says, on the copies of B in turn."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((n, k), np.float32) * np.float32(k**-0.5)
    rows = random.standard_normal((m, k), np.float32)
    function, places = build(m, n, k, trials, folder)
    a, c = tvm.runtime.tensor(rows), tvm.runtime.tensor(np.zeros((m, n), np.float32))
    weights = [pack(weight, places) for _ in range(copies)]
    function(a, weights[0], c)
    error = float(np.abs(c.numpy() - rows @ weight.T).max())
    print(json.dumps({"error": error, "packed": places is not None}), flush=True)
    turn = 0
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            function(a, weights[turn % copies], c)
            turn += 1
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


def main() -> None:
    """Do what the command line says."""
    command, *numbers = sys.argv[1], *map(int, sys.argv[2:6])
    m, n, k, trials = numbers
    folder = Path(sys.argv[6])
    if command == "tune":
        print(json.dumps(tune(m, n, k, trials, folder)), flush=True)
    else:
        serve(m, n, k, trials, folder, int(sys.argv[7]))


if __name__ == "__main__":
    main()
