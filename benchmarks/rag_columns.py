"""The columns of the real RAG benchmark: what answers questions, opened anew for each cell.

In: `Parts`, workflows that take turns. Out: `Asked`, which answers a question and counts what the
time went for.

    stack:NAME  LangGraph (asynchronous) with a peer's server and faiss
    served      LangGraph (asynchronous) with `dovetail serve` and faiss
    plain       our workflows, without transformations
    full        our workflows, documents of prompts in any order; no_NAME: without a transformation
    free        full, but documents are known beforehand: searches that take no time
    ralmspec    our workflows under RaLMSpec's rule: a guess at each search from what the request's
                last one found, verified in the batch of searches, undone where it was wrong
    ragcache    our workflows under RAGCache's rule: a guess at a fixed point of the search, KV of
                documents kept by how often they were wanted (`kv_file`, whose order of eviction is
                PGDSF's where all blocks are of one size and cost)

All have the same encoder (ours), nprobe, prompts up to the order of their documents, and as many
tokens of a reply. Prefix caches are on, and empty when a cell begins; nobody keeps answers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import msgspec

from dovetail.ir.index_file import VECTORS
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import ANY_ORDER, Function, Generation, Node, Retrieval, Workflow
from dovetail.runtime.app import App, load
from dovetail.runtime.flows import service
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformations import REGISTRY
from dovetail.runtime.flows.events import NodeText
from dovetail.runtime.flows.prompts import read_text
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import choose_probes
from dovetail.runtime.retrieval.folder import open_index
from dovetail.topology.hardware import read_hardware
from http_servers import PATH, SERVERS, Listening, serve_dovetail
from rag_gains import FREE, PLAIN, RAGCACHE, RALMSPEC, SERVED, STACK, WITHOUT
from rag_parts import Parts

TOKENS = 16
"""Of each reply."""
SLOTS = {"llamacpp": 16}
"""Sequences at once of a peer's server, where it is not MOST."""
MOST, CONTEXT = 32, 2048
"""Sequences of a peer's server at once, and tokens of each."""
KV_FILE_BYTES = 2 << 30
TRIED = 32
"""Searches by which faiss's settings are chosen."""

Times: TypeAlias = Counter[str]
"""Seconds of requests by what they were for (`search`, `reply`, of which `decode`), and tokens of
prompts that were `computed`: of OpenVINO, which does not tell what was cached, all of them."""
PURPOSES = {"generation": "reply", "retrieval": "search"}
"""Of nodes, by their kinds."""
Known: TypeAlias = Mapping[tuple[str, str], Sequence[Any]]
"""Documents by the question and the name of the state where they go."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A column that is open. ask: a question, by the workflow whose turn it is.

    spent: by all its requests so far. applied: transformations, and how often. left: runs without
    one, by the reason.
    """

    ask: Callable[[str, int], Awaitable[Mapping[str, Any]]]
    spent: Times = field(default_factory=Counter)
    applied: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)


Opened: TypeAlias = AbstractAsyncContextManager[Asked]


def open_column(
    column: str, parts: Parts, width: str, workflows: Sequence[Workflow], known: Known | None = None
) -> Opened:
    """Return what opens a column. known: documents, for the column `free`."""
    kind, _, peer = column.partition(":")
    if kind == STACK:
        threads = read_hardware().usable_threads
        slots = SLOTS.get(peer, MOST)
        server = SERVERS[peer].serve(parts.peer_model(peer, width), threads, slots, CONTEXT)
        return ask_stack(parts, workflows, server)
    if column == SERVED:
        return ask_stack(parts, workflows, serve_dovetail(parts.apps[width]))
    app = parts.apps[width]
    if column == PLAIN:
        off = WavefrontSettings(transformations=frozenset(), patience=None)
        return ask_ours(parts, app, workflows, off)
    if column in (RALMSPEC, RAGCACHE):
        return ask_rival(parts, app, workflows, column)
    chosen = frozenset(REGISTRY) - {column.removeprefix(WITHOUT)}
    asked = [change_nodes(workflow, show_in_any_order) for workflow in workflows]
    if column == FREE:
        assert known is not None, "documents are found before"
        asked = [change_nodes(workflow, lambda node: recall(node, known)) for workflow in workflows]
    return ask_ours(parts, app, asked, WavefrontSettings(transformations=chosen))


# ---- LangGraph ----


@dataclass(frozen=True, slots=True)
class Search:
    """faiss with the documents. threads, mode: of a search, see `choose_faiss`."""

    index: Any
    documents: Any
    threads: int
    mode: int

    def find(self, vector: Any, topk: int) -> list[Any]:
        """Return the documents nearest to a vector [1, d], the nearest first."""
        scores, rows = search_faiss(self.index, vector, topk, self.threads, self.mode)
        hits = [(-float(s), int(i)) for s, i in zip(scores[0], rows[0], strict=True) if i >= 0]
        return list(self.documents.documents(hits, "ip"))


def search_faiss(index: Any, vector: Any, topk: int, threads: int, mode: int) -> Any:
    """Search with so many threads of OpenMP, which each thread of Python has its own number of."""
    import faiss

    faiss.omp_set_num_threads(threads)
    index.parallel_mode = mode
    return index.search(vector, topk)


def choose_faiss(index: Any, topk: int) -> tuple[int, int]:
    """Return threads of a search and the parallel mode with which many take the least time.

    Mode 0 deals queries to threads, 1 the lists of a query. Searches come from as many threads as
    there are CPUs, as they do from LangGraph.
    """
    import numpy as np

    most = read_hardware().usable_threads
    rows = np.linspace(0, index.ntotal - 1, TRIED).astype(int).tolist()
    index.make_direct_map()
    vectors = [index.reconstruct(row)[None] for row in rows]
    best = (np.inf, 1, 0)
    with ThreadPool(most) as pool:
        for threads, mode in product(dict.fromkeys((1, most)), (0, 1)):
            start = time.perf_counter()
            pool.starmap(search_faiss, [(index, one, topk, threads, mode) for one in vectors])
            best = min(best, (time.perf_counter() - start, threads, mode))
    return best[1:]


@dataclass(frozen=True, slots=True)
class Stack:
    """The nodes of a graph of LangGraph: a server, our encoder, faiss and the documents."""

    client: Any
    server: Listening
    encoder: App
    search: Search
    spent: Times

    def bind(self, node: Node) -> Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]:
        """Return what LangGraph calls for a node."""

        async def run(state: dict[str, Any]) -> dict[str, Any]:
            call, start = Call(node, 0, state, {}), time.perf_counter()
            if isinstance(node, Generation):
                made = {node.output: await self._generate(read_text(call))}
                self.spent["reply"] += time.perf_counter() - start
            elif isinstance(node, Retrieval):
                made = {node.output: await self._retrieve(str(state[node.query]), node.topk)}
                self.spent["search"] += time.perf_counter() - start
            else:
                made = {node.output: perform(call, None)}  # type: ignore[arg-type]
            return made

        return run

    async def _generate(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        url = f"http://{self.server.host}:{self.server.port}{PATH}"
        reply = await self.client.post(url, json=body)
        found = reply.raise_for_status().json()
        told, usage = found.get("timings"), found["usage"]
        if told is not None:  # llama.cpp's
            self.spent["decode"] += told["predicted_ms"] / 1e3
            self.spent["computed"] += told["prompt_n"]
        else:
            details = usage.get("prompt_tokens_details") or {}
            self.spent["computed"] += usage["prompt_tokens"] - details.get("cached_tokens", 0)
        return str(found["choices"][0]["text"])

    async def _retrieve(self, query: str, topk: int) -> list[Any]:
        vector = await self.encoder.aembed([query], wait=True)
        return await asyncio.to_thread(self.search.find, vector, topk)


@asynccontextmanager
async def ask_stack(
    parts: Parts, workflows: Sequence[Workflow], server: Any
) -> AsyncIterator[Asked]:
    """Yield what asks graphs of LangGraph over a server that is started for them."""
    import faiss
    import httpx

    from baselines.langgraph_app import compile_graph

    index = faiss.read_index(str(parts.index / VECTORS))
    index.nprobe = parts.nprobe or choose_probes(index.nlist)
    topk = max(n.topk for w in workflows for n in w.nodes.values() if isinstance(n, Retrieval))
    search = Search(index, open_index(parts.index).store, *choose_faiss(index, topk))
    limits = httpx.Limits(max_connections=None)
    with server as listening, load(parts.encoder) as encoder:
        async with httpx.AsyncClient(timeout=600.0, limits=limits) as client:
            spent: Times = Counter()
            stack = Stack(client, listening, encoder, search, spent)
            graphs = [compile_graph(workflow, None, stack.bind) for workflow in workflows]

            async def ask(question: str, turn: int) -> Mapping[str, Any]:
                state: dict[str, Any] = await graphs[turn % len(graphs)].ainvoke(
                    {"input": question}
                )
                return state

            yield Asked(ask, spent)


# ---- ours ----


@asynccontextmanager
async def ask_ours(
    parts: Parts,
    path: Path,
    workflows: Sequence[Workflow],
    settings: WavefrontSettings,
    **engine: Any,
) -> AsyncIterator[Asked]:
    """Yield what asks our workflows."""
    flows = FlowSettings(wavefront=settings)
    with load(path, workflows=flows, apart=True, **engine) as app:
        app.add_index(parts.index, nprobe=parts.nprobe)
        spent: Times = Counter()
        applied, left = Counter[str](), Counter[str]()

        async def ask(question: str, turn: int) -> Mapping[str, Any]:
            job = app.submit_workflow(workflows[turn % len(workflows)], {"input": question})
            first: dict[Any, float] = {}
            async for event in job:
                if isinstance(event, NodeText):
                    first.setdefault((event.node, event.round), event.at)
            result = await job
            for ran in result.timeline:
                spent[PURPOSES.get(ran.kind, "other")] += ran.end - ran.start
                spent["decode"] += ran.end - first.get((ran.node, ran.round), ran.end)
            spent["computed"] = app.generator.host.load.tokens["prefill"]
            applied.update(rewrite.transformation for rewrite in result.rewrites)
            left.update(f"{name}: {why.reason}" for name, why in result.left.items())
            return result.outputs

        yield Asked(ask, spent, applied, left)
        for name, why in app.flows.statistics.left.items():
            print(f"{name} was left: {why.said}", flush=True)


@asynccontextmanager
async def ask_rival(
    parts: Parts, path: Path, workflows: Sequence[Workflow], name: str
) -> AsyncIterator[Asked]:
    """Yield what asks our workflows under a rival's rule, in place of our control plane's."""
    from baselines.speculation import PipeRag, RalmSpec

    rule, keeps = {RALMSPEC: (RalmSpec, False), RAGCACHE: (PipeRag, True)}[name]

    def make_control(settings: Any, costs: Any, catalog: Any, hot: Any) -> Any:
        return rule(costs, catalog, patience=None)

    with tempfile.TemporaryDirectory() as folder, patch.object(service, "Wavefront", make_control):
        file = {"kv_file": str(Path(folder) / "kv"), "kv_file_bytes": KV_FILE_BYTES}
        settings = WavefrontSettings(patience=None)
        async with ask_ours(parts, path, workflows, settings, **(file if keeps else {})) as asked:
            yield asked


# ---- workflows changed ----


def change_nodes(workflow: Workflow, change: Callable[[Node], Node]) -> Workflow:
    """Return a workflow with other nodes of the same names."""
    graph = RAGraph(workflow.name, inputs=workflow.inputs, max_steps=workflow.max_steps)
    for node in workflow.nodes.values():
        graph.add_node(change(node))
    for source, edges in workflow.edges.items():
        for edge in edges:
            if edge.target is not None:
                graph.add_edge(source, edge.target)
            else:
                assert edge.choose is not None, "an edge leads to a node, or chooses one"
                graph.add_edge(source, edge.choose, edge.targets)
    return graph.workflow()


def show_in_any_order(node: Node) -> Node:
    """Have prompts show what a search finds in any order."""
    if isinstance(node, Retrieval):
        return msgspec.structs.replace(node, order=ANY_ORDER)
    return node


def recall(node: Node, known: Known) -> Node:
    """Have documents be there without a search."""
    if isinstance(node, Retrieval):
        name = node.output
        return Function(node.name, lambda state: list(known[str(state["input"]), name]), name)
    return node


async def find_known(
    opened: Opened, workflows: Sequence[Workflow], questions: Sequence[str]
) -> Known:
    """Return the documents of questions, of the last round where there are several."""
    async with opened as asked:
        states = await asyncio.gather(
            *(asked.ask(question, turn) for turn, question in enumerate(questions))
        )
    return {
        (str(state["input"]), node.output): state[node.output]
        for turn, state in enumerate(states)
        for node in workflows[turn % len(workflows)].nodes.values()
        if isinstance(node, Retrieval)
    }
