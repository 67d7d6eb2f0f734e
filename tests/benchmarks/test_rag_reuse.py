"""Tokens of prompts that are read again: by order of documents, counted in whole blocks."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

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


def test_a_knowledge_tree_drops_the_leaf_that_was_wanted_least(reuse: Any) -> None:
    tree = reuse.KnowledgeTree(4)
    a, b, c, d, e = (bytes([n]) for n in range(5))
    assert [tree.take([a, b]), tree.take([a, b]), tree.take([a, c])] == [0, 2, 1]
    assert tree.take([d]) == 0, "there is room for a fourth"
    assert tree.take([e]) == 0, "c or d goes, a has a block behind it"
    assert tree.take([a, b]) == 2
    assert tree.take([a, b, *map(bytes, ([7], [8], [9]))]) == 2, "more than there is room for"
    assert tree.take([a, b, bytes([7]), bytes([8])]) == 4


def test_with_room_for_all_the_pool_and_the_tree_read_the_same_again(reuse: Any) -> None:
    prompts = [
        [number // 3 % 7, *range(5 * KV_BLOCK), *[number % 4] * KV_BLOCK] for number in range(60)
    ]
    found = reuse.read_again(prompts, 1.0)
    assert found["pool"] == found["tree"] > 0.5
    assert reuse.read_again(prompts, 0.3)["tree"] < found["tree"]


@pytest.mark.long
def test_kv_from_a_file_is_read_again_after_a_restart(reuse: Any, tmp_path: Path) -> None:
    """The tiny world: prompts that a file has are not computed, those of another app are."""
    report = reuse.main(["--only", "restart", "--tiny", "--count", "4", "--seeds", "1", "--work",
                         str(tmp_path), "--json", str(tmp_path / "rows.json")])  # fmt: skip
    computed = {row["state"]: row["computed"] for row in report.rows}
    assert list(computed) == ["cold", "warm", "restarted", "file"]
    assert max(computed["warm"], computed["file"]) < 0.5 * min(
        computed["cold"], computed["restarted"]
    )
    assert set(report.summary) == {"warm_x", "file_x"}


class Known:
    """An app that computes prompts which neither it nor the file of its options has seen."""

    files: ClassVar[dict[str, set[str]]] = {}

    def __init__(self, path: Path, *, apart: bool, kv_file: str = "", **options: Any) -> None:
        assert apart and ("kv_file_bytes" in options) is bool(kv_file)
        self.seen = self.files.setdefault(kv_file, set()) if kv_file else set()
        self.tokens = {"prefill": 0}
        self.generator = SimpleNamespace(host=SimpleNamespace(load=self))

    def __enter__(self) -> Known:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_index(self, path: Path) -> None:
        pass

    def run(self, workflow: object, inputs: dict[str, str]) -> None:
        self.submit_workflow(workflow, inputs)

    def submit_workflow(self, workflow: object, inputs: dict[str, str]) -> Any:
        self.tokens["prefill"] += inputs["input"] not in self.seen
        self.seen.add(inputs["input"])
        return SimpleNamespace(result=lambda: None)


def test_a_restart_is_timed_without_a_file_and_with_that_of_the_first_app(
    reuse: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reuse, "load", Known)
    apps = {reuse.BF16: tmp_path}
    parts = SimpleNamespace(apps=apps, index=tmp_path, questions=[f"q{n}" for n in range(20)])
    rows = reuse.measure_restart(parts, 12, 2)
    states = ["cold", "warm", "restarted", "file"]
    assert [row["state"] for row in rows] == states * 2
    for seed in range(2):
        found = {row["state"]: row["computed"] for row in rows if row["seed"] == seed}
        assert found["cold"] == found["restarted"] > 1 and found["warm"] == found["file"] == 0
    made = reuse.summarize_restart(
        [{"state": s, "rate": r} for s, r in zip(states, (1, 6, 2, 5), strict=True)]
    )
    assert made == {"warm_x": 3.0, "file_x": 2.5}
