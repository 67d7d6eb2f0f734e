"""The attention benchmark runs alone, and sums up its rows by dtype."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


@pytest.mark.long
def test_decode_and_prefill_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ["--quick", "--rounds", "1", "--json", str(file)]
    subprocess.run([sys.executable, SCRIPT, *options], check=True)
    report = json.loads(file.read_text())
    decode, prefill = report["rows"]
    assert 0 < decode["bandwidth"] <= decode["roofline"] * 1.001
    assert prefill["gflops"] > 0 and prefill["vs_torch"] > 0
    summary = report["summary"]
    assert summary["decode_attention_bandwidth_f32"] == pytest.approx(decode["bandwidth"])
    assert summary["prefill_attention_min_vs_torch"] == pytest.approx(prefill["vs_torch"])
    assert summary["decode_attention_bandwidth_bf16"] is None
