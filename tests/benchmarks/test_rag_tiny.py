"""LangGraph with our nodes and our runtime: the same answers to the tiny world's questions."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long
pytest.importorskip("faiss")
pytest.importorskip("langgraph")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("rag_tiny")


def test_langgraph_and_our_runtime_answer_alike(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "interleave", run_once)
    rows = tiny.measure_tiny(argparse.Namespace(requests=2))
    assert [row["workflows"] for row in rows] == list(tiny.GRAPHS)


def run_once(functions: dict[str, Any], rounds: int) -> dict[str, Any]:
    from common import Sample  # type: ignore[import-not-found]

    for function in functions.values():
        function()  # fails where answers differ
    return {name: Sample(1.0, 1.0, 1.0, rounds) for name in functions}
