"""The whole model's tuning survives a kill, and a second compile measures nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tune_model.py"


@pytest.mark.long
def test_a_killed_job_goes_on_and_compiles_find_its_records(tmp_path):
    file = tmp_path / "report.json"
    options = ["--model", "tiny", "--efforts", "fast", "--json", file]
    subprocess.run([sys.executable, SCRIPT, *options], check=True)
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert row["killed"] and 0 < row["records_at_kill"] <= row["records"]
    assert row["measured_after_kill"] < row["trials"]
    assert report["summary"]["fast_second_compile_seconds"] == row["second_compile_seconds"]
