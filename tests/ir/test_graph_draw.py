"""Pictures of execution graphs, and the page that shows every transformation before and after."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from dovetail.ir import transform as transformations
from dovetail.ir.graph import FUNCTION, GENERATION, RETRIEVAL, ExecutionGraph, GraphEdge, GraphNode
from dovetail.ir.graph_draw import draw_graph
from dovetail.ir.live_graph import LiveGraph, LiveNode

PAGE = Path(__file__).parents[2] / "docs" / "execution-graphs.md"
INTRODUCTION = """# Execution graphs

A request to a workflow runs as a `LiveGraph` (`ir/live_graph.py`): a node for each run of a node,
put there when the request comes to it, an edge from each value to what reads it. A node is
dispatched once it is ready, which is when all that it waits for is over. A decision of the
scheduler rewrites the graph (`ir/transform.py`): it makes a node finer or begins a part of it
early. No rewrite changes what is computed: `contract` puts the parts together again, and gives what
it gave before. The graph of an answer is the one that ran: `result.graph`.

Cylinders are searches, boxes generations, diamonds check a guess, circles merge, dashed nodes are
provisional: nobody sees what comes of them but the node that they were made of.
"""
Show = Callable[[LiveGraph], object]


def node(graph: LiveGraph, name: str) -> LiveNode:
    return next(node for node in graph if node.name == name)


def split(graph: LiveGraph) -> None:
    transformations.split_search(graph, node(graph, "search"), 2)


def write(graph: LiveGraph) -> None:
    """Have the search end, and the reply begin."""
    graph.begin(node(graph, "search"))
    graph.finish(node(graph, "search"))
    graph.begin(node(graph, "draft"))


def cut(graph: LiveGraph) -> None:
    transformations.split_reply(graph, node(graph, "draft"), 8)


def guess(graph: LiveGraph) -> None:
    transformations.speculate_generation(graph, node(graph, "search/0"), node(graph, "draft"))


def copy(graph: LiveGraph) -> None:
    transformations.prefetch(graph, node(graph, "search"), (2, 8))


def reorder(graph: LiveGraph) -> None:
    transformations.reorder(graph, node(graph, "search"), (4, 3, 9, 7, 1))


def send_scout(graph: LiveGraph) -> None:
    scout = transformations.speculate_retrieval(graph, node(graph, "draft/0"))
    transformations.use_scout(graph, scout, node(graph, "again"))


SHOWN: dict[str, tuple[tuple[Show, ...], Show]] = {
    "split_search": ((), split),
    "split_reply": ((write,), cut),
    "stop": (
        (split,),
        lambda graph: transformations.stop(graph, node(graph, "search/1")),
    ),
    "reorder": ((), reorder),
    "speculate_generation": ((split,), guess),
    "speculate_retrieval": ((write, cut), send_scout),
    "split_devices": (
        (),
        lambda graph: transformations.split_devices(graph, node(graph, "search"), {3, 4}),
    ),
    "prefetch": ((), copy),
}
"""What stands before each transformation, and the transformation."""


def plain() -> ExecutionGraph:
    nodes = [
        GraphNode(name="search", kind=RETRIEVAL, clusters=(7, 3, 9, 1, 4)),
        GraphNode(name="draft", kind=GENERATION),
        GraphNode(name="query", kind=FUNCTION),
        GraphNode(name="again", kind=RETRIEVAL, clusters=(5, 2)),
    ]
    names = [node.name for node in nodes]
    edges = [GraphEdge(source=a, target=b) for a, b in pairwise(names)]
    return ExecutionGraph(nodes, edges)


def page() -> str:
    """Return the page: for each transformation what its docstring says, before and after."""
    parts = [INTRODUCTION]
    for name, (before, change) in SHOWN.items():
        said = inspect.getdoc(getattr(transformations, name)) or ""
        summary = said.split("\n\nbefore:")[0].replace("\n\n", "\n")
        graph = changed(*before)
        parts += [
            f"## {name}\n\n{summary}\n",
            f"Before:\n\n```mermaid\n{draw_graph(graph)}```\n",
            f"After:\n\n```mermaid\n{draw_graph(changed(*before, change))}```\n",
        ]
    return "\n".join(parts)


def changed(*changes: Show) -> ExecutionGraph:
    graph = LiveGraph.of(plain())
    for change in changes:
        change(graph)
    return graph.freeze()


def test_the_page_shows_every_transformation_as_it_is() -> None:
    named = {n for n, f in vars(transformations).items() if getattr(f, "__doc__", None)
             and inspect.isfunction(f) and "before:" in f.__doc__}  # fmt: skip
    assert set(SHOWN) == named
    assert PAGE.read_text() == page()


def test_kinds_of_nodes_and_edges_are_told_apart() -> None:
    drawn = draw_graph(changed(reorder, copy, split, guess))
    assert '[("search/0<br>[4, 3]")]' in drawn and '{"draft/check"}' in drawn
    assert "-. guess .->" in drawn and "-. copy .->" in drawn and " provisional" in drawn


def test_long_lists_are_counted_and_quotes_kept_out() -> None:
    node = GraphNode(name='a "b"', kind=RETRIEVAL, clusters=tuple(range(9)))
    drawn = draw_graph(ExecutionGraph([node]))
    assert "9 clusters" in drawn and "a &quot;b&quot;" in drawn
