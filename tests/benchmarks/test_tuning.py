"""The tuning benchmark runs alone: every policy and ablation is compared with ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuning.py"
RIVALS = {"roller", "dietcode", "mikpoly", "default"}
ABLATIONS = {"no micro-kernel choice", "no polymerization", "no split-K", "no reuse"}
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
