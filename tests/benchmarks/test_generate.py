"""The generation benchmark runs alone and writes what the issue names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "generate.py"
OURS = {"decode_bandwidth_fraction", "bandwidth_fraction_tiny_f32", "load_seconds_160m_max"}
MODULES = {"transformers": "transformers", "llamacpp": "llama_cpp", "openvino": "openvino_genai"}


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "peers", [("transformers",), pytest.param(MODULES, marks=pytest.mark.long)]
)
def test_a_short_run_writes_its_report(tmp_path: Path, peers: Iterable[str]) -> None:
    file = tmp_path / "report.json"
    shape = ("--models", "tiny", "--prompts", "17", "--threads", "1", "--effort", "none")
    shape += ("--peers", ",".join(peers))
    done = run(*shape, "--rounds", "1", "--new-tokens", "6", "--json", file)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["benchmark"] == "generate"
    assert set(report["summary"]) >= OURS
    assert [(r["model"], r["dtype"], r["prompt"]) for r in report["rows"]] == [
        ("tiny", "f32", 17),
        ("tiny", "bf16", 17),
    ]
    f32, bf16 = report["rows"]
    assert f32["weights_gb_s"] > 0 and bf16["weights_gb_s"] > 0
    for peer in peers:
        if not find_spec(MODULES[peer]):
            assert f"{peer} is left out" in done.stdout
            continue
        assert f32[f"{peer}_same_ids"] == "6/6"
        speed = f32[f"{peer}_decode_ms"] / f32["decode_ms"]
        assert report["summary"][f"decode_vs_{peer}_f32"] == pytest.approx(speed)
        assert report["summary"][f"decode_vs_{peer}_f32_tiny"] == pytest.approx(speed)
        if peer != "openvino":
            mean = report["summary"][f"prefill_vs_{peer}_bf16"]
            assert mean == pytest.approx(bf16[f"prefill_vs_{peer}"])
    again = run(*shape, "--resume", "--json", file)
    assert again.returncode == 0, again.stderr
    assert json.loads(file.read_text())["rows"] == report["rows"]


@pytest.mark.parametrize("options", [("--models", "7b"), ("--dtypes", "f64"), ("--rounds", "0")])
def test_wrong_options_are_usage_errors(options: tuple[str, ...]) -> None:
    done = run(*options)
    assert done.returncode == 2 and "Traceback" not in done.stderr
