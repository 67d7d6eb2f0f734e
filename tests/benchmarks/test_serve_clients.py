"""Servers with several clients: one quick run of ours, and the summary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "benchmarks"))

from generate_peers import programs_missing
from serve_clients import summarise


def test_the_summary_names_width_peer_and_clients() -> None:
    rows = [
        {"model": "m", "width": "Q4_0", "clients": 1, "side": "dovetail"},
        {"model": "m", "width": "Q4_0", "clients": 1, "side": "llamacpp", "bound": 1.3,
         "ttft_ratio": 1.1},
        {"model": "n", "width": "Q4_0", "clients": 1, "side": "llamacpp", "bound": 1.2,
         "ttft_ratio": 1.4},
        {"model": "1b", "width": "Q4_0", "clients": 1, "side": "llamacpp", "bound": 0.1,
         "ttft_ratio": 0.1},
        {"model": "m", "width": "BF16", "clients": 8, "side": "vllm", "bound": None,
         "ttft_ratio": 0.9},
    ]  # fmt: skip
    assert summarise(rows) == {
        "served_q4_0_vs_llamacpp_1": 1.2,
        "served_ttft_q4_0_vs_llamacpp_1": 1.1,
        "served_bf16_vs_vllm_8": None,
        "served_ttft_bf16_vs_vllm_8": 0.9,
    }


@pytest.mark.long
@pytest.mark.parametrize("peers", ["", "llamacpp"])
def test_a_quick_run_writes_its_report(tmp_path: Path, peers: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/serve_clients.py"), "--quick"]
    command += ["--models", "tiny", "--widths", "Q4_0", "--clients", "1,3", "--threads", "1"]
    command += ["--peers", peers, "--json", str(tmp_path / "f.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    sides = ["dovetail", "llamacpp"] if peers and not programs_missing() else ["dovetail"]
    assert [(row["clients"], row["side"]) for row in rows] == [
        (n, s) for n in (1, 3) for s in sides
    ]
    for row in rows:
        assert all(row[name] > 0 for name in ("tokens_s", "ttft_ms", "first_ttft_ms", "peak_mb"))
