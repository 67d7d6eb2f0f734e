"""`dovetail bench serve` against the live server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.dovetail.commands import dovetail
from tests.runtime.server.live import Live


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_load_is_sent_and_measured(live: Live, tmp_path: Path, backend: str) -> None:
    saved, plot = tmp_path / "result.json", tmp_path / "curves.png"
    lengths = ("--random-input-len", 12, "--random-output-len", 4, "--ignore-eos")
    rates = ("--request-rate", 200, "--request-rate", 400, "--goodput", "ttft:60000 tpot:60000")
    files = ("--save-result", saved, "--plot", plot, "--json")
    flags = ("--backend", backend, "--num-prompts", 6, *lengths, *rates, *files)
    done = dovetail("bench", "serve", "--base-url", live.url, "--model", "llama", *flags)
    assert done.code == 0, done.err
    results = msgspec.json.decode(done.out)
    assert results == msgspec.json.decode(saved.read_bytes())
    for result in results:
        assert (result["completed"], result["failed"]) == (6, 0), result["errors"]
        assert result["total_output_tokens"] == 24 and result["slo_attainment"] == 1.0
        assert backend != "openai" or result["total_input_tokens"] == 72
        assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_failures_are_counted(live: Live) -> None:
    flags = ("--num-prompts", 2, "--endpoint", "/v1/nothing", "--json")
    done = dovetail("bench", "serve", "--base-url", live.url, *flags)
    result = msgspec.json.decode(done.out)
    assert (result["completed"], result["failed"]) == (0, 2) and "404" in result["errors"][0]
