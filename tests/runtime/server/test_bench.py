"""`dovetail bench serve` against the live server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.dovetail.commands import dovetail
from tests.runtime.server.live import Live


@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_load_is_sent_and_measured(live: Live, tmp_path: Path, backend: str) -> None:
    plot = tmp_path / "curves.png"
    lengths = ("--random-input-len", 12, "--random-output-len", 4, "--ignore-eos")
    rates = ("--request-rate", 200, "--request-rate", 400, "--goodput", "ttft:60000", "tpot:60000")
    files = ("--save-result", "--result-dir", tmp_path / "new", "--plot", plot, "--json")
    flags = ("--backend", backend, "--num-prompts", 6, *lengths, *rates, *files)
    done = dovetail("bench", "serve", "--base-url", live.url, "--model", "llama", *flags)
    assert done.code == 0, done.err
    results = msgspec.json.decode(done.out)
    (saved,) = (tmp_path / "new").iterdir()
    assert saved.name.startswith(f"{backend}-200.0qps-400.0qps-llama-")
    assert results == msgspec.json.decode(saved.read_bytes())
    for result in results:
        assert (result["completed"], result["failed"]) == (6, 0), result["errors"]
        assert result["total_output_tokens"] == 24 and result["slo_attainment"] == 1.0
        assert backend != "vllm" or result["total_input_tokens"] == 72
        assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_failures_are_counted_and_an_older_result_is_exchanged(live: Live, tmp_path: Path) -> None:
    (tmp_path / "one.json").touch()
    (tmp_path / "older").hardlink_to(tmp_path / "one.json")
    saving = ("--save-result", "--result-dir", tmp_path, "--result-filename", "one.json")
    flags = ("--num-prompts", 2, "--endpoint", "/v1/nothing", "--json", *saving)
    done = dovetail("bench", "serve", "--port", live.url.rsplit(":", 1)[1], *flags)
    assert (tmp_path / "one.json").read_bytes() and not (tmp_path / "older").read_bytes()
    result = msgspec.json.decode(done.out)
    assert (result["completed"], result["failed"]) == (0, 2) and "404" in result["errors"][0]
