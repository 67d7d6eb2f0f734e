"""`benchmarks/backends.py` runs, and both backends compute the same."""

import json
import subprocess
import sys

import pytest

from tests.extras import need
from tests.repository import ROOT

need("tvm")


@pytest.mark.long
def test_both_backends_are_timed_and_agree(tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, ROOT / "benchmarks/backends.py", "--quick", "--rounds", "2"]
    subprocess.run([*command, "--json", file], check=True)
    report = json.loads(file.read_text())
    assert {row["m"] for row in report["rows"]} == {8}
    assert all(row["c_gflops"] > 0 and row["tir_gflops"] > 0 for row in report["rows"])
    assert report["summary"]["equal"] >= 0.5
    assert report["summary"]["geomean_tir_vs_c"] > 0
