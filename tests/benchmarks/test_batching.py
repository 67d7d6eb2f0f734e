"""The batching benchmark runs alone, and its rows add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.tiny_world import LLAMA

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "batching.py"


@pytest.mark.long
def test_batches_are_compared(tmp_path: Path) -> None:
    artifact, file = tmp_path / "app.dove", tmp_path / "report.json"
    compile_model(LLAMA, output=artifact, effort="none", weight_dtype="f32")
    options = [str(artifact), "--batches", "3,8", "--rounds", "1", "--json", str(file)]
    subprocess.run([sys.executable, SCRIPT, *options], check=True)
    report = json.loads(file.read_text())
    assert [row["batch"] for row in report["rows"]] == [1, 3, 8]
    rates = [row["tokens_per_second"] for row in report["rows"]]
    assert all(rate > 0 for rate in rates)
    assert report["summary"] == {"batch8_vs_batch1": pytest.approx(rates[2] / rates[0])}
    assert report["config"]["weight_dtype"] == "f32"
