"""The tuning benchmark runs alone: every policy and ablation is compared with ours, cells once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest

from dovetail.topology.hardware import read_hardware
from tests.repository import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "benchmarks"))

import tuning
from tvm_cells import TvmError

SCRIPT = ROOT / "benchmarks" / "tuning.py"
RIVALS = {"roller", "dietcode", "mikpoly", "default"}
ABLATIONS = {"no micro-kernel choice", "no polymerization", "no split-K", "no loop orders"}
ABLATIONS |= {"no reuse"}
WINDOWS = {f"window {sigma}" for sigma in (5, 10, 15, 20)}


@pytest.mark.long
def test_policies_and_ablations_are_compared_and_a_run_is_resumed(tmp_path):
    file = tmp_path / "report.json"
    options = ["--quick", "--effort", "fast", "--shapes", "256x128", "--m", "1,5", "--threads", "1"]
    options += ["--seconds", "1", "--json", file]
    subprocess.run([sys.executable, SCRIPT, *options, "--parts", "policies"], check=True)
    policies = json.loads(file.read_text())["rows"]
    subprocess.run([sys.executable, SCRIPT, *options, "--resume"], check=True)
    report = json.loads(file.read_text())
    assert report["rows"][: len(policies)] == policies
    assert report["summary"]["sandwich"].keys() == RIVALS
    assert report["summary"]["ablations"].keys() == ABLATIONS | WINDOWS
    for row in report["rows"]:
        assert row["gflops"] > 0 and (row["n"], row["k"]) == (256, 128)
        assert row["policy"] != "sandwich" or row["vs_sandwich"] == 1
    assert {row["m"] for row in report["rows"]} == {1, 5}


def test_each_part_of_the_search_is_switched_off_once():
    table = tuning.ablations(SimpleNamespace(effort="full"))
    whole = table["sandwich"]
    switches = {field.name for field in fields(whole) if getattr(whole, field.name) is True}
    changed = [
        [name for name in switches if getattr(policy, name) is not True]
        for name, policy in table.items()
        if name in ABLATIONS
    ]
    assert sorted(changed) == sorted([name] for name in switches)


def test_cells_that_a_report_has_are_not_timed_again(monkeypatch):
    options = SimpleNamespace(
        threads=1, effort="fast", seconds=0.0, m=(1,), quick=False, json=None, trials=8,
        long_trials=16, cells=len(tuning.CELLS), tvm_python=sys.executable,
    )  # fmt: skip
    first, second, *_, last = cells = list(tuning.cells(options))
    row = {
        "part": "tvm",
        "policy": "MetaSchedule",
        "ratio": 1.0,
        "cost_ratio": 1.0,
        "cost_ratio_of_searched": 1.0,
    }
    report = SimpleNamespace(rows=[], summary={}, write=lambda path: None)
    asked = []

    def compare(setting, python, cell, task, found):
        asked.append(cell)
        if cell == second:
            raise TvmError("no such kernel")
        return row | {"m": cell.m, "n": cell.n, "k": cell.k, "trials": cell.trials}

    monkeypatch.setattr(tuning, "compare_with_tvm", compare)
    monkeypatch.setattr(tuning, "sandwich", lambda options: tuning.POLICIES["default"])
    run = tuning.Run(SimpleNamespace(hardware=read_hardware()), None, options)
    report.rows.append(compare(None, None, first, None, None))
    asked.clear()
    tuning.measure_tvm(run, report)
    assert asked == cells[1:] and last.trials == 16  # and not the one that is there
    asked.clear()
    tuning.measure_tvm(run, report)
    assert asked == [second]
