"""The HTTP benchmark: a small run of all parts, and the name that Python has a package for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT


def test_pythons_package_keeps_its_name() -> None:
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    script = "import http.client, http; print(http.HTTPStatus.OK.value, http.client.HTTP_PORT)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "200 80\n", done.stderr


@pytest.mark.long
def test_all_parts_are_measured(tmp_path: Path) -> None:
    few = ["--rate", "20", "--seconds", "1", "--streams", "2", "--answer", "4"]
    few += ["--rounds", "1", "--starts", "1", "--json", str(tmp_path / "f")]
    command = [sys.executable, str(ROOT / "benchmarks/http.py"), *few]
    subprocess.run(command, check=True, capture_output=True)
    summary = json.loads((tmp_path / "f").read_text())["summary"]
    assert set(summary) == {"overhead_p99_ms", "stream_vs_offline", "cold_start_s"}
    assert all(value > 0 for value in summary.values())
