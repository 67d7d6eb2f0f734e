"""Build a workflow, draw it, run it on the bundled tiny world, and write a page of what happened.

    python examples/rag.py docs/rag.md

The page shows the workflow, the execution graph of one request before and after each of the
scheduler's transformations, and when each node ran. Needs the extra `rag`.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import fill

import dovetail
from dovetail import END, START, RAGraph
from dovetail.compiler.index_build import IndexRequest, build_index_folder
from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.graph_draw import draw_graph
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.flows.events import NodeTime, WorkflowResult
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.machines import find_machine
from dovetail.runtime.plan import SchedulerSettings
from dovetail.runtime.wavefront.settings import WavefrontSettings
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from dovetail.topology.parameters import Figure

CLUSTERS, NPROBE = 64, 6
GPU = Emulation(
    replace(find_machine("h100"), gpu_blocks=640, stage=Figure(1e-9, "so that scans pay there")),
    SchedulerSettings(offload="off"),
)
"""One that this machine does not have: results are the CPU's, nothing costs anything on it."""
FLOWS = FlowSettings(
    wavefront=WavefrontSettings(fixed_clusters=2, refresh=2), cluster_bytes=1 << 20
)
IMAGINE = "Question: {input}\nAnswer:"
READ = "Documents:\n{docs}\nQuestion: {input}\nAnswer:"
READ_MORE = "Documents:\n{more}\nQuestion: {input}\nAnswer:"
WHAT = {
    "reorder": "The second search begins with the clusters in which the first one found something, "
    "and goes on with others that were scanned then.",
    "prefetch": "Clusters that searches want often are copied to the GPU meanwhile.",
    "split_search": "Searches are cut into sub-stages of a few clusters, between which the "
    "scheduler looks at all requests again.",
    "speculate_generation": "What the first sub-stages found is often what the whole search finds: "
    "a generation is begun on it (dashed). It counts only if its prompt is the true one, which the "
    "diamond checks; one begun on other documents is thrown away.",
    "split_reply": "Replies are cut, too: the scheduler hears of every few tokens.",
    "speculate_retrieval": "With what is written of a reply a search runs ahead (dashed), only so "
    "that the true one knows where to look first.",
    "split_devices": "The GPU scans the clusters that it holds, the CPU the others, and the circle "
    "merges what they found.",
}
"""What each kind of step does, in the words of the page."""
PAGE = """\
# Workflows

This page was written by `python examples/rag.py docs/rag.md`: it compiled the bundled Llama and
encoder, indexed the bundled corpus, and ran the workflow below for one question.

## Build it

```python
from itertools import pairwise

from dovetail import END, START, RAGraph

IMAGINE = {imagine}
READ = {read}
READ_MORE = {more}


{source}

g = build_graph()
```

A node reads what others wrote by name; each name has one writer. `g.workflow()` checks all of it,
and names the node at fault. Several edges from a node are taken side by side; a function in place
of a target chooses, so that loops end. `dovetail.workflows` has five workflows of the literature
(one-shot, HyDE, RECOMP, IRG, multistep), and `dovetail.from_langgraph` and `from_haystack` import
graphs of these frameworks.

## Draw it

`print(g.mermaid())`; `g.svg()` gives a picture that needs nothing else.

```mermaid
{drawn}```

## Run it

```python
with dovetail.load("app.dove") as app, dovetail.load("encoder.dove") as encoder:
    app.add_index("idx", nprobe={nprobe}, embed=encoder.embed)
    result = app.run(g, {{"input": {question}}})
    print(result.outputs["answer"])
```

> {answer}

`await app.arun(...)` does the same in an event loop. `app.submit_workflow(...)` returns a job at
once, which yields events as nodes begin and end, as text is written and as searches advance.

## Keep it in the artifact

`dovetail compile MODEL --model embedder=DIRECTORY -o app.dove --workflow rag.py --index idx` keeps
workflows and indexes in the artifact; in Python `dovetail.compile(..., workflows=[graph],
index="idx")` does.
`app.run("search-twice", {{...}})` then knows them by name, as do
`dovetail run app.dove --workflow search-twice --input "..."`, `dovetail inspect` and
`dovetail serve app.dove`, which offers them as models. A graph is kept as data. Functions are code:
a graph that calls some comes from a Python file, which becomes part of the artifact and runs where
the workflow is used; it may need installed packages and nothing else.

## What was computed, and what ran

`draw_graph(result.graphs.plain())`: what each node's run read from which.

```mermaid
{plain}```

`result.graphs.stages()` gives the same after each kind of transformation that the scheduler took,
one upon the other; the last is `result.graphs.graph()`, what ran. Each is taken where it is
predicted to pay; answers are the same with any subset of them. This run had an emulated GPU, on
which scans take no time, and sub-stages of {each} clusters:
`load(..., emulation=GPU, workflows=FlowSettings(...))`.
{untaken}
[Execution graphs](execution-graphs.md) shows each kind by itself.

{stages}
## When it ran

`result.timeline`, in milliseconds since the request came. `with app.record("trace.json"):` writes a
timeline with the engine, the retrieval worker and arrows along each request, for ui.perfetto.dev.

```mermaid
{timeline}```

How workflows in sub-stages compare with whole stages is measured by `benchmarks/rag.py`.
"""


def build_graph() -> RAGraph:
    """Return the workflow of the page."""
    g = RAGraph("search-twice")
    g.add_generation("imagine", prompt=IMAGINE, output="imagined", max_tokens=48)
    g.add_retrieval("search", query="imagined", output="docs", topk=2)
    g.add_generation("draft", prompt=READ, output="draft", max_tokens=48)
    g.add_retrieval("again", query="draft", output="more", topk=2)
    g.add_generation("answer", prompt=READ_MORE, output="answer", max_tokens=48)
    for source, target in pairwise((START, "imagine", "search", "draft", "again", "answer", END)):
        g.add_edge(source, target)
    return g


def alone() -> RAGraph:
    """Return a workflow of a single generation."""
    g = RAGraph("alone")
    g.add_generation("say", prompt=IMAGINE, output="said", max_tokens=1)
    g.add_edge(START, "say")
    g.add_edge("say", END)
    return g


def draw_times(times: Sequence[NodeTime]) -> str:
    """Return a Mermaid chart of when nodes ran."""
    lines = ["gantt", "  dateFormat x", "  axisFormat %Q ms"]
    for ran in sorted(times, key=lambda ran: ran.start):
        start, end = round(ran.start * 1e3), max(round(ran.end * 1e3), round(ran.start * 1e3) + 1)
        lines += [f"  section {ran.kind}", f"  {ran.node} :{start}, {end}"]
    return "\n".join(lines) + "\n"


def draw_stages(stages: Sequence[tuple[str, ExecutionGraph]]) -> str:
    """Return a section of the page for each kind of transformation."""
    return "\n".join(
        f"### `{name}`\n\n{fill(WHAT[name], 100)}\n\n```mermaid\n{draw_graph(graph)}```\n"
        for name, graph in stages
    )


def name_others(taken: set[str]) -> str:
    """Return a sentence about the kinds of transformations that were not taken."""
    others = [f"`{name}`" for name in WHAT if name not in taken]
    return f"Not taken here: {', '.join(others)}." if others else "All kinds were taken."


def run_question(graph: RAGraph, question: str, folder: Path) -> WorkflowResult:
    """Compile, index and run, all in `folder`."""
    dovetail.compile(LLAMA, output=folder / "app.dove", effort="none")
    dovetail.compile(ENCODER, output=folder / "encoder.dove", effort="none")
    passages = [Passage(key=str(p.id), text=p.document) for p in corpus.passages()]
    with (
        dovetail.load(folder / "app.dove", emulation=GPU, workflows=FLOWS) as app,
        dovetail.load(folder / "encoder.dove") as encoder,
    ):
        request = IndexRequest(output=folder / "idx", clusters=CLUSTERS)
        entry = EmbedderEntry(name="tiny-world-encoder", fingerprint="")
        build_index_folder(passages, encoder, entry, request, lambda *_: None)
        app.add_index(folder / "idx", nprobe=NPROBE, embed=encoder.embed)
        app.run(alone(), {"input": question})  # the first run measures what stages cost
        return app.run(graph, {"input": question})


def main(page: str) -> None:
    """Write the page."""
    graph, question = build_graph(), corpus.questions("dev")[0].question
    with tempfile.TemporaryDirectory() as folder:
        result = run_question(graph, question, Path(folder))
    stages = result.graphs.stages()[1:]
    text = PAGE.format(
        imagine=json.dumps(IMAGINE),
        read=json.dumps(READ),
        more=json.dumps(READ_MORE),
        source=inspect.getsource(build_graph),
        drawn=graph.mermaid(),
        nprobe=NPROBE,
        question=json.dumps(question),
        answer=result.outputs["answer"].strip(),
        plain=draw_graph(result.graphs.plain()),
        each=FLOWS.wavefront.fixed_clusters,
        untaken=name_others({name for name, _ in stages}),
        stages=draw_stages(stages),
        timeline=draw_times(result.timeline),
    )
    Path(page).write_text(text, encoding="utf-8")
    print(f"{question} {result.outputs['answer'].strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
