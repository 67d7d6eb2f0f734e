"""What searches compare and find, by how they use the search before: counts on a small index."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from dovetail.runtime.index.build import build_index
from tests.repository import ROOT

NPROBE = 12


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, from its folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("rag_history")


def compare_ways(module: Any, patience: int) -> dict[str, dict[str, Any]]:
    """Return the row of each way; a search is the one before it, moved a little."""
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((600, 8)).astype(np.float32)
    index = build_index(vectors, clusters=16, metric="ip")
    first = rng.standard_normal((20, 8)).astype(np.float32)
    second = (first + 0.1 * rng.standard_normal(first.shape)).astype(np.float32)
    before = module.open_searches(index, first, NPROBE)
    searches = module.open_searches(index, second, NPROBE, before)
    return {row["way"]: row for row in module.compare(index, searches, patience)}


def test_an_early_end_compares_less_and_a_history_that_is_right_less_again(program: Any) -> None:
    rows = compare_ways(program, patience=3)
    assert rows["whole"]["recall"] == rows["whole"]["compared"] == 1.0
    early, seeds, both = (rows[n] for n in ("early end", "with seeds", "with order and seeds"))
    assert seeds["compared"] < early["compared"] < 1.0
    assert seeds["recall"] >= early["recall"] and both["settled"] <= early["settled"]


def test_a_patience_that_no_search_reaches_leaves_nothing_out(program: Any) -> None:
    for row in compare_ways(program, patience=NPROBE + 1).values():
        assert row["recall"] == row["compared"] == 1.0
