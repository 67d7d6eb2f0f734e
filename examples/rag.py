"""Write docs/rag.md: the page's own blocks of code, run one after the other, and what came of them.

    python examples/rag.py docs/rag.md

They build a workflow, draw it, compile and index the bundled tiny world, run one question, and show
the execution graph that ran and when each node ran. The figures at the
end are read from `benchmarks/results`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from dovetail.ir.graph import contract
from dovetail.ir.graph_draw import draw_graph
from dovetail.runtime.flows.events import NodeTime, WorkflowResult

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BLOCKS = {
    "build": """\
from dovetail import END, START, RAGraph

g = RAGraph("search-twice")
g.add_generation("imagine", prompt="Question: {input}\\nAnswer:", output="imagined", max_tokens=48)
g.add_retrieval("search", query="imagined", output="docs", topk=2)
READ = "Documents:\\n{docs}\\nQuestion: {input}\\nAnswer:"
g.add_generation("draft", prompt=READ, output="draft", max_tokens=48)
g.add_retrieval("again", query="draft", output="more", topk=2)
READ_MORE = "Documents:\\n{more}\\nQuestion: {input}\\nAnswer:"
g.add_generation("answer", prompt=READ_MORE, output="answer", max_tokens=48)

way = [START, "imagine", "search", "draft", "again", "answer", END]
for source, target in zip(way, way[1:]):
    g.add_edge(source, target)
""",
    "draw": """\
from pathlib import Path

print(g.mermaid())
Path("search-twice.svg").write_text(g.svg())
""",
    "prepare": """\
import json

import dovetail
from dovetail.tiny_world import ENCODER, LLAMA, corpus

dovetail.compile(LLAMA, output="app.dove", effort="none")
dovetail.compile(ENCODER, output="encoder.dove", effort="none")
with open("corpus.jsonl", "w", encoding="utf-8") as file:
    for passage in corpus.passages():
        file.write(json.dumps({"key": str(passage.id), "text": passage.document}) + "\\n")
""",
    "index": """\
dovetail index build corpus.jsonl -o idx --embedder encoder.dove --clusters 64
""",
    "run": """\
question = {"input": "Who is the founder of Komosburg?"}
with dovetail.load("app.dove") as app, dovetail.load("encoder.dove") as encoder:
    app.add_index("idx", nprobe=6, embed=encoder.embed)
    print(app.run(g, question).outputs["answer"])
""",
    "show": """\
from dovetail import FlowSettings, WavefrontSettings
from dovetail.ir.graph import contract
from dovetail.ir.graph_draw import draw_graph

small = WavefrontSettings(fixed_clusters=2, refresh=2)
flows = FlowSettings(wavefront=small, cluster_bytes=1 << 20)
say = RAGraph("say")
say.add_generation(0, prompt="{input}", output="said", max_tokens=1)
say.add_edge(START, 0)
say.add_edge(0, END)

with (
    dovetail.load("app.dove", device="torch:cpu", offload="off", workflows=flows) as app,
    dovetail.load("encoder.dove") as encoder,
):
    app.add_index("idx", nprobe=6, embed=encoder.embed)
    app.run(say, question)  # the first run measures what steps of the engine cost
    with app.record("trace.json"):
        result = app.run(g, question)
print(draw_graph(contract(result.graph)), draw_graph(result.graph))
""",
    "time": """\
for node in result.timeline:
    print(f"{node.node}: {1e3 * node.start:.0f} to {1e3 * node.end:.0f} ms")
""",
    "end": """\
from dataclasses import replace

from dovetail.runtime.flows.events import SubStage
from dovetail.runtime.index.early_stop import choose_patience
from dovetail.runtime.retrieval.folder import open_index

asked = [one.question for one in corpus.questions("dev")]
with dovetail.load("encoder.dove") as encoder:
    sample = encoder.embed(asked)
index = open_index("idx").index
nprobe = 32
stop = choose_patience(index, sample, topk=2, nprobe=nprobe, recall=0.8)
print(stop)

flows = FlowSettings(wavefront=replace(small, patience=stop.patience))
with dovetail.load("app.dove", workflows=flows) as app, dovetail.load("encoder.dove") as encoder:
    app.add_index("idx", nprobe=nprobe, embed=encoder.embed)
    events = list(app.submit_workflow(g, question))
scanned = sum(event.clusters for event in events if isinstance(event, SubStage))
print(f"both searches: {scanned} of {2 * nprobe} clusters")
""",
}
"""The code of the page, in its order."""
WHAT = (
    "A second search begins with the clusters in which the first one found something, and goes on "
    "with others that were scanned then.",
    "Searches are cut into sub-stages of a few clusters, between which the scheduler looks at all "
    "requests again; replies are cut, too.",
    "What the first sub-stages found is often what the whole search finds: a generation is begun "
    "on it (dashed). It counts only if its prompt is the true one, which the diamond checks; one "
    "begun on other documents is taken out of the graph.",
    "With what is written of a reply a search runs ahead (dashed), only so that the true one knows "
    "where to look first.",
    "The device scans the clusters that it holds, the CPU the others, and the circle merges what "
    "they found. Clusters that searches want often are copied to the device meanwhile.",
)
"""What the scheduler does to a graph, in the words of the page."""
PAGE = """\
# Workflows

This page was written by `python examples/rag.py docs/rag.md`, which ran its blocks of code one
after the other in an empty folder, but for that of
[Keep the best of many](#keep-the-best-of-many), which takes one more model. They take half a
minute.

## Build it

```python
{build}```

A node reads what others wrote by name; each name has one writer. `g.workflow()` checks all of it,
and names the node at fault. Several edges from a node are taken side by side; a function in place
of a target chooses, so that loops end. `dovetail.workflows` has five workflows of the literature
(one-shot, HyDE, RECOMP, IRG, multistep), and `dovetail.from_langgraph` and `from_haystack` import
graphs of these frameworks. The five give the model a plain text to continue; for a model that was
trained to chat say `one_shot(chat=True)`: each prompt is then a message, and the answer ends where
the model ends its turn.

## Draw it

```python
{draw}```

The SVG is a picture that needs nothing else; this is the Mermaid text:

```mermaid
{drawn}```

## Run it

It takes a model that writes, one that embeds, and an index of a corpus. Here they are
the bundled ones, small enough for any machine; yours are directories of checkpoints, and JSON
lines, Markdown or text. `dovetail compile MODEL -o app.dove` does the same as `dovetail.compile`.

```python
{prepare}```

```sh
{index}```

A build that was interrupted goes on where it was when the command is given again.

```python
{run}```

> {answer}

`await app.arun(...)` does the same in an event loop. `app.submit_workflow(...)` returns a job at
once, which yields events as nodes begin and end, as text is written and as searches advance.
`app.index("idx")` adds and removes documents while workflows run. Documents that a prompt has no
room for are cut, the farthest first, and `notes` of the result say so; with
`add_generation(..., documents_tokens=512)`, or `documents_tokens: 512` in a file, they are cut to
so many tokens of the model in all. The timeline shows a text prompt as it was
sent; messages it shows before they are cut.

## Keep the best of many

Vectors find candidates; a cross-encoder, which reads question and document together, says which are
good. `add_rerank` keeps the `topk` that it scores highest, best first, with its scores. Here is a
workflow that finds 30 and answers from 3:

```python
g = RAGraph("reranked")
g.add_retrieval("search", query="input", output="found", topk=30)
g.add_rerank("rank", query="input", documents="found", output="docs", topk=3)
g.add_generation("answer", prompt="Documents:\\n{{docs}}\\nQuestion: {{input}}\\nAnswer:")
way = [START, "search", "rank", "answer", END]
for source, target in zip(way, way[1:]):
    g.add_edge(source, target)
```

It takes a cross-encoder in the model's artifact: `dovetail compile MODEL --model embedder=DIRECTORY
--model ranker=DIRECTORY -o app.dove --workflow reranked.py --index idx`, where `ranker` is, say,
bge-reranker-v2-m3 or Qwen3-Reranker. Of several `model="ranker"` chooses one, and `instruction=`
tells one that is told what is looked for. What is ranked is what searches found, or a list of texts
that a function or an input gives. Pairs of all requests share the encoders' queues and batches with
`app.embed` and `/v1/rerank`, and give what `app.rerank` gives. A generation behind a rerank
is not begun on a part of a search; the search is cut and shared out as others are.

## Write it as a file

JSON and YAML hold the same, for `--workflow` of `run`, `serve` and `compile`. This one asks for
what it still has to know until there is nothing more, three times at most, in the documents of a
tenant:

```yaml
name: ask-on
inputs: [input, tenant]   # `input` alone where nothing is said
nodes:
  - {{kind: collect, name: recall, text: found, output: known}}
  - kind: generation
    name: ask
    output: step
    options: {{max_tokens: 32, temperature: 0}}
    prompt:
      - {{role: system, content: "Reply with the next short question to look up, or NONE."}}
      - {{role: user, content: "Question: {{input}}\\nKnown: {{known}}"}}
  - {{kind: retrieval, name: search, query: step, output: docs, topk: 3,
     filters: {{tenant: "{{tenant}}"}}}}
  - kind: generation
    name: read
    output: found
    options: {{max_tokens: 64}}
    prompt: [{{role: user, content: "{{docs}}\\n\\n{{step}} Answer in one sentence."}}]
  - kind: generation
    name: answer
    prompt: [{{role: user, content: "{{known}}\\n\\n{{input}}"}}]
edges:
  - {{from: START, to: recall}}
  - {{from: recall, to: ask}}
  - {{from: ask, to: {{if: step, then: search, else: answer, empty: [none], most: {{known: 3}}}}}}
  - {{from: search, to: read}}
  - {{from: read, to: recall}}
  - {{from: answer, to: END}}
```

- A node has the fields of `add_generation`, `add_retrieval`, `add_embedding` or `add_rerank`.
  `join` puts the texts of `names` together, `collect` gathers in a list what `text` names, round
  by round.
- A prompt that is a text is continued as it is, as by `run --raw`. Models that were trained to chat
  answer messages better, which go through their chat template. Of the five workflows
  `one-shot-chat`, `hyde-chat` and so on ask in messages.
- `filters` are values of the documents' metadata: one, a list of which one must hold, or
  `"{{name}}"` for what an input or a node gives, so that each request can have its own.
- A branch goes to `then` where the name after `if` has a value that is not in `empty`, and no list
  of `most` is full; else to `else`, which is `END` where it is not given.
- Functions are code: for these write the graph as a Python file.

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

The same again, beside torch's CPU device: it holds hot clusters and computes the model's tokens, as
a GPU would (`device="cuda"`). What is done follows from what things cost, so it may differ here.

```python
{show}```

`contract` puts the parts of each node together: what each node's run read from which.

```mermaid
{plain}```

`result.graph` is what ran:

```mermaid
{ran}```

{what}

Each of these is done where it is predicted to pay; answers are the same with any subset of them.
[Execution graphs](execution-graphs.md) shows each kind by itself.

## When it ran

```python
{time}```

Drawn, in milliseconds since the request came:

```mermaid
{timeline}```

`app.record` has written all of it to `trace.json`: the engine, the retrieval worker, the encoder
and the hot clusters on a track each, and arrows along each request, for ui.perfetto.dev.

## End searches early

A search may end before it has scanned all clusters that it probes: once so many of them, in the
order of centroids, have held nothing nearer. How many (the patience) was measured when an index of
thousands of passages was built: for 0.99 of what the whole search finds, which 1,000 queries that
it was not chosen on confirm (`early` in the manifest). That is the default; `patience=None` has
searches exact, and so are those of an index of which a tenth of the documents came or went.
With queries of your own another recall is found like this:

```python
{end}```

```
{ended}
```

`scanned` is the part of the clusters that is looked at, `recall` that of the sample, `at_least`
what it is for new queries like these with 95 % certainty, with the same `nprobe`. What a request's
last search found counts as found, so its next one ends sooner; the order in which clusters are
scanned does not matter. The sub-stages are small here: a search ends between two of them, so larger
ones end it later and leave out less.

## Documents in any order

Reading the documents of a prompt costs more than finding them. The engine keeps the KV of what
prompts began with; with `add_retrieval(..., order="any")` a prompt shows its documents in the order
in which it shares most with those before it (`arrange` in `result.rewrites`). The prompt that was
sent stands in the timeline: `result.timeline[i].prompt`. `load(kv_file="FILE")`, or `dovetail serve
--kv-file FILE`, keeps KV in a bounded file, beyond the memory of the pool and beyond restarts: 48
questions over real passages, asked again after a restart, are answered 5.9 times as fast with it
([figures](figures.md#retrieval-and-workflows)).

An answer may differ with what else is computed in the same step (a last bit, and so a word), unless
the app is loaded with `deterministic=True`: then it is that of the prompt alone.

`result.left` says, by transformation that might have been applied and never was, why it was not:
`result.left["speculate_generation"].said` why nothing was guessed, such as while the engine is busy
with prompts. Runs over HTTP have the same in `left`, and `/metrics` counts them by reason
(`transformations_left_total`). `app.flows.statistics.left` has the last of all runs.

## What it gains

Figures of `benchmarks/rag.py`, `benchmarks/retrieval.py` and `benchmarks/hotpot.py`; the files are
in `benchmarks/results`.

| file | what is compared | what it says |
|---|---|---|
{figures}
"""
FIGURES: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    (
        "rag_cpu",
        "a million vectors searched by {cpu}, beside an *emulated* H100: the throughput of a burst "
        "of requests, five workflows, nprobe 64, 128, 256",
        (
            ("rate_vs_sequential_*", "{:.2f}x to {:.2f}x that of whole stages in sequence"),
            ("rate_vs_async_min", "at least {:.2f}x that of asynchronous whole stages"),
        ),
    ),
    (
        "rag_simulated",
        "38 million vectors and 64 cores, *simulated*: mean latency",
        (
            ("latency_vs_async_[min,max]", "{:.2f}x to {:.2f}x below asynchronous whole stages"),
            (
                "latency_vs_async_divided_[min,max]",
                "{:.2f}x to {:.2f}x where these deal clusters to all threads, too",
            ),
            ("split_gain", "splitting gains {:.2f}x"),
            ("spec_gain", "guesses {:.2f}x"),
            ("cache_gain", "hot clusters {:.2f}x"),
            ("reorder_gain", "reordering {:.2f}x"),
            ("speculation_accuracy", "{:.2f} of the guesses hold"),
        ),
    ),
    (
        "rag_tiny",
        "the tiny world through `App.run` on {cpu}",
        (
            ("tiny_vs_langgraph_batch_min", "at least {:.2f}x LangGraph with our engine, batched"),
            ("tiny_vs_langgraph_one_min", "{:.2f}x one by one"),
        ),
    ),
    (
        "retrieval",
        "searches in steps of 8 clusters on {cpu}",
        (
            ("stepwise_8_cost_max", "at most {:.2f}x the time of the search in one"),
            ("scanner_gain_max", "generated kernels up to {:.2f}x as fast as faiss"),
        ),
    ),
    (
        "hotpot",
        "HotpotQA, all-MiniLM-L6-v2",
        (
            ("passages", "{} passages"),
            ("recall_flat", "recall@5 {:.3f} by flat search"),
            ("recall_full", "{:.3f} by the index at full nprobe"),
            ("hit_clusters", "{:.2f} of the next search's documents lie in clusters that were hit"),
        ),
    ),
)
"""Files, what they compare, and keys of their summaries with the words for them."""


def run_block(name: str, folder: Path, names: dict[str, Any]) -> str:
    """Run a block of the page in `folder`; return what it prints."""
    told = io.StringIO()
    if name == "index":
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        environment = {**os.environ, "PATH": path}
        subprocess.run(BLOCKS[name], shell=True, cwd=folder, env=environment, check=True)
    else:
        with contextlib.chdir(folder), contextlib.redirect_stdout(told):
            exec(compile(BLOCKS[name], f"the block {name!r}", "exec"), names)
    return told.getvalue()


def draw_times(times: Sequence[NodeTime]) -> str:
    """Return a Mermaid chart of when nodes ran."""
    lines = ["gantt", "  dateFormat x", "  axisFormat %Q ms"]
    for ran in sorted(times, key=lambda ran: ran.start):
        start, end = round(ran.start * 1e3), max(round(ran.end * 1e3), round(ran.start * 1e3) + 1)
        lines += [f"  section {ran.kind}", f"  {ran.node} :{start}, {end}"]
    return "\n".join(lines) + "\n"


def tell_figures() -> str:
    """Return the rows of the table of figures, as the files of results have them now."""
    lines = []
    for file, compared, keys in FIGURES:
        report = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
        cpu = "an " + report["machine"]["cpu"]
        said = [
            words.format(*found)
            for key, words in keys
            if (found := pick_values(report["summary"], key))
        ]
        lines.append(f"| `{file}.json` | {compared.format(cpu=cpu)} | {'; '.join(said)} |")
    return "\n".join(lines)


def pick_values(summary: dict[str, Any], key: str) -> list[Any]:
    """Return the value of a key; `x_*`: the least and largest of all x_; `x_[a,b]`: of two."""
    if key.endswith("*"):
        many = [value for name, value in summary.items() if name.startswith(key[:-1])]
        return [min(many), max(many)] if many else []
    stem, _, ends = key.partition("[")
    names: Iterable[str] = [stem + end for end in ends[:-1].split(",")] if ends else [key]
    return [summary[name] for name in names if name in summary]


def main(page: str) -> None:
    """Write the page."""
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        told = {name: run_block(name, Path(folder), names) for name in BLOCKS}
    result: WorkflowResult = names["result"]
    text = PAGE.format(
        **BLOCKS,
        drawn=names["g"].mermaid(),
        answer=told["run"].strip(),
        ended=told["end"].strip(),
        plain=draw_graph(contract(result.graph)),
        ran=draw_graph(result.graph),
        what="\n".join(
            fill(text, 100, initial_indent="- ", subsequent_indent="  ") for text in WHAT
        ),
        timeline=draw_times(result.timeline),
        figures=tell_figures(),
    )
    Path(page).write_text(text, encoding="utf-8")
    print(f"{names['question']['input']} {result.outputs['answer'].strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
