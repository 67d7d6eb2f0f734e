"""Workflows through an app: the answers of the plain order, whatever runs beside them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail import workflows
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.errors import ArtifactError, LengthError, RequestError, SpecError, WorkflowError
from dovetail.ir.graph import Placement, contract
from dovetail.ir.index_file import DOCUMENTS, VECTORS, EmbedderEntry, Passage
from dovetail.ir.place import serving_graph
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START
from dovetail.runtime.app import App
from dovetail.runtime.child.framing import ErrorText
from dovetail.runtime.flows import service
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.events import (
    Event,
    NodeFinished,
    NodeStarted,
    NodeText,
    SubStage,
    WorkflowResult,
)
from dovetail.runtime.flows.indexes import embed_checked
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import run_in_order
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.retrieval.wire import Opened, OpenIndex, ProbeQueries
from dovetail.runtime.retrieval.worker import Shelf
from dovetail.topology.cgroup import CgroupLimits
from tests.processes import stop
from tests.runtime.flows.conftest import DIM, Encoder, PlainServices, embed

OPTIONS: dict[str, Any] = {"topk": 2, "max_tokens": 6, "ignore_eos": True}
PROMPT = "{docs} w1 {input}"
GRAPHS: dict[str, RAGraph] = {
    "one-shot": workflows.one_shot(**OPTIONS, answer=PROMPT),
    "hyde": workflows.hyde(**OPTIONS, hypothesis="{input} w2", answer=PROMPT),
    "recomp": workflows.recomp(**OPTIONS, compress="{docs} w3", answer="{relevant} w4 {input}"),
    "irg": workflows.irg(**OPTIONS, answer=PROMPT, refine="{docs} w5 {draft}"),
    "multistep": workflows.multistep(
        **OPTIONS,
        rounds=2,
        step="{known} w6 {input}",
        step_answer="{docs} w7 {step}",
        conclude="{known} w8 {input}",
    ),
}


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (2.5, 2), (0.3, 1)])
def test_searches_take_no_more_threads_than_a_quota_keeps_busy(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: int
) -> None:
    """Also where the artifact was compiled without one, as outside of the container."""
    graph = serving_graph((), (), Placement(threads=64, cpus=()))
    monkeypatch.setattr(service, "read_limits", lambda _root: CgroupLimits(cpu_quota=quota))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    found = FlowSettings().plan_searches(SimpleNamespace(serve=graph))  # type: ignore[arg-type]
    assert found.threads == threads


def question(i: int) -> dict[str, object]:
    return {"input": f"w{1 + i % 90} w{1 + i * 7 % 90}"}


def plain(services: PlainServices, graph: RAGraph, inputs: dict[str, object]) -> dict[str, Any]:
    return run_in_order(graph.workflow(), inputs, lambda call: perform(call, services))


@pytest.mark.parametrize("name", GRAPHS)
def test_library_workflows_give_the_answers_of_the_plain_order(
    app: App, services: PlainServices, name: str
) -> None:
    graph = GRAPHS[name]
    app.add_workflow(graph)
    for i in range(3):
        result = app.run(name, question(i))
        assert result.outputs == plain(services, graph, question(i))
        assert all(0 <= node.start <= node.end <= result.seconds for node in result.timeline)
        assert len(contract(result.graph).nodes) == len(result.timeline)
        assert len(result.graph.nodes) >= len(result.timeline)


def test_threads_and_event_loops_run_workflows_side_by_side(
    app: App, services: PlainServices
) -> None:
    cases = [(graph, question(i)) for i in range(4) for graph in GRAPHS.values()]
    expected = [plain(services, *case) for case in cases]
    got: dict[int, WorkflowResult] = {}

    def by_thread(numbers: range) -> None:
        jobs = {i: app.submit_workflow(*cases[i]) for i in numbers}
        got.update({i: job.result() for i, job in jobs.items()})

    def by_loop(numbers: range) -> None:
        async def run_all() -> list[WorkflowResult]:
            return await asyncio.gather(*(app.arun(*cases[i]) for i in numbers))

        got.update(zip(numbers, asyncio.run(run_all()), strict=True))

    threads = [
        threading.Thread(target=work, args=(range(i, len(cases), 4),))
        for i, work in enumerate((by_thread, by_loop, by_thread, by_loop))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i].outputs for i in range(len(cases))] == expected


def test_any_settings_give_the_same_answers(
    open_app: Callable[..., App], services: PlainServices
) -> None:
    graph = GRAPHS["irg"]
    expected = [plain(services, graph, question(i)) for i in range(6)]
    for settings in (
        WavefrontSettings(transformations=frozenset()),
        WavefrontSettings(fixed_clusters=1),
    ):
        app = open_app(FlowSettings(wavefront=settings, threads=2))
        jobs = [app.submit_workflow(graph, question(i)) for i in range(6)]
        assert [job.result().outputs for job in jobs] == expected


def check_events(events: list[Event], result: WorkflowResult) -> None:
    """Nodes start before they finish, each once a round; text adds up to the value."""
    started = [e for e in events if isinstance(e, NodeStarted)]
    finished = [e for e in events if isinstance(e, NodeFinished)]
    assert {(e.node, e.round) for e in started} == {(e.node, e.round) for e in finished}
    assert len(started) == len(finished) == len(result.timeline)
    for begin in started:
        key = begin.node, begin.round
        (end,) = (e for e in finished if (e.node, e.round) == key)
        assert events.index(begin) < events.index(end) and begin.at <= end.at
        texts = [e for e in events if isinstance(e, NodeText) and (e.node, e.round) == key]
        assert all(events.index(begin) < events.index(e) < events.index(end) for e in texts)
        if begin.kind == "generation":
            assert texts and "".join(e.text for e in texts) == end.value
        scans = [e for e in events if isinstance(e, SubStage) and e.node == begin.node]
        assert bool(scans) == (begin.kind == "retrieval")


@pytest.mark.parametrize("name", ["hyde", "multistep"])
def test_events_tell_of_nodes_text_and_sub_stages(app: App, name: str) -> None:
    job = app.submit_workflow(GRAPHS[name], question(1))
    check_events(list(job), job.result())

    async def listen() -> None:
        job = app.submit_workflow(GRAPHS[name], question(2))
        events = [event async for event in job]
        check_events(events, await job)

    asyncio.run(listen())


def test_a_search_that_finds_nothing_gives_a_list_of_its_own(app: App) -> None:
    graph = RAGraph("nothing")
    graph.add_retrieval("search", query="input", output="docs", filters={"parity": 7})
    graph.add_edge(START, "search")
    graph.add_edge("search", END)
    app.run(graph, question(1)).outputs["docs"].append("what another caller put there")
    assert app.run(graph, question(2)).outputs["docs"] == []


def branching() -> RAGraph:
    """Two searches side by side, one by a vector and with a filter, and a join."""
    g = RAGraph("branching")
    g.add_embedding("embed", text="input", output="vector")
    g.add_retrieval("even", query="vector", output="docs", topk=3, filters={"parity": 0})
    g.add_retrieval("all", query="input", output="more", topk=1)
    g.add_function("count", lambda state: len(state["docs"]) + len(state["more"]), "n")
    g.add_generation("say", prompt="{docs} {more} w{n}", max_tokens=4, ignore_eos=True)
    for source, target in (
        *((START, "embed"), (START, "all"), ("embed", "even"), ("even", "count")),
        *(("all", "count"), ("count", "say"), ("say", END)),
    ):
        g.add_edge(source, target)
    return g


def test_branches_filters_vectors_and_functions(
    app: App, services: PlainServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.flows._executors, "embed", {None: embed})
    result = app.run(branching(), question(3)).outputs
    wanted = plain(services, branching(), question(3))
    assert result.pop("vector").tolist() == wanted.pop("vector").tolist() and result == wanted
    documents: list[Document] = result["docs"]
    assert [d.metadata["parity"] for d in documents] == [0, 0, 0]


def test_filters_take_what_inputs_and_nodes_give(app: App, services: PlainServices) -> None:
    g = RAGraph("filtered", inputs=("input", "wanted"))
    g.add_function("both", lambda state: [state["wanted"], 7], "values")
    g.add_generation("say", prompt="{input}", output="said", max_tokens=4)
    g.add_retrieval("given", query="said", output="docs", topk=4, filters={"parity": "{wanted}"})
    g.add_retrieval("made", query="said", output="more", topk=4, filters={"parity": "{values}"})
    for source, target in pairwise((START, "both", "say", "given", "made", END)):
        g.add_edge(source, target)
    for wanted in (0, 1):
        inputs = {**question(1), "wanted": wanted}
        result = app.run(g, inputs).outputs
        assert result == plain(services, g, inputs)
        assert {d.metadata["parity"] for d in result["docs"] + result["more"]} == {wanted}
    assert app.run(g, {**question(1), "wanted": 9}).outputs["docs"] == []


def failing(node: str) -> RAGraph:
    g = RAGraph("failing")
    g.add_function("divide", lambda state: 1 / (state["input"] != "bad"), "n")
    g.add_generation("say", prompt="w1 {input}", max_tokens=3)
    for source, target in ((START, "divide"), ("divide", "say"), ("say", END)):
        g.add_edge(source, target)
    return g


def test_a_function_that_fails_ends_its_request_alone(app: App) -> None:
    graph = failing("divide")
    jobs = [app.submit_workflow(graph, {"input": "bad" if i % 2 else "w5"}) for i in range(8)]
    for i, job in enumerate(jobs):
        if i % 2:
            with pytest.raises(WorkflowError, match=r"node 'divide' failed: ZeroDivisionError"):
                job.result()
            with pytest.raises(WorkflowError, match="node 'divide'"):
                list(job)
        else:
            assert job.result().outputs["n"] == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_would_end_the_program_ends_its_request(
    app: App, error: BaseException
) -> None:
    def leave(state: object) -> object:
        raise error

    job = app.submit_workflow(only_function(leave), {"input": "w1"})
    with pytest.raises(WorkflowError, match=f"node 'f' failed: {type(error).__name__}"):
        job.result(timeout=60)


def test_a_function_may_be_async(app: App) -> None:
    async def add(state: dict[str, str]) -> str:
        await asyncio.sleep(0)
        return state["input"] + "!"

    assert app.run(only_function(add), {"input": "w1"}).outputs["n"] == "w1!"


def only_function(function: Callable[..., object]) -> RAGraph:
    g = RAGraph("only-function")
    g.add_function("f", function, "n")
    g.add_edge(START, "f")
    g.add_edge("f", END)
    return g


@pytest.mark.parametrize("source", [START, "f"])
def test_a_choice_that_hangs_holds_up_neither_other_runs_nor_the_end(
    open_app: Callable[..., App], source: Any
) -> None:
    app, begun, for_ever = open_app(), threading.Event(), threading.Event()

    def hang(_state: object) -> Any:
        begun.set()
        for_ever.wait()

    g = RAGraph("hangs")
    g.add_function("f", lambda state: 1, "n")
    g.add_edge(START, hang if source is START else "f", ["f"] if source is START else None)
    g.add_edge("f", END if source is START else hang, None if source is START else [END])
    job = app.submit_workflow(g, question(1))
    assert begun.wait(120)
    assert app.run(only_function(lambda state: 2), question(2)).outputs["n"] == 2
    app.close()
    with pytest.raises(RequestError, match="closed while"):
        job.result(120)


HANGS = """
from threading import Event
from dovetail.ir.workflow import Function
from dovetail.runtime.flows.control.messages import Embed, Invoke, Source
from dovetail.runtime.flows.driver import Executors, Session
from dovetail.runtime.flows.indexes import Indexes
from dovetail.runtime.flows.workflow_run import Call

begun, for_ever = [Event(), Event()], Event()
def hang(at):
    begun[at].set()
    for_ever.wait()
session = Session(Executors(None, None, None, None, Indexes(), None), None, print)
call = Call(Function("f", lambda _: hang(0), "n"), 0, {}, {})
session._invoke(Invoke(1, Source(1, "f", 0), call))
session._embedding.put(Embed(2, Source(1, "e", 0), "w1"), lambda texts: hang(1))
for event in begun:
    event.wait()
session.end(RuntimeError())
"""


def test_what_hangs_does_not_keep_the_program_from_ending() -> None:
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=120)


def test_what_cannot_run_is_told_before_it_begins(app: App, folder: Path) -> None:
    chain = workflows.one_shot(topk=1, answer="{docs} {input}")
    with pytest.raises(WorkflowError, match=r"no workflow 'x'; there are: none; add one"):
        app.run("x", {})
    with pytest.raises(WorkflowError, match="'input' is missing"):
        app.run(chain, {})
    with pytest.raises(WorkflowError, match="inputs are given by name"):
        app.run(chain, "w1")  # type: ignore[arg-type]
    with pytest.raises(WorkflowError, match=r"node 'answer': .*n must be 1"):
        app.run(workflows.one_shot(n=2), question(1))
    with pytest.raises(
        WorkflowError, match=r"node 'answer': no model 'x' for generation; .* 'llm'"
    ):
        app.run(workflows.one_shot(model="x"), question(1))
    with pytest.raises(WorkflowError, match=r"node 'answer': .*temperature"):
        app.run(workflows.one_shot(temperature=-1), question(1))
    app.add_index(folder, name="other", embed=embed)
    with pytest.raises(WorkflowError, match=r"node 'search': several .*'idx', 'other'"):
        app.run(chain, question(1))
    with pytest.raises(SpecError, match="nprobe"):
        app.add_index(folder, nprobe=0)
    with pytest.raises(ArtifactError, match="is not an index"):
        app.add_index(folder.parent)


def test_bit_rot_of_an_index_is_told_by_the_name_of_the_file(
    open_app: Callable[..., App], folder: Path, tmp_path: Path
) -> None:
    app = open_app()
    for name in (VECTORS, DOCUMENTS):
        rotten = shutil.copytree(folder, tmp_path / f"rotten {name}")
        data = bytearray((rotten / name).read_bytes())
        data[len(data) // 2] ^= 4
        (rotten / name).write_bytes(data)
        with pytest.raises(ArtifactError, match=f"{name}: does not have the sha256"):
            app.add_index(rotten, embed=embed)


def test_damage_that_is_found_while_an_index_is_served_ends_its_searches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.runtime.retrieval.folder.HASHED_AT_ONCE", 0)
    rotten = shutil.copytree(folder, tmp_path / "rotten")
    data = bytearray((rotten / DOCUMENTS).read_bytes())
    data[len(data) // 2] ^= 4
    (rotten / DOCUMENTS).write_bytes(data)
    shelf = Shelf()
    assert isinstance(shelf.answer(OpenIndex("idx", str(rotten), read_manifest(rotten))), Opened)
    asked, deadline = ProbeQueries("idx", (), nprobe=1), time.monotonic() + 60
    while not shelf._indexes["idx"].fault and time.monotonic() < deadline:
        time.sleep(0.01)
    answer = shelf.answer(asked)
    assert isinstance(answer, ErrorText) and answer.kind == "ArtifactError"
    assert f"{DOCUMENTS}: does not have the sha256" in answer.message


@pytest.mark.parametrize("cut", [False, True], ids=["overwritten", "cut off"])
def test_a_file_of_documents_that_is_damaged_under_way_fails_what_needs_it_alone(
    open_app: Callable[..., App], folder: Path, tmp_path: Path, cut: bool
) -> None:
    app, copied = open_app(), shutil.copytree(folder, tmp_path / "damaged")
    app.add_index(copied, name="damaged", embed=embed)
    gate = threading.Event()
    held = app.submit_workflow(only_function(lambda state: gate.wait(120)), question(1))
    with (copied / DOCUMENTS).open("r+b") as file:
        file.truncate(0) if cut else file.write(b"x" * (copied / DOCUMENTS).stat().st_size)
    with pytest.raises(WorkflowError, match=rf"'search' failed: line .*{DOCUMENTS} cannot be read"):
        app.run(one_search("damaged"), {"input": "w1"})
    gate.set()
    assert held.result(120).outputs["n"] is True
    assert app.run(one_search("idx"), {"input": "w1"}).outputs["docs"]


def test_nodes_fail_by_name_where_their_services_do(
    open_app: Callable[..., App], folder: Path
) -> None:
    app = open_app()
    too_long = workflows.one_shot(topk=1, answer="w1 " * 300 + "{docs} {input}")
    with pytest.raises(WorkflowError, match=r"node 'answer' failed: .*256"):
        app.run(too_long, question(1))
    g = RAGraph()
    g.add_retrieval("search", query="input", output="docs", filters={"colour": "red"})
    g.add_edge(START, "search")
    g.add_edge("search", END)
    with pytest.raises(WorkflowError, match=r"node 'search' failed: .*'colour'"):
        app.run(g, question(1))


def test_an_index_needs_the_encoder_that_it_was_built_with(app: App, folder: Path) -> None:
    with pytest.raises(SpecError, match="no encoder for queries of index 'alone'"):
        app.add_index(folder, name="alone")
    with pytest.raises(SpecError, match="vectors of 16 values; its encoder here makes some of 4"):
        app.add_index(folder, name="narrow", embed=lambda texts: embed(texts)[:, :4])
    vector = embed([app.flows._open.find("idx").documents[0].embedded])[0]
    app.flows.worker.open("idx", folder, first=vector.tobytes(), same=True)
    for wrong in (vector[::-1], 2 * vector):
        with pytest.raises(SpecError, match="'idx' was made with another encoder"):
            app.flows.worker.open("idx", folder, first=wrong.tobytes(), same=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """An index folder `idx` of three passages in one cluster."""
    passages = [Passage(key=f"q{i}", text=f"w{i}") for i in range(3)]
    entry = EmbedderEntry(name="toy", fingerprint="")
    request = IndexRequest(output=tmp_path / "idx", clusters=1)
    build_index_folder(passages, Encoder(), entry, request, lambda *_: None)
    return tmp_path / "idx"


def test_an_index_that_is_refused_leaves_the_one_of_its_name(app: App, small: Path) -> None:
    wanted = app.run(one_search("idx"), question(1)).outputs["docs"]
    with pytest.raises(SpecError, match="makes some of 4"):
        app.add_index(small, embed=lambda texts: embed(texts)[:, :4])
    assert app.run(one_search("idx"), question(1)).outputs["docs"] == wanted


def test_an_index_that_is_replaced_ends_what_searches_it_and_nothing_else(
    app: App, folder: Path, small: Path
) -> None:
    app.add_index(folder, name="other", embed=embed)
    wanted = app.run(one_search("other"), question(1)).outputs["docs"]
    worker, replace_ = app.flows.worker, partial(app.add_index, small, embed=embed)
    assert worker.pid is not None
    stop(worker.pid)
    halfway = [app.submit_workflow(one_search(name), question(1)) for name in ("idx", "other")]
    while len(worker._sent) < len(halfway):
        pass
    replacing = threading.Thread(target=replace_)
    replacing.start()
    while len(worker._sent) == len(halfway):
        pass
    os.kill(worker.pid, signal.SIGCONT)
    with pytest.raises(WorkflowError, match="'idx' was replaced while it was searched"):
        halfway[0].result(120)
    assert halfway[1].result(120).outputs["docs"] == wanted
    replacing.join(120)
    found = app.run(one_search("idx"), question(1)).outputs["docs"]
    assert {document.metadata["key"] for document in found} <= {"q0", "q1", "q2"}


def test_a_query_is_embedded_by_the_encoder_of_the_index_that_it_searches(
    app: App, folder: Path, small: Path
) -> None:
    """Where another index took its place meanwhile, with another encoder."""
    asked, goes_on = threading.Event(), threading.Event()

    def other(texts: list[str]) -> Any:
        if texts == ["w0"]:
            asked.set()
            goes_on.wait(300)
        return embed(["w2"] * len(texts))

    app.add_index(folder, name="own", embed=other)
    try:
        halfway = app.submit_workflow(one_search("own"), {"input": "w0"})
        assert asked.wait(120)
        app.add_index(small, name="own", embed=embed)
    finally:
        goes_on.set()
    assert halfway.result(120).outputs["docs"][0].metadata["key"] == "q0"


def test_what_embedded_for_an_index_ends_where_another_takes_its_place(
    app: App, folder: Path
) -> None:
    def threads() -> list[threading.Thread]:
        app.run(one_search("idx"), question(1))
        return [t for t in threading.enumerate() if t.name == "dovetail-embedding"]

    (before,) = threads()
    app.add_index(folder, name="idx", embed=embed)
    assert len({*threads(), before}) == 2
    before.join(60)
    assert not before.is_alive()


def test_an_event_loop_does_not_wait_until_indexes_are_open(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, opening = list[int](), app.flows.open_indexes

    def open_indexes() -> None:
        opened.append(threading.get_ident())
        opening()

    monkeypatch.setattr(app.flows, "open_indexes", open_indexes)
    assert len(asyncio.run(app.arun(one_search("idx"), question(1))).outputs["docs"]) == 2
    assert opened and threading.get_ident() not in opened


def test_what_embeds_queries_alone_embeds_no_document_that_is_added(
    app: App, tmp_path: Path
) -> None:
    """Where the index has another prompt for these."""
    passages = [Passage(key=f"q{i}", text=f"w{i}") for i in range(3)]
    entry = EmbedderEntry(name="toy", fingerprint="", query_prompt="q: ", passage_prompt="p: ")
    request = IndexRequest(output=tmp_path / "e5")
    build_index_folder(passages, Encoder(), entry, request, lambda *_: None)
    app.add_index(tmp_path / "e5", embed=embed)
    with pytest.raises(RequestError, match="for queries, and its passages begin with 'p: '; give"):
        app.index("e5").add([{"key": "new", "text": "w7"}])
    app.index("e5").add([{"key": "new", "text": "w7"}], embed(["w7"]))
    (found, _) = app.run(one_search("e5"), {"input": "w7"}).outputs["docs"]
    assert found.metadata["key"] == "new"


def one_search(index: str) -> RAGraph:
    g = RAGraph(f"search-{index}")
    g.add_retrieval("search", query="input", output="docs", topk=2, index=index)
    g.add_edge(START, "search")
    g.add_edge("search", END)
    return g


def leave(texts: list[str]) -> Any:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda texts: 1 / 0, "ZeroDivisionError"),
        (lambda texts: None, "shape"),
        (lambda texts: [], "shape"),
        (lambda texts: embed(texts)[0], "shape"),
        (lambda texts: ["no numbers" for _ in texts], "could not convert"),
        (leave, "SystemExit"),
    ],
)
def test_an_encoder_of_users_may_give_lists_and_fails_by_name(
    app: App, folder: Path, wrong: Callable[[list[str]], Any], said: str
) -> None:
    now: list[Callable[[list[str]], Any]] = [lambda texts: embed(texts).tolist()]

    def own(texts: list[str]) -> Any:
        return now[0](texts)

    app.add_index(folder, name="own", embed=own)
    graph = one_search("own")
    assert len(app.run(graph, question(1)).outputs["docs"]) == 2
    now[0] = wrong
    beside = app.submit_workflow(failing("divide"), {"input": "w5"})
    with pytest.raises(WorkflowError, match=rf"node 'search' failed: `embed=` .*{said}"):
        app.submit_workflow(graph, question(1)).result(timeout=60)
    with pytest.raises(SpecError, match=rf"`embed=` .*{said}"):
        app.index("own").add([{"key": "new", "text": "w1"}])
    assert beside.result().outputs["n"] == 1


def test_an_encoder_of_users_may_write_over_what_it_gave() -> None:
    """Vectors are looked at later, when it embeds other texts already."""
    rows = np.zeros((1, DIM), np.float32)

    def own(texts: list[str]) -> Any:
        rows[:] = embed(texts)
        return rows

    given = embed_checked(own, ["w1"])
    embed_checked(own, ["w2"])
    assert np.array_equal(given, embed(["w1"]))


def test_an_encoder_that_hangs_holds_up_no_other_index_nor_the_end(
    open_app: Callable[..., App], folder: Path
) -> None:
    app, hangs, goes_on = open_app(), threading.Event(), threading.Event()

    def own(texts: list[str]) -> Any:
        if hangs.is_set():
            goes_on.wait(300)
        return embed(texts)

    app.add_index(folder, name="own", embed=own)
    hangs.set()
    try:
        waits = app.submit_workflow(one_search("own"), question(1))
        found = app.submit_workflow(one_search("idx"), question(1)).result(timeout=60)
        assert len(found.outputs["docs"]) == 2 and not waits.finished
        app.close()
        with pytest.raises(RequestError, match="was closed"):
            waits.result(timeout=60)
        assert not goes_on.is_set()
    finally:
        goes_on.set()


def test_parts_of_a_long_document_come_and_go_under_its_key(app: App) -> None:
    def cut(text: str, before: str) -> list[str]:
        return [text[at : at + 8] for at in range(0, len(text), 8)]

    index = app.index("idx")
    app.flows._open.add(replace(index._find(), cut=cut))
    size = sum(index._find().opened.sizes)
    index.add([{"key": "long", "text": "w1 w2 w3 w4 w5 w6 w7"}])
    assert sum(index._find().opened.sizes) == size + 3
    found = {index._find().documents[i].text for i in index._find().documents.find("long")}
    assert found == {"w1 w2 w3", " w4 w5 w", "6 w7"}
    index.add([{"key": "long", "text": "w1"}])
    assert len(index._find().documents.find("long")) == 1
    search = RAGraph()
    search.add_retrieval("search", query="input", output="docs", topk=150)
    search.add_edge(START, "search")
    search.add_edge("search", END)
    app.flows._open.add(replace(index._find(), nprobe=12))
    named = {"docs": app.run(search, {"input": "w1"}).outputs["docs"]}
    assert [d.text for d in named["docs"] if d.metadata["key"] == "long"] == ["w1"]
    index.remove(["long"])
    found_now = app.run(search, {"input": "w1"}).outputs["docs"]
    assert not [d for d in found_now if d.metadata["key"] == "long"]


@pytest.mark.parametrize("way", ["app.run", "app.arun", "events"])
def test_documents_that_a_prompt_has_no_room_for_are_cut_with_a_note(app: App, way: str) -> None:
    wide = workflows.one_shot(topk=120, max_tokens=8)
    if way == "app.run":
        result = app.run(wide, question(1))
    elif way == "app.arun":
        result = asyncio.run(app.arun(wide, question(1)))
    else:
        job = app.submit_workflow(wide, question(1))
        list(job)
        result = job.result()
    (note,) = result.notes
    assert note.startswith("node 'answer': of 120 retrieved documents") and "256 tokens" in note
    assert result.outputs["answer"] and len(result.outputs["docs"]) == 120
    assert app.run(workflows.one_shot(topk=2, max_tokens=8), question(1)).notes == ()


def test_an_input_that_no_prompt_holds_is_refused_before_a_node_begins(app: App) -> None:
    with pytest.raises(LengthError, match="'input' has 1000000 letters") as caught:
        app.submit_workflow(workflows.one_shot(), {"input": "a" * 1_000_000})
    assert caught.value.field == "inputs.input"


def test_closing_fails_what_runs_and_refuses_what_comes(app: App) -> None:
    gate = threading.Event()
    entered = threading.Event()

    def hold(state: object) -> None:
        entered.set()
        gate.wait()

    g = RAGraph()
    g.add_function("hold", hold, "x")
    g.add_edge(START, "hold")
    g.add_edge("hold", END)
    job = app.submit_workflow(g, {"input": "x"})
    entered.wait()
    app.close()
    gate.set()
    with pytest.raises(RequestError, match="closed"):
        job.result()
    with pytest.raises(RequestError, match="closed"):
        app.run(g, {"input": "x"})
