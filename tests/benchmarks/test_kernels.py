"""The GEMM benchmark runs alone and writes what the issue names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


QUICK = ["--quick", "--m", "1,3", "--rounds", "1", "--search-seconds", "0", "--patience", "0"]
SUMMARY = {
    "geomean_vs_torch",
    "min_vs_torch",
    "geomean_vs_best_peer",
    "geomean_vs_best_peer_small_m",
    "roofline_geomean",
    "roofline_under_load_geomean",
}


def run(file: Path, *options: str) -> dict:
    subprocess.run([sys.executable, SCRIPT, *QUICK, *options, "--json", file], check=True)
    return json.loads(file.read_text())


@pytest.mark.long
def test_a_run_compares_all_peers_and_resumes(tmp_path):
    file = tmp_path / "report.json"
    first = run(file, "--threads", "1")
    assert first["benchmark"] == "kernels"
    assert first["summary"].keys() >= SUMMARY
    cells = [(r["n"], r["k"], r["m"], r["threads"]) for r in first["rows"]]
    assert cells == [(2048, 2048, 1, 1), (2048, 2048, 3, 1)]
    peers = [peer["name"] for peer in first["config"]["peers"]]
    assert "torch" in peers and all(peer["version"] for peer in first["config"]["peers"])
    flops, bandwidth = (
        1e9 * median(row[column] for row in first["rows"]) for column in ("peak_gflops", "read_gbs")
    )
    for row in first["rows"]:
        n, k, m = row["n"], row["k"], row["m"]
        least = max(2 * n * k * m / flops, 4 * (n * k + m * k + m * n) / bandwidth)
        assert row["roofline_fraction"] == pytest.approx(least / row["ours_seconds"])
        loaded = 2 * n * k * m / (1e9 * row["peak_under_load_gflops"])
        least = max(loaded, 4 * (n * k + m * k + m * n) / bandwidth)
        assert row["roofline_fraction_under_load"] == pytest.approx(least / row["ours_seconds"])
        speeds = {name: row[f"{name}_gflops"] for name in peers}
        assert min(row["ours_gflops"], row["roofline_fraction"], *speeds.values()) > 0
        assert row["ratio"] == pytest.approx(row["ours_gflops"] / speeds["torch"])
        assert row["best_peer"] == max(speeds, key=speeds.get)
        assert row["vs_best_peer"] == pytest.approx(row["ours_gflops"] / max(speeds.values()))
    again = run(file, "--threads", "1", "--resume")
    figures = [[row["ours_seconds"] for row in report["rows"]] for report in (first, again)]
    assert figures[0] == figures[1]
