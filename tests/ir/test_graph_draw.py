"""Pictures of execution graphs, and the page that shows every transformation before and after."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path

from dovetail.ir import transform as transformations
from dovetail.ir.graph import FUNCTION, GENERATION, RETRIEVAL, ExecutionGraph, GraphEdge, GraphNode
from dovetail.ir.graph_draw import draw_graph
from dovetail.ir.transform import STEPS, Step, transform

PAGE = Path(__file__).parents[2] / "docs" / "execution-graphs.md"
INTRODUCTION = """# Execution graphs

One request's way through a workflow is an `ExecutionGraph` (`ir/graph.py`): a node for each run of
a node, an edge from each value to what reads it. Transformations (`ir/transform.py`) make it finer
or begin parts of it early; none changes what is computed: `contract` puts the parts together again
and must give the same graph before and after. While serving, the control plane decides which to
apply, and records them as steps: the trace of an answer holds the plain graph and the one that ran.

Cylinders are searches, boxes generations, diamonds check a guess, circles merge, dashed nodes are
provisional: nobody sees what comes of them but the node that they were made of.
"""
SPLIT = Step(name="split_search", node="search", numbers=(2, 3))
CUT = Step(name="split_reply", node="draft", numbers=(8, 8))
SHOWN = {
    "split_search": ([], [SPLIT]),
    "split_reply": ([], [CUT]),
    "reorder": ([], [Step(name="reorder", node="search", numbers=(4, 3, 9, 7, 1))]),
    "speculate_generation": (
        [SPLIT],
        [Step(name="speculate_generation", node="search/0", target="draft")],
    ),
    "speculate_retrieval": (
        [CUT],
        [Step(name="speculate_retrieval", node="draft/1", target="again")],
    ),
    "split_devices": ([], [Step(name="split_devices", node="search", numbers=(3, 4))]),
    "prefetch": ([], [Step(name="prefetch", node="search", numbers=(2, 8))]),
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
    for name, (before, steps) in SHOWN.items():
        said = inspect.getdoc(getattr(transformations, name)) or ""
        summary = said.split("\n\nbefore:")[0].replace("\n\n", "\n")
        graph = transform(plain(), before)
        parts += [
            f"## {name}\n\n{summary}\n",
            f"Before:\n\n```mermaid\n{draw_graph(graph)}```\n",
            f"After:\n\n```mermaid\n{draw_graph(transform(graph, steps))}```\n",
        ]
    return "\n".join(parts)


def test_the_page_shows_every_transformation_as_it_is() -> None:
    assert set(SHOWN) == set(STEPS)
    assert PAGE.read_text() == page()


def test_kinds_of_nodes_and_edges_are_told_apart() -> None:
    steps = [step for _, found in SHOWN.values() for step in found if step.name != "split_devices"]
    order = ["reorder", "prefetch", "split_search", "speculate_generation"]
    chosen = [step for name in order for step in steps if step.name == name]
    drawn = draw_graph(transform(plain(), chosen))
    assert 'n0[("search/0<br>[4, 3]")]' in drawn
    assert 'n3{"draft/check"}' in drawn and "n0 -. guess .-> n2" in drawn
    assert "-. copy .->" in drawn and "class n2,n6 provisional" in drawn


def test_long_lists_are_counted_and_quotes_kept_out() -> None:
    node = GraphNode(name='a "b"', kind=RETRIEVAL, clusters=tuple(range(9)))
    drawn = draw_graph(ExecutionGraph([node]))
    assert "9 clusters" in drawn and "a &quot;b&quot;" in drawn
