"""The ablation benchmark runs alone and fills both tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extras import need

need("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ablation.py"
OPTIONS = ("--model", "tiny", "--rounds", "1", "--budget", "4", "--batches", "1,2")


@pytest.mark.long
def test_steps_and_top_k(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, *OPTIONS, "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    steps = [row["step"] for row in report["rows"] if row["table"] == "steps"]
    assert len(steps) == 10 and steps[0] == "gloo all-reduce" and steps[-1] == "+ split K"
    assert [row["step"] for row in report["rows"][10:]] == [f"k = {k}" for k in (5, 10, 15, 20)]
    assert all(row["tokens_per_second"] > 0 for row in report["rows"])
