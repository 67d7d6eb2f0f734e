"""The topology benchmark runs alone and writes what the issue names."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.topology.hardware import dump_hardware, read_hardware

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "topology.py"


def run(file: Path, *options: object) -> dict[str, dict[str, float]]:
    command = [sys.executable, SCRIPT, *map(str, options), "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, float]] = json.loads(file.read_text())
    return report


def test_phases_of_other_numbers_of_processes_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    plans = importlib.import_module("plans")
    one, two = (PhasePlan(threads=2 // n, cpus=(0, 1)) for n in (1, 2))
    even = {
        "1 x 2": ServicePlan(processes=1, prefill=one, decode=one),
        "2 x 1": ServicePlan(processes=2, prefill=two, decode=two),
    }
    pairs = plans.uneven_pairs(even)
    assert pairs.keys() == {"1 x 2 -> 2 x 1", "2 x 1 -> 1 x 2"}
    pair = pairs["2 x 1 -> 1 x 2"]
    assert (pair.processes_of("prefill"), pair.processes_of("decode")) == (2, 1)
    assert (pair.prefill, pair.decode) == (two, one)
    assert plans.uneven_pairs({"1 x 2": even["1 x 2"]}) == {}


@pytest.mark.long
def test_all_reduce_is_compared_with_gloo_and_a_lock(tmp_path: Path) -> None:
    sizes = ("--sizes", "4096,131072", "--rounds", "2")
    report = run(tmp_path / "report.json", "--parts", "allreduce", *sizes)
    assert len(report["rows"]) == 6
    keys = {
        f"allreduce_vs_{name}_{size}" for name in ("gloo", "locked") for size in ("small", "large")
    }
    assert set(report["summary"]) == keys
    assert all(report["summary"][key] > 0 for key in keys)


@pytest.mark.long
def test_simulated_choices_are_compared_with_all_there_are(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "machine.json").write_bytes(dump_hardware(read_hardware("package:2 numa:2 core:12")))
    report = run(tmp_path / "report.json", "--parts", "simulated", "--corpus", corpus)
    (row,) = report["rows"]
    assert row["case"] == "machine, 16 PUs"
    count = int(row["contestant"].split()[2])
    assert count > 50
    assert report["summary"]["sim_plan_vs_exhaustive_min"] == row["ratio"] >= 0.98


@pytest.mark.long
def test_plans_are_compared(tmp_path: Path) -> None:
    report = run(tmp_path / "report.json", "--parts", "plans", "--model", "tiny", "--rounds", "3")
    assert 0 < report["summary"]["plan_vs_best"] <= report["summary"]["plan_vs_best_fixed"]
    cells = {(row["case"], row["contestant"]) for row in report["rows"]}
    assert {("prefill", "chosen"), ("decode", "chosen"), ("decode", "1 x 1")} <= cells
