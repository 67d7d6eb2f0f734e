"""The generation benchmark runs alone and writes what the issue names."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "generate.py"
KEYS = {
    "decode_vs_transformers_f32",
    "decode_vs_transformers_f32_160m",
    "decode_vs_transformers_bf16",
    "prefill_vs_transformers_f32",
    "decode_bandwidth_fraction",
}


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_short_run_writes_its_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    shape = ("--models", "tiny", "--prompts", "17", "--threads", "1")
    done = run(*shape, "--rounds", "1", "--new-tokens", "6", "--json", file)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["benchmark"] == "generate"
    assert set(report["summary"]) >= KEYS
    assert [(r["model"], r["dtype"], r["prompt"]) for r in report["rows"]] == [
        ("tiny", "f32", 17),
        ("tiny", "bf16", 17),
    ]
    f32, bf16 = report["rows"]
    assert f32["same_ids"] == "6/6"
    assert f32["decode_ratio"] == pytest.approx(f32["peer_decode_ms"] / f32["decode_ms"])
    assert report["summary"]["decode_vs_transformers_bf16"] == pytest.approx(bf16["decode_ratio"])
    assert report["summary"]["decode_vs_transformers_f32_160m"] is None
    assert "float32" in f32["peer"] and "bfloat16" in bf16["peer"]
    if find_spec("llama_cpp") and find_spec("gguf"):
        assert f32["llamacpp_same_ids"] == "6/6"
        speed = f32["llamacpp_decode_ms"] / f32["decode_ms"]
        assert report["summary"]["decode_vs_llamacpp_f32"] == pytest.approx(speed)
        assert report["summary"]["prefill_vs_llamacpp_bf16"] == bf16["prefill_vs_llamacpp"]
    else:
        assert "llamacpp is left out" in done.stdout


@pytest.mark.parametrize("options", [("--models", "7b"), ("--dtypes", "f64"), ("--rounds", "0")])
def test_wrong_options_are_usage_errors(options: tuple[str, ...]) -> None:
    done = run(*options)
    assert done.returncode == 2 and "Traceback" not in done.stderr
