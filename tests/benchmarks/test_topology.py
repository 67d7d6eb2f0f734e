"""The topology benchmark runs alone and writes what the issue names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "topology.py"


def run(file: Path, *options: object) -> dict[str, dict[str, float]]:
    command = [sys.executable, SCRIPT, *map(str, options), "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, float]] = json.loads(file.read_text())
    return report


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
def test_plans_are_compared(tmp_path: Path) -> None:
    report = run(tmp_path / "report.json", "--parts", "plans", "--model", "tiny", "--rounds", "3")
    assert 0 < report["summary"]["plan_vs_best"] <= 1
    assert {row["contestant"] for row in report["rows"]} >= {"chosen", "one thread"}
