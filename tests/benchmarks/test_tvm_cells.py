"""MetaSchedule's cells: tuned once per CPU, kept with its record; what its process says is read."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import tvm_cells
from common import machine_facts
from tvm_cells import Cell, TvmError, TvmProduct

CELL = Cell(m=4, n=32, k=16, threads=2, trials=64, tuned=128)
PYTHON = Path(sys.executable)
ROUNDS = [[50, 1.5], [100, 3.0], [128, 4.0]]
WORKER = f"""
import json, os, sys
from pathlib import Path
verb, *numbers = sys.argv[1:6]
folder = Path(sys.argv[6])
print("a line of TVM's")
if verb == "tune":
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "runs").open("a") as file:
        spin = os.environ["TVM_THREAD_POOL_SPIN_COUNT"]
        print(numbers, os.environ["TVM_NUM_THREADS"], spin, "PYTHONPATH" in os.environ, file=file)
    if len((folder / "runs").read_text().splitlines()) < 2:
        sys.exit(3)
    print(json.dumps({ROUNDS}))
else:
    print(json.dumps({{"error": 1e-6, "packed": numbers[3] == "64"}}), flush=True)
    for line in sys.stdin:
        if int(line) > 9:
            sys.exit(3)
        print("another", json.dumps({{"seconds": int(line) / 2}}), sep="\\n", flush=True)
"""
"""Speaks as `tuning_tvm.py` does; its first tuning fails."""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(tvm_cells, "WORKER", script)
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "somewhere")


def test_a_cell_is_tuned_once_and_kept_with_the_machine_s_record(worker: None) -> None:
    folder = tvm_cells.cell_folder(CELL)
    with pytest.raises(TvmError, match="ended with 3"):
        tvm_cells.tune(PYTHON, CELL)
    assert not (folder / "done.json").exists()  # the next run tries again
    found = tvm_cells.tune(PYTHON, CELL)
    assert (found.records, found.seconds) == (100, 3.0)  # the first round with 64 trials
    assert found.cpu == machine_facts()["cpu"]
    assert json.loads((folder / "done.json").read_text())["machine"] == machine_facts()
    whole = tvm_cells.tune(PYTHON, replace(CELL, trials=128))
    assert (whole.records, whole.seconds) == (128, 4.0)
    wanted = str(["4", "32", "16", "128"]) + f" 2 {tvm_cells.SPIN} False"  # spins as ours does
    assert (folder / "runs").read_text().splitlines() == [wanted] * 2


def test_another_cpu_has_cells_of_its_own(worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tvm_cells.cell_folder(CELL)
    monkeypatch.setattr(tvm_cells, "machine_facts", lambda: {"cpu": "Another (R) CPU"})
    assert tvm_cells.cell_folder(CELL).parts[-2:] == ("Another-R-CPU", here.name)


def test_a_product_tells_seconds_until_its_process_ends(worker: None) -> None:
    with TvmProduct(PYTHON, CELL, copies=3) as product:
        assert (product.error, product.packed) == (1e-6, True)
        assert product.run(4) == 2.0
        with pytest.raises(TvmError, match="its process ended"):
            product.run(10)
