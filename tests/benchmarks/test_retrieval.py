"""The benchmark of searches in steps: its parts on a small index, sides that differ."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

faiss = pytest.importorskip("faiss")

from dovetail.runtime.index.ivf import FaissScanner  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def retrieval(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    faiss.omp_set_num_threads(1)
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("retrieval")
    monkeypatch.setattr(module, "ROUNDS", 3)
    return module


def test_steps_and_scanners_are_compared_on_the_same_documents(retrieval: ModuleType) -> None:
    index = retrieval.make_index(2000, 16, 40, "ip")
    assert len(index) == 2000 and index.clusters == 40 and max(index.sizes) > 2 * 50
    rows = retrieval.measure_steps(index, 16, (8, 3), 2)
    assert [row["clusters a step"] for row in rows] == [16, 8, 3]
    assert rows[0]["ratio"] == 1 and all(row["ms"] > 0 for row in rows)
    row = retrieval.measure_scanners(index, FaissScanner(), 4)
    assert row["queries"] == 4 and row["ratio"] > 0


def test_sides_that_find_other_documents_are_no_comparison(retrieval: ModuleType) -> None:
    sides = {"a": lambda turn: [[(0.5, turn)]], "b": lambda turn: [[(0.5, 1)]]}
    with pytest.raises(AssertionError, match="same documents"):
        retrieval.compare(sides)
