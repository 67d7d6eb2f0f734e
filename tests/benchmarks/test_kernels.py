"""The GEMM benchmark runs alone and writes what the issue names."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
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
        assert row["machine"] == first["machine"]["cpu"] and row["commit"]
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


def bench(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return bench("kernels")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4"])
def test_all_sides_give_the_product_of_float64_in_every_type(kernels: Any, dtype: str) -> None:
    """Each with its own weights; whoever computes another product is told by name."""
    operands = bench("gemm_ours").Operands(96, 128, 5, 1000, dtype)
    made = bench("gemm_peers").present_peers(dtype)
    peers = {name: peer(operands, 1) for name, peer in made.items()}
    shape = kernels.Shape(dtype, None, operands, None, (), peers)
    assert peers.keys() >= {"torch"}
    for m in (1, 5):
        sides = {name: peer.bind(m) for name, peer in peers.items()}
        kernels.check(shape, sides, m)
        wrong = {"wrong": lambda _, m=m: operands.dense[:m] @ operands.plain[0].T * 1.5}
        with pytest.raises(SystemExit, match=f"wrong: wrong result at M={m}"):
            kernels.check(shape, wrong, m)
    packed = operands.form.unpack(operands.packed[0], 96, 128)
    stored = packed if dtype != "bf16" else operands.form.dtype.widen(packed)
    error = np.linalg.norm(stored - operands.plain[0]) / np.linalg.norm(operands.plain[0])
    assert error < kernels.ERRORS[dtype]


def test_keys_tell_small_batches_from_others(kernels: Any) -> None:
    rows = [
        {"m": m, "ratio": best, "vs_best_peer": best, "measured_again": 0, "noisy": 0}
        | {"ours_gflops": best, "torch_gflops": 1.0, "onednn_gflops": 0.5}
        for m, best in ((1, 0.96), (2, 1.2), (32, 0.9), (64, 1.1))
    ]
    found = kernels.summarize(rows)
    assert found["least_vs_best_peer_small_m"] == 0.9 and found["cells_small_m_below_1"] == 1
    assert found["least_vs_best_peer_elsewhere"] == 0.96
    assert found["geomean_vs_onednn"] == pytest.approx(2 * found["geomean_vs_torch"])
    assert "roofline_geomean" not in found and "geomean_vs_openvino" not in found


@pytest.mark.parametrize(("row", "column"), [(-1, -1), (30, 4), (0, 0)])
def test_one_wrong_row_or_column_is_not_lost_among_many(
    kernels: Any, row: int, column: int
) -> None:
    operands = bench("gemm_ours").Operands(4096, 64, 40, 1000, "int8")
    shape = kernels.Shape("int8", None, operands, None, (), {})
    right = operands.dense @ operands.plain[0].T
    kernels.check(shape, {"right": lambda _: right}, 40)
    for part in (np.s_[row], np.s_[:, column]):
        wrong = right.copy()
        wrong[part] = 0
        with pytest.raises(SystemExit, match="wrong: wrong result"):
            kernels.check(shape, {"wrong": lambda _, wrong=wrong: wrong}, 40)


def test_only_engines_that_torch_has_are_compared(
    monkeypatch: pytest.MonkeyPatch, kernels: Any
) -> None:
    peers = bench("gemm_peers")
    monkeypatch.setattr(peers, "ENGINES", [peers.TorchInt8.engine])
    found = peers.present_peers("int8")
    assert "torch" in found and "onednn" not in found


def test_a_peer_is_taken_in_the_way_that_is_fastest(
    monkeypatch: pytest.MonkeyPatch, kernels: Any
) -> None:
    """By the best of some passes, the first one left out."""
    peers, now = bench("gemm_peers"), 0.0

    def product(*costs: float) -> Any:
        left = iter(costs)

        def run(calls: int) -> None:
            nonlocal now
            now += calls * next(left)

        return run

    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: now))
    ways = [product(1, 3, 3, 3), product(9, 5, 2, 5), product(9, 4, 4, 4)]
    assert peers.fastest(ways, 7) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["OpenVinoInt8", "OpenVinoInt4", "OpenVinoStatic8"])
def test_every_way_of_openvino_gives_the_product(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, name: str
) -> None:
    pytest.importorskip("openvino")
    peers, dtype = bench("gemm_peers"), "int4" if "4" in name else "int8"
    operands = bench("gemm_ours").Operands(96, 256, 5, 1000, dtype)
    peer = getattr(peers, name)(operands, 1)
    shape = kernels.Shape(dtype, None, operands, None, (), {name: peer})
    for number, way in enumerate(peer.ways):
        monkeypatch.setattr(peers, "fastest", lambda *_, number=number: number)
        kernels.check(shape, {name: peer.bind(5)}, 5)
        assert peer.chosen == ", ".join(f"{option} {value}" for option, value in way.items())
