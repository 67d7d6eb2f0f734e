"""Documents that come and go while workflows search them, in the real worker."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from dovetail.ir.errors import DeviceError, RequestError, SpecError, WorkflowError
from dovetail.ir.index_file import EarlyEnd, Passage
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START
from dovetail.runtime.app import App
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.index.documents import Document
from dovetail.runtime.retrieval.folder import open_index
from tests.runtime.flows.conftest import COUNT, DIM, PlainServices, embed
from tests.runtime.flows.test_recovery import ONE_CLUSTER, kill_worker
from tests.runtime.flows.test_service import GRAPHS, plain, question

QUERY = {"input": "w1 w2 w3"}


def search(topk: int = 5, **options: Any) -> RAGraph:
    g = RAGraph("search")
    g.add_retrieval("search", query="input", output="docs", topk=topk, **options)
    g.add_edge(START, "search")
    g.add_edge("search", END)
    return g


def keys(found: Sequence[Document]) -> list[str]:
    return [document.metadata["key"] for document in found]


def passage(key: str, text: str = "w1 w2 w3", **metadata: object) -> dict[str, object]:
    return {"key": key, "text": text, "metadata": metadata}


def found_by(job: WorkflowJob) -> list[str]:
    return keys(job.result().outputs["docs"])


def test_what_is_added_is_found_and_what_is_removed_is_not(app: App) -> None:
    index, graph = app.index(), search()
    nearest = keys(app.run(graph, QUERY).outputs["docs"])
    index.add([passage("new", parity=7), passage("other", "w40 w41 w42")])
    found = app.run(graph, QUERY).outputs["docs"]
    assert keys(found) == ["new", *nearest[:4]] and found[0].id == COUNT
    only = app.run(search(filters={"parity": 7}), QUERY).outputs["docs"]
    assert keys(only) == ["new"]
    index.change([passage("new", "w1 w2 w4")], remove=[nearest[0], "none of them"])
    found = app.run(graph, QUERY).outputs["docs"]
    assert nearest[0] not in keys(found) and [d.text for d in found if d.id == COUNT] == []
    index.remove(["new", "other", *nearest, found[-1].id])
    after = keys(app.run(search(topk=COUNT), QUERY).outputs["docs"])
    assert len(after) == COUNT - len({*nearest, keys(found)[-1]})
    assert not {"new", "other", *nearest} & set(after)


def test_searches_end_early_no_longer_once_many_documents_have_changed(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """When they may was measured on the documents that there were."""
    fields = {"nprobe": 12, "patience": 3, "recall": 0.99, "scanned": 0.5, "queries": 1000}
    ends, indexes, index = (EarlyEnd(topk=5, **fields),), app.flows._open, app.index()
    indexes.add(replace(indexes.find(None), early=ends))
    index.add([passage(f"new {number}") for number in range(15)])
    index.remove([f"new {number}" for number in range(10)])
    assert indexes.find(None).early == ends and indexes.find(None).changed == 25
    index.change([passage("new 10", "w4 w5 w6")], remove=["nobody"])  # in place of the old one
    assert indexes.find(None).early == ends and indexes.find(None).changed == 27
    with caplog.at_level("WARNING", "dovetail"):
        index.add([passage(f"more {number}") for number in range(6)])
        index.add([passage("last")])
    assert indexes.find(None).early == ()
    assert caplog.text.count("33 documents came or went since it was built") == 1


def test_a_run_goes_on_in_its_index_where_another_is_added(app: App, folder: Path) -> None:
    """What names no index means the only one there was when the run was submitted."""
    begun, gate, g = Event(), Event(), RAGraph("two searches")
    g.add_retrieval("first", query="input", output="docs", topk=2)
    g.add_function("wait", lambda state: begun.set() or gate.wait(120), "waited")
    g.add_retrieval("second", query="input", output="more", topk=2)
    for source, target in pairwise((START, "first", "wait", "second", END)):
        g.add_edge(source, target)
    graph = g.workflow()
    job = app.submit_workflow(graph, QUERY)
    assert begun.wait(120)
    app.add_index(folder, name="other", embed=embed)
    gate.set()
    outputs = job.result(120).outputs
    assert outputs["more"] == outputs["docs"]
    with pytest.raises(WorkflowError, match="node 'first': several indexes may be meant"):
        app.submit_workflow(graph, QUERY)


def test_other_fields_are_metadata_and_a_text_is_one_key(app: App) -> None:
    index = app.index()
    index.add([{"key": "new", "text": "w1 w2 w3", "year": 1990, "metadata": {"tag": "x"}}])
    graph = search(filters={"year": 1990, "tag": "x"})
    assert keys(app.run(graph, QUERY).outputs["docs"]) == ["new"]
    index.remove("new")
    assert keys(app.run(graph, QUERY).outputs["docs"]) == []


def test_half_a_surrogate_is_refused_and_what_goes_before_a_passage_takes_room(app: App) -> None:
    index, behind = app.index(), list[str]()

    def cut(text: str, before: str) -> list[str]:
        behind.append(before)
        return [text]

    opened = msgspec.structs.replace(index._find().opened, passage_prompt="passage: ")
    app.flows._open.add(replace(index._find(), cut=cut, opened=opened))
    with pytest.raises(RequestError, match="surrogate"):
        index.add([passage("new", "half \ud800")])
    index.add([{**passage("new"), "title": "T"}])
    assert behind == ["passage: T: "]


@pytest.mark.parametrize("name", GRAPHS)
def test_answers_are_those_of_an_index_that_was_changed_alike(
    app: App, services: PlainServices, name: str
) -> None:
    texts = [f"w{i % 90 + 1} w{i * 11 % 90 + 1} w5" for i in range(40)]
    passages = [Passage(key=f"n{i}", text=text) for i, text in enumerate(texts)]
    gone = [f"p{i}" for i in range(0, COUNT, 3)]
    services.collection.change(passages, embed(texts), remove=gone)
    app.index("idx").change(passages, remove=gone)
    jobs = [app.submit_workflow(GRAPHS[name], question(i)) for i in range(4)]
    for i, job in enumerate(jobs):
        assert job.result().outputs == plain(services, GRAPHS[name], question(i))


def test_searches_see_all_of_a_change_or_nothing_and_workers_may_die(
    open_app: Callable[..., App],
) -> None:
    """Each search goes cluster by cluster; documents come and go in pairs, far from each other."""
    app = open_app(ONE_CLUSTER)
    graph, index, jobs = search(topk=COUNT + 50), app.index(), []
    base = set(found_by(app.submit_workflow(graph, QUERY)))
    states = [frozenset(base)]
    for i in range(16):
        pair = [passage(f"a{i}", "w1 w2 w3"), passage(f"b{i}", "w70 w80 w90")]
        gone = [f"a{i - 3}", f"b{i - 3}", f"p{2 * i}", f"p{2 * i + 1}"] if i >= 3 else []
        jobs += [app.submit_workflow(graph, QUERY) for _ in range(3)]
        index.change(pair, remove=gone)
        states.append((states[-1] | {f"a{i}", f"b{i}"}) - set(gone))
        if i in (5, 10):
            kill_worker(app)
    seen = [frozenset(found_by(job)) for job in jobs]
    places = [states.index(found) for found in seen]  # ValueError: it was never like that
    for i, place in enumerate(places):
        assert place >= i // 3, "documents that were there before are seen"
    assert frozenset(found_by(app.submit_workflow(graph, QUERY))) == states[-1]
    kill_worker(app)
    assert frozenset(found_by(app.submit_workflow(graph, QUERY))) == states[-1]
    assert app.flows.worker.deaths >= 1


def test_vectors_may_be_given_and_wrong_changes_change_nothing(app: App, folder: Path) -> None:
    index, graph = app.index(), search(topk=1)
    vector = embed([str(QUERY["input"])])
    index.add([passage("given", "another text")], vector)
    assert found_by(app.submit_workflow(graph, QUERY)) == ["given"]
    words: Any = [["no number"] * DIM]
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: index.add([{"text": "no key"}]), RequestError, "`key` and `text`"),
        (lambda: index.add([passage("x"), passage("x")]), RequestError, "same key"),
        (lambda: index.add([passage("x")], vector[:, :3]), SpecError, "16 values"),
        (lambda: index.add([passage("x")], words), SpecError, "16 values expected: could not"),
        (lambda: index.add([passage("x")], vector * np.nan), SpecError, "not finite"),
        (lambda: index.add([passage("x", parity=object())]), RequestError, "plain values"),
        (lambda: index.add([Passage(key=5, text="x")]), RequestError, "`key` and `text`"),  # type: ignore[arg-type]
        (lambda: index.remove([1.5]), RequestError, "keys are texts"),  # type: ignore[list-item]
        (lambda: app.run(search(filters={1: 2}), QUERY), WorkflowError, "'search': filters"),
        (lambda: app.run(search(filters={"a": object()}), QUERY), WorkflowError, "'search': filt"),
        (lambda: app.index("other"), WorkflowError, "no index 'other'"),
    ]
    for change, kind, words in cases:
        with pytest.raises(kind, match=words):
            change()
    index.add([passage("last")])
    assert set(found_by(app.submit_workflow(search(topk=2), QUERY))) == {"given", "last"}
    assert len(open_index(folder)) == COUNT, "the folder stays as it is"
    index.remove(COUNT)
    assert set(found_by(app.submit_workflow(search(topk=1), QUERY))) == {"last"}
    assert not app.flows.worker.deaths


def test_an_index_is_not_changed_while_another_takes_its_place(
    app: App, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that began before is refused: its vectors are those of the other one."""
    worker, held = app.flows.worker, list[bool]()

    def open_(*args: Any, do: Any = worker.open, **options: Any) -> object:
        held.append(app.flows._open.find("idx").changing.locked())
        return do(*args, **options)

    def replaced(texts: Sequence[str]) -> np.ndarray:
        app.add_index(folder, name="idx", embed=embed)
        return embed(texts)

    monkeypatch.setattr(worker, "open", open_)
    index, old = app.index(), app.flows._open.find("idx")
    app.flows._open.add(replace(old, embed_passages=replaced))
    with pytest.raises(WorkflowError, match="'idx' was replaced; make the change again"):
        index.add([passage("new")])
    assert held == [True]
    index.add([passage("new")])
    assert found_by(app.submit_workflow(search(topk=1), QUERY)) == ["new"]


def test_a_change_that_kills_workers_is_taken_back(app: App) -> None:
    """The next one is made as if it had never been."""
    index = app.index()
    bound = app.flows._executors.indexes.find(None)
    bound.documents.add([Passage(key="stray", text="w1")])  # the worker does not know of it
    with pytest.raises(DeviceError, match="other documents"):
        index.add([passage("x")])
    bound.documents.take_back(COUNT)
    index.add([passage("x")], np.ones((1, DIM), np.float32))
    assert len(bound.documents) == COUNT + 1


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.timeout(280)
def test_ten_thousand_changes_leave_memory_as_it_was_and_answers_exact(app: App) -> None:
    """Searches run beside them; each finds what there was at one moment while it ran."""
    turns, living = 5000, 40
    index, graph, rng = app.index(), search(), np.random.default_rng(4)
    bound, worker = app.flows._executors.indexes.find(None), app.flows.worker
    query = embed([str(QUERY["input"])])[0]
    known = [bound.documents[i] for i in range(len(bound.documents))]
    rows = {p.key: row for p in known for row in embed([p.text])}

    def nearest() -> tuple[str, ...]:
        names, near = list(rows), np.stack(list(rows.values())) - query
        order = np.argsort((near.astype(np.float64) ** 2).sum(axis=1), kind="stable")
        return tuple(names[i] for i in order[:5])

    states, jobs = [nearest()], deque[tuple[int, WorkflowJob]]()
    for turn in range(turns):
        words = " ".join(f"w{word}" for word in rng.integers(1, 97, 3))
        vector = embed([words])
        rows[f"n{turn}"] = vector[0]
        index.add([passage(f"n{turn}", words, turn=turn % 7)], vector)
        states.append(nearest())
        if turn >= living:
            del rows[f"n{turn - living}"]
            index.remove([f"n{turn - living}"])
            states.append(nearest())
        if turn % 20 == 0:
            jobs.append((len(states) - 1, app.submit_workflow(graph, QUERY)))
        while jobs and (len(jobs) > 3 or turn == turns - 1):
            begun, job = jobs.popleft()
            assert tuple(found_by(job)) in states[begun:]
        if turn == 1000:
            held = resident(worker.pid or 0)
    assert len(dict(bound.documents._items())) <= COUNT + living + 2 * 64
    assert resident(worker.pid or 0) < held + (8 << 20)
    assert tuple(found_by(app.submit_workflow(graph, QUERY))) == states[-1]
    kill_worker(app)
    assert tuple(found_by(app.submit_workflow(graph, QUERY))) == states[-1]
    only = app.run(search(filters={"turn": 3}), QUERY).outputs["docs"]
    assert all((int(key[1:]) % 7) == 3 for key in keys(only)) and len(only) == 5
