"""The GEMM benchmark runs alone and writes what the issue names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


def test_a_short_run_writes_its_report(tmp_path):
    file = tmp_path / "report.json"
    options = ["--quick", "--m", "1,3", "--threads", "1", "--rounds", "1"]
    options += ["--search-seconds", "0", "--patience", "0"]
    subprocess.run([sys.executable, SCRIPT, *options, "--json", file], check=True)
    report = json.loads(file.read_text())
    assert report["benchmark"] == "kernels"
    assert set(report["summary"]) >= {"geomean_vs_torch", "min_vs_torch", "roofline_geomean"}
    rows = report["rows"]
    assert [(r["n"], r["k"], r["m"], r["threads"]) for r in rows] == [
        (2048, 2048, 1, 1),
        (2048, 2048, 3, 1),
    ]
    for row in rows:
        assert min(row["ours_gflops"], row["torch_gflops"], row["roofline_fraction"]) > 0
        assert row["ratio"] == pytest.approx(row["ours_gflops"] / row["torch_gflops"])
    assert report["config"]["peers"][0]["version"]
