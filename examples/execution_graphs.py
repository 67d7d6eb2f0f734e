"""Write docs/execution-graphs.md: graphs of a request at four moments, and all rewrites of graphs.

    python examples/execution_graphs.py docs

The four moments are also one picture, docs/live-graph.svg.

The control plane is told report by report what came of its orders, so that the page is always the
same.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import TypeVar

from dovetail import RAGraph, WavefrontSettings, workflows
from dovetail.ir import transform
from dovetail.ir.graph import (
    FUNCTION,
    GENERATION,
    GPU,
    RETRIEVAL,
    ExecutionGraph,
    GraphNode,
)
from dovetail.ir.graph_draw import draw_graph, draw_graphs
from dovetail.ir.live_graph import LiveGraph, LiveNode
from dovetail.ir.workflow import Retrieval
from dovetail.runtime.flows.control.costs import StageCosts, StepCost
from dovetail.runtime.flows.control.messages import (
    Embed,
    FindClusters,
    Finished,
    Generate,
    Order,
    Probed,
    Progressed,
    Report,
    ScanClusters,
    Scanned,
)
from dovetail.runtime.flows.control.transformations import REGISTRY
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost

OWN = Path(__file__).with_name("own_transformation.py")
PAGE = """\
# Execution graphs

This page was written by `python examples/execution_graphs.py docs`.

A workflow is compiled to a template, `graph/NAME.json` in the artifact. A request to it runs as a
`LiveGraph` (`ir/live_graph.py`) of that template: a node for each run of a node, put there when the
request comes to it, an edge from each value to what reads it. A node is dispatched once it is
ready, which is when all that it waits for is over. The scheduler decides nothing beside that: what
it does to a search or a reply is a rewrite of the graph. Rewrites do not change what is computed:
`contract` puts the parts together again, and gives what it gave before. Two do so where they are
told to: `stop` ends a search early, and `arrange` orders documents whose order is free. The graph
of an answer is the one that ran: `result.graph`.

A template says what is computed, not where: a node names a model or an index, and the graph of
what serves, `graph/serve.json`, has the places of models, encoders and searches, each once. They
are put together when the artifact is loaded, so that a plan for fewer CPUs, or a place that was
edited, holds for every workflow. `dovetail inspect` shows as which nodes of that graph the nodes
of a workflow run, and on which PUs.

Cylinders are searches, boxes generations, diamonds check a guess, circles merge, dashed nodes are
provisional: nobody sees what comes of them but the node that they were made of.

## A request at four moments

Its workflow is HyDE: it imagines a passage, searches with it, and answers from what was found.

![The live graph of a request at four moments](live-graph.svg)

{moments}

## Transformations

A transformation (`runtime/flows/control/transformation.py`) finds places where it fits, predicts
the seconds that it gains there from what stages were measured to cost, and rewrites the graph. In
each cycle the control plane asks those of the registry in this order, and applies what gains more
than nothing:

| name | what it does |
|---|---|
{registry}

`WavefrontSettings(transformations=frozenset({{...}}))` has only some of them asked. What was done
to a request, and what each rewrite was to gain, is in `result.rewrites`, in the events of
`app.submit_workflow` and on the timeline of `app.record`.

## Your own

A class in one file is enough. `python examples/own_transformation.py app.dove WORKFLOW "..."` runs
it on a workflow of an artifact:

```python
{own}```

`front` is what is under way in all requests (`runtime/flows/control/front.py`); `front.news` has
what has changed since the last cycle. `costs` (`runtime/flows/control/costs.py`) predicts scans,
replies and guesses. `gain` may be a figure that you have measured yourself, as here.
`dovetail.unregister_transformation("look_first")` ends it.

## Rewrites

They are made of these functions of `ir/transform.py`.

{rewrites}"""

# ---- four moments ----

Kind = TypeVar("Kind", bound=Order)


class Corpus:
    """Twelve clusters of a hundred vectors; a document is called by its number."""

    def sizes(self, index: str | None) -> Sequence[int]:
        """See Catalog."""
        return [100] * 12

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        """See Catalog."""
        return [Document(id=id_, text=f"document {id_}") for _, id_ in hits]


class Request:
    """A request, of which somebody tells what came of each piece of work."""

    def __init__(self, graph: RAGraph) -> None:
        costs = StageCosts(
            scan=ScanCost(1e-4, 1e-4), overhead=1e-4, step=StepCost(fixed=2e-3), reply=0.5
        )
        self.control = Wavefront(WavefrontSettings(fixed_clusters=2), costs, Corpus())
        number = self.control.submit(WorkflowRun(graph.workflow(), {"input": "?"}), 0.0)
        self.live = self.control.front.tickets[number].graph
        self.now, self.orders = 0.0, list(self.control.orders(0.0))

    def tell(self, report: Report) -> None:
        """Report, half a stage later."""
        self.now += 0.01
        self.control.tell(report, self.now)
        self.orders += self.control.orders(self.now)

    def last(self, kind: type[Kind]) -> Kind:
        """Return the last order of a kind."""
        return next(order for order in reversed(self.orders) if isinstance(order, kind))

    def find_clusters(self, *clusters: int) -> None:
        """Find the clusters of a query; documents of its history are as far away as they were."""
        order, away = self.last(FindClusters), tuple(map(float, range(len(clusters))))
        self.tell(Probed(order.job, clusters, away, dict.fromkeys(order.known, 0.1)))

    def scan(self, *hits: Hit) -> None:
        """End a scan of one search."""
        order = self.last(ScanClusters)
        homes = (order.parts[0].clusters[0],) * len(hits)
        self.tell(Scanned(order.job, (Part(hits=hits, homes=homes),), 0.02))

    def graph(self) -> ExecutionGraph:
        """Return its graph as it is now."""
        return self.live.freeze()


def show_moments() -> Iterator[tuple[str, str, ExecutionGraph]]:
    """Yield four moments, what happens then, and the graph of the request."""
    request = Request(workflows.hyde(topk=2))
    reply = request.last(Generate)
    for words in ("a few words", "a few words more"):
        request.tell(Progressed(reply.job, words, 8 * len(words.split())))
        request.tell(Finished(request.last(Embed).job, [0.0, 1.0]))
    request.find_clusters(3, 7, 4, 5)
    yield (
        "1. A passage is being written",
        "A passage is being written. `split_reply` has it tell how far it has got; what is written "
        "hardly changes its meaning any more, so `speculate_retrieval` has sent a scout to search "
        "with it. `split` has the scout scan its two nearest clusters first.",
        request.graph(),
    )
    request.scan((0.1, 11), (0.2, 12))
    request.scan((0.05, 41))
    request.tell(Finished(reply.job, "a few words more."))
    request.tell(Finished(request.last(Embed).job, [0.0, 1.0]))
    request.find_clusters(7, 9, 3, 4)
    yield (
        "2. Its search has come",
        "The passage is written, and its search has come. The scout has shown where to look: "
        "`reorder` has these clusters scanned before those that are nearer.",
        request.graph(),
    )
    request.scan((0.1, 11), (0.11, 41))
    yield (
        "3. An answer is begun on what is found so far",
        "They held two documents. `speculate_generation` has begun an answer on them, while the "
        "rest is scanned.",
        request.graph(),
    )
    request.scan((0.05, 71))
    yield (
        "4. The guess did not hold",
        "The rest held a document that is nearer. The guess is rolled back, before anybody has "
        "seen any of it, and the answer is written to the true prompt.",
        request.graph(),
    )


# ---- rewrites ----

Show = Callable[[LiveGraph], object]


def node(graph: LiveGraph, name: str) -> LiveNode:
    """Return the node of a name."""
    return next(node for node in graph if node.name == name)


def split(graph: LiveGraph) -> None:
    """Cut a search."""
    transform.split_search(graph, node(graph, "search"), 2)


def write(graph: LiveGraph) -> None:
    """Have the search end, and the reply begin."""
    graph.begin(node(graph, "search"))
    graph.finish(node(graph, "search"))
    graph.begin(node(graph, "draft"))


def cut(graph: LiveGraph) -> None:
    """Cut a reply."""
    transform.split_reply(graph, node(graph, "draft"), 8)


def send_scout(graph: LiveGraph) -> None:
    """Search ahead of a search."""
    scout = transform.speculate_retrieval(graph, node(graph, "draft/0"))
    transform.use_scout(graph, scout, node(graph, "again"))


SHOWN: dict[str, tuple[tuple[Show, ...], Show]] = {
    "split_search": ((), split),
    "split_reply": ((write,), cut),
    "stop": ((split,), lambda graph: transform.stop(graph, node(graph, "search/1"))),
    "reorder": ((), lambda graph: transform.reorder(graph, node(graph, "search"), (4, 7, 3, 9, 1))),
    "speculate_generation": (
        (split,),
        lambda graph: transform.speculate_generation(
            graph, node(graph, "search/0"), node(graph, "draft")
        ),
    ),
    "speculate_retrieval": ((write, cut), send_scout),
    "put": ((), lambda graph: transform.put(graph, node(graph, "search"), GPU, {3, 4})),
    "prefetch": ((), lambda graph: transform.prefetch(graph, node(graph, "search"), (2, 8))),
}
"""What stands before each rewrite, and the rewrite."""


def changed(*changes: Show) -> ExecutionGraph:
    """Return a graph of two searches after some changes."""
    template = ExecutionGraph(
        [
            GraphNode(name="search", kind=RETRIEVAL, clusters=(7, 3, 9, 1, 4)),
            GraphNode(name="draft", kind=GENERATION),
            GraphNode(name="query", kind=FUNCTION),
            GraphNode(name="again", kind=RETRIEVAL, clusters=(5, 2)),
        ]
    )
    graph, last = LiveGraph(template), list[LiveNode]()
    for found in template.nodes:
        live = LiveNode(found.name, found.kind, clusters=found.clusters)
        last = [graph.add(live, [(before, "data") for before in last])]
    for change in changes:
        change(graph)
    return graph.freeze()


def show_rewrites() -> Iterator[str]:
    """Yield a section for each: what its docstring says, before and after."""
    for name, (before, change) in SHOWN.items():
        said = inspect.getdoc(getattr(transform, name)) or ""
        summary = said.split("\n\nbefore:")[0].replace("\n\n", "\n")
        yield f"### {name}\n\n{summary}\n"
        yield f"Before:\n\n```mermaid\n{draw_graph(changed(*before))}```\n"
        yield f"After:\n\n```mermaid\n{draw_graph(changed(*before, change))}```\n"


def make_page() -> str:
    """Return the page."""
    said = {name: inspect.getdoc(kind) or "" for name, kind in REGISTRY.items()}
    moments = (f"{n}. {fill(words, 100)}" for n, (_, words, _) in enumerate(show_moments(), 1))
    return PAGE.format(
        moments="\n".join(moments),
        registry="\n".join(f"| `{n}` | {text.partition(chr(10))[0]} |" for n, text in said.items()),
        own=OWN.read_text(encoding="utf-8"),
        rewrites="\n".join(show_rewrites()),
    )


def make_picture() -> str:
    """Return the picture of the four moments."""
    return draw_graphs([(title, graph) for title, _, graph in show_moments()])


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    (docs / "execution-graphs.md").write_text(make_page(), encoding="utf-8")
    (docs / "live-graph.svg").write_text(make_picture(), encoding="utf-8")
