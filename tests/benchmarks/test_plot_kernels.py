"""The plot of a GEMM report: every side of every panel is drawn, and the file stays small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.extras import need

need("matplotlib")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plot_kernels.py"
SIDES = ("ours", "torch", "onednn", "openvino", "openblas")
LARGEST_BYTES = 300_000


def draw(report: dict, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "report.json").write_text(json.dumps(report))
    command = [sys.executable, SCRIPT, folder / "report.json", folder / "plot.svg"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def row(threads: int, n: int, k: int, m: int) -> dict:
    speeds = {f"{name}_gflops": 10.0 * (i + 1) + m for i, name in enumerate(SIDES)}
    return {"threads": threads, "n": n, "k": k, "m": m, "roofline_fraction": 0.8, **speeds}


def test_a_panel_for_each_shape_and_thread_count(tmp_path):
    shapes = [(64 * i, 32 * i) for i in range(1, 9)]
    rows = [row(t, *shape, m) for t in (1, 2) for shape in shapes for m in (1, 8, 64, 512)]
    done = draw({"benchmark": "kernels", "machine": {"cpu": "x"}, "rows": rows}, tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "plot.svg").read_text()
    assert len(text) < LARGEST_BYTES
    for n, k in shapes:
        assert f"N={n} K={k}, 1 thread -" in text and f"N={n} K={k}, 2 threads" in text
    assert all(f"<!-- {name} -->" in text for name in (*SIDES, "roofline"))


def test_another_report_is_refused_in_a_sentence(tmp_path):
    done = draw({"benchmark": "generate", "rows": []}, tmp_path)
    assert done.returncode == 1 and "no report of benchmarks/kernels.py" in done.stderr
    assert "Traceback" not in done.stderr
