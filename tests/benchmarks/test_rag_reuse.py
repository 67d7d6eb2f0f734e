"""Tokens of prompts that are read again: by order of documents, counted in whole blocks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from dovetail.ir.model import KV_BLOCK
from dovetail.ir.workflow import Generation
from dovetail.runtime.flows.control.prefixes import Opening
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.documents import Document

NODE = Generation("answer", "{docs}\n{input}")
LONG = 10 * KV_BLOCK


@pytest.fixture
def reuse(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("rag_reuse")


def opening(question: str, *ids: int) -> Opening:
    documents = [Document(id=i, text=chr(97 + i) * LONG) for i in ids]
    found = Opening.of(Call(NODE, 0, {"docs": documents, "input": question}, {}), ("docs",))
    assert found is not None
    return found


def test_an_order_is_counted_by_the_blocks_that_prompts_before_have_left(reuse: Any) -> None:
    def saved(order: str, *asked: Opening) -> int:
        every, computed = reuse.count_tokens(asked, order, lambda text: list(map(ord, text)))
        return (every - computed) // LONG  # documents that were read again

    same, turned = opening("one", 1, 2), opening("two", 2, 1)
    assert saved("nearest", same, same) == saved("arranged", same, same) == 2
    assert saved("nearest", same, turned) == 0 and saved("arranged", same, turned) == 2
    later = opening("one", 1, 2), opening("two", 3, 2), opening("three", 2, 4)
    assert saved("arranged", *later) == 0, "nobody began with the one that all show"
    assert saved("foreseen", *later) == 2
