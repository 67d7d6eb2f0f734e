"""Pictures of execution graphs, and the page that shows every transformation before and after."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from xml.etree import ElementTree

from dovetail.ir import transform
from dovetail.ir.graph import RETRIEVAL, ExecutionGraph, GraphNode
from dovetail.ir.graph_draw import draw_graph
from dovetail.ir.live_graph import LiveGraph
from tests.repository import ROOT

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "execution_graphs.py"))
Show = Callable[[LiveGraph], object]
changed: Callable[..., ExecutionGraph] = EXAMPLE["changed"]


def shown(name: str) -> Show:
    """Return a rewrite as the page shows it."""
    change: Show = EXAMPLE["SHOWN"][name][1]
    return change


def test_the_page_shows_every_rewrite_and_transformation_as_it_is() -> None:
    named = {n for n, f in vars(transform).items() if inspect.isfunction(f)
             and "before:" in (f.__doc__ or "")}  # fmt: skip
    assert set(EXAMPLE["SHOWN"]) == named
    page = (ROOT / "docs" / "execution-graphs.md").read_text()
    assert page == EXAMPLE["make_page"]()


def test_the_picture_of_four_moments_is_as_it_is_and_holds_every_node_and_edge() -> None:
    drawn = (ROOT / "docs" / "live-graph.svg").read_text()
    assert drawn == EXAMPLE["make_picture"]()
    graphs = [graph for _, _, graph in EXAMPLE["show_moments"]()]
    assert len(graphs) == 4 and ElementTree.fromstring(drawn).tag.endswith("svg")
    assert drawn.count("<rect") == 1 + sum(len(graph.nodes) for graph in graphs)
    assert drawn.count("url(#tip)") == sum(len(graph.edges) for graph in graphs)


def test_kinds_of_nodes_and_edges_are_told_apart() -> None:
    drawn = draw_graph(
        changed(*map(shown, ("reorder", "prefetch", "split_search", "speculate_generation")))
    )
    assert '[("search/0<br>[4, 7]")]' in drawn and '{"draft/check"}' in drawn
    assert "-. guess .->" in drawn and "-. copy .->" in drawn and " provisional" in drawn


def test_long_lists_are_counted_and_quotes_kept_out() -> None:
    node = GraphNode(name='a "b"', kind=RETRIEVAL, clusters=tuple(range(9)))
    drawn = draw_graph(ExecutionGraph([node]))
    assert "9 clusters" in drawn and "a &quot;b&quot;" in drawn
