"""Transformations of live graphs: what each makes, where it is refused, and equal outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir import transform as t
from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import (
    FUNCTION,
    GENERATION,
    HISTORY,
    PREFETCH,
    RETRIEVAL,
    SPECULATIVE,
    ExecutionGraph,
    GraphEdge,
    GraphNode,
    contract,
)
from dovetail.ir.live_graph import LiveGraph, LiveNode, State
from tests.ir.fake_engine import outputs
from tests.ir.live import live_of, read_graph

CLUSTERS = (7, 3, 9, 1, 4)


def chain() -> ExecutionGraph:
    """Q -> R -> G -> X -> S: a search, a reply, a function, a search again."""
    nodes = [
        GraphNode(name="Q", kind=FUNCTION),
        GraphNode(name="R", kind=RETRIEVAL, clusters=CLUSTERS),
        GraphNode(name="G", kind=GENERATION, model="m"),
        GraphNode(name="X", kind=FUNCTION),
        GraphNode(name="S", kind=RETRIEVAL, clusters=(2, 3)),
    ]
    return ExecutionGraph(nodes, [edge("Q", "R"), edge("R", "G"), edge("G", "X"), edge("X", "S")])


def edge(source: str, target: str, kind: str = "data") -> GraphEdge:
    return GraphEdge(source=source, target=target, kind=kind)


def named(graph: LiveGraph, name: str) -> LiveNode:
    (found,) = [node for node in graph if node.name == name]
    return found


def ready(graph: LiveGraph, name: str) -> bool:
    return named(graph, name) in graph.ready


def run(graph: LiveGraph, *names: str) -> None:
    """Have nodes run to their end."""
    for name in names:
        graph.begin(named(graph, name))
        graph.finish(named(graph, name))


def drawn(graph: LiveGraph) -> list[str]:
    """Return the edges as text, in the arrows of the docstrings."""
    assert_same(contract(graph.freeze()), contract(chain()))
    arrows = {"data": "-->", SPECULATIVE: "~~>", HISTORY: "··>", PREFETCH: "··>"}
    return [f"{e.source} {arrows[e.kind]} {e.target}" for e in graph.freeze().edges]


@pytest.fixture
def live() -> LiveGraph:
    return live_of(chain())


def test_a_node_is_ready_once_all_it_waits_for_is_over(live: LiveGraph) -> None:
    assert [node.name for node in live.ready] == ["Q"]
    live.begin(named(live, "Q"))
    assert [node.name for node in live.ready] == []
    live.finish(named(live, "Q"))
    assert [node.name for node in live.ready] == ["R"]
    with pytest.raises(AssertionError, match="'G' is not ready"):
        live.begin(named(live, "G"))


def test_a_search_is_cut_into_a_chain(live: LiveGraph) -> None:
    rest = t.split_search(live, named(live, "R"), 2)
    t.split_search(live, rest, 1)
    assert [n.clusters for n in live.freeze().parts("R")] == [(7, 3), (9,), (1, 4)]
    assert {"Q --> R/0", "R/0 --> R/1", "R/1 --> R/2", "R/2 --> G"} <= set(drawn(live))
    run(live, "Q", "R/0")
    assert ready(live, "R/1") and not ready(live, "R/2")


def test_a_part_of_a_search_is_cut_again(live: LiveGraph) -> None:
    t.split_search(live, named(live, "R"), 3)
    assert t.split_search(live, named(live, "R/0"), 1) is named(live, "R/1")
    assert [n.clusters for n in live.freeze().parts("R")] == [(7,), (3, 9), (1, 4)]
    assert {"Q --> R/0", "R/0 --> R/1", "R/1 --> R/2", "R/2 --> G"} <= set(drawn(live))
    t.stop(live, named(live, "R/1"))
    run(live, "Q", "R/0")
    assert ready(live, "G"), "all that is left is left out"


def test_the_rest_of_a_search_is_left_out(live: LiveGraph) -> None:
    t.stop(live, t.split_search(live, named(live, "R"), 2))
    assert [n.clusters for n in live.freeze().parts("R")] == [(7, 3)]
    run(live, "Q", "R/0")
    assert ready(live, "G")


def test_a_reply_is_cut_where_it_has_got_to(live: LiveGraph) -> None:
    run(live, "Q", "R")
    live.begin(named(live, "G"))
    rest = t.split_reply(live, t.split_reply(live, named(live, "G"), 3), 2)
    assert [n.steps for n in live.freeze().parts("G")] == [3, 2, None]
    assert {"R --> G/0", "G/0 --> G/1", "G/2 --> X"} <= set(drawn(live))
    assert rest.state is State.RUNNING and not ready(live, "X")
    live.finish(rest)
    assert ready(live, "X")


def test_a_search_is_reordered(live: LiveGraph) -> None:
    t.reorder(live, named(live, "R"), (4, 3, 9, 7, 1))
    assert named(live, "R").clusters == (4, 3, 9, 7, 1)
    assert live.freeze().edges == chain().edges


def test_a_generation_is_begun_on_a_part_of_a_search_and_checked(live: LiveGraph) -> None:
    t.split_search(live, named(live, "R"), 2)
    run(live, "Q", "R/0")
    guess = t.speculate_generation(live, named(live, "R/0"), named(live, "G"))
    assert {
        "R/0 ~~> G/guess",
        "G/guess --> G/check",
        "R/1 --> G/check",
        "G/check --> X",
    } <= set(drawn(live))
    assert guess in live.ready and not ready(live, "G/check")
    live.begin(guess)
    run(live, "R/1")
    assert not ready(live, "G/check"), "the guess is under way"
    live.finish(t.split_reply(live, guess, 1))
    assert ready(live, "G/check")


def test_a_generation_is_begun_on_what_earlier_searches_found(live: LiveGraph) -> None:
    run(live, "Q")
    guess = t.speculate_generation(live, None, named(live, "G"))
    assert {"G/guess --> G/check", "R --> G/check"} <= set(drawn(live))
    assert guess in live.ready and not live.before(guess)


def test_a_guess_is_rolled_back_with_its_parts(live: LiveGraph) -> None:
    t.split_search(live, named(live, "R"), 2)
    run(live, "Q", "R/0")
    before = live.freeze()
    guess = t.speculate_generation(live, named(live, "R/0"), named(live, "G"))
    live.begin(guess)
    t.roll_back(live, t.split_reply(live, guess, 1))
    assert live.freeze() == before
    run(live, "R/1")
    assert ready(live, "G")


def test_a_scout_searches_ahead_and_only_shows_the_way(live: LiveGraph) -> None:
    run(live, "Q", "R")
    live.begin(named(live, "G"))
    t.split_reply(live, named(live, "G"), 2)
    scout = t.speculate_retrieval(live, named(live, "G/0"))
    assert scout in live.ready and scout.provisional
    t.use_scout(live, scout, named(live, "S"))
    assert {"G/0 ~~> G/scout", "G/scout ··> S"} <= set(drawn(live))
    live.finish(named(live, "G/1"))
    run(live, "X")
    assert ready(live, "S"), "it does not wait for the scout"


def test_a_sub_stage_is_scanned_on_two_devices_and_merged(live: LiveGraph) -> None:
    t.split_search(live, named(live, "R"), 3)
    merge = t.put(live, named(live, "R/0"), "gpu", {3, 8, 9})
    cpu, gpu = (node for node, _ in live.before(merge))
    assert {"Q --> R/0/cpu", "Q --> R/0/gpu", "R/0/gpu --> R/0/merge", "R/0/merge --> R/1"} <= set(
        drawn(live)
    )
    assert (cpu.clusters, gpu.clusters, gpu.device) == ((7,), (3, 9), "gpu")
    run(live, "Q", "R/0/cpu")
    assert merge not in live.ready
    run(live, "R/0/gpu", "R/0/merge")
    assert ready(live, "R/1")


def test_clusters_are_copied_beside_a_search(live: LiveGraph) -> None:
    copy = t.prefetch(live, named(live, "R"), (5, 6))
    assert "R/copy ··> R" in drawn(live) and copy.clusters == (5, 6)
    run(live, "Q")
    assert ready(live, "R"), "it does not wait for the copy"
    with pytest.raises(WorkflowError, match="nothing more to copy"):
        t.prefetch(live, named(live, "R"), (1,))


def test_a_node_is_put_on_a_device_as_a_whole(live: LiveGraph) -> None:
    for name, device in (("R", "gpu"), ("G", "gpu"), ("G", "cpu")):
        node = named(live, name)
        assert t.put(live, node, device) is node and node.device == device
    assert live.freeze().edges == chain().edges


Wrong = Callable[[LiveGraph, Callable[[str], LiveNode]], object]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda g, n: t.split_search(g, n("R"), 5), "after 5 of 5"),
        (lambda g, n: t.split_search(g, n("R"), 0), "after 0 of 5"),
        (lambda g, n: t.split_search(g, n("G"), 1), "'G' is no retrieval but a generation"),
        (lambda g, n: t.split_search(g, LiveNode("Z", RETRIEVAL), 1), "'Z' is not in the graph"),
        (lambda g, n: t.split_reply(g, n("G"), 1), "is waiting, and must be running"),
        (lambda g, n: t.stop(g, n("R")), "not the rest of a search"),
        (lambda g, n: t.reorder(g, n("R"), (7, 3, 9, 1)), "must be the same"),
        (lambda g, n: t.speculate_generation(g, n("Q"), n("G")), "'Q' is not part of a search"),
        (lambda g, n: t.speculate_generation(g, n("R"), n("X")), "'X' is no generation"),
        (lambda g, n: t.speculate_retrieval(g, n("R")), "'R' is not part of a generation"),
        (lambda g, n: t.roll_back(g, n("R")), "'R' is not provisional"),
        (lambda g, n: t.put(g, n("R"), "gpu", {5}), "cannot be shared with gpu"),
        (lambda g, n: t.put(g, n("G"), "gpu", {7}), "'G' is no retrieval"),
        (lambda g, n: t.prefetch(g, n("R"), ()), "nothing more to copy"),
    ],
)
def test_transformations_are_refused_where_they_do_not_fit(
    live: LiveGraph, wrong: Wrong, said: str
) -> None:
    before = live.freeze()
    with pytest.raises(WorkflowError, match=said):
        wrong(live, lambda name: named(live, name))
    assert live.freeze() == before


def test_a_wrong_guess_is_generated_anew_and_a_right_one_counts() -> None:
    """Of many graphs both happen; what is given is the same."""
    held = set()
    for first in range(40):
        plain = chain_from(first)
        live = live_of(plain)
        t.split_search(live, named(live, "R"), 3)
        t.speculate_generation(live, named(live, "R/0"), named(live, "G"))
        after = live.freeze()
        assert outputs(after) == outputs(plain)
        held.add(outputs(partial(first))["R"] == outputs(plain)["R"])
    assert held == {True, False}


def chain_from(first: int, count: int = 5) -> ExecutionGraph:
    nodes = [
        GraphNode(name="R", kind=RETRIEVAL, clusters=tuple(range(first, first + count))),
        GraphNode(name="G", kind=GENERATION),
    ]
    return ExecutionGraph(nodes, [edge("R", "G")])


def partial(first: int) -> ExecutionGraph:
    return chain_from(first, 3)


@st.composite
def graphs(draw: st.DrawFn) -> ExecutionGraph:
    """Return an acyclic graph of all kinds."""
    count = draw(st.integers(2, 5))
    nodes, edges = [], []
    for i in range(count):
        kind = draw(st.sampled_from([RETRIEVAL, RETRIEVAL, GENERATION, GENERATION, FUNCTION]))
        clusters = draw(st.permutations(range(6))) if kind == RETRIEVAL else ()
        nodes.append(GraphNode(name=f"n{i}", kind=kind, clusters=tuple(clusters)))
        for before in draw(st.sets(st.integers(0, max(0, i - 1)), max_size=min(i, 3))):
            if before < i:
                edges.append(edge(f"n{before}", f"n{i}"))
    return ExecutionGraph(nodes, edges)


def rewrite(draw: st.DrawFn, graph: LiveGraph, name: str) -> None:
    """Do something to a graph; WorkflowError where it does not fit."""
    node, number = draw(st.sampled_from(list(graph))), draw(st.integers(1, 5))
    some = tuple(range(number, 6))
    match name:
        case "begin" if node in graph.ready:
            graph.begin(node)
        case "finish" if node.state is State.RUNNING:
            graph.finish(node)
        case "split_search":
            t.split_search(graph, node, number)
        case "split_reply":
            t.split_reply(graph, node, number)
        case "reorder":
            t.reorder(graph, node, (*node.clusters[number:], *node.clusters[:number]))
        case "guess" if targets := [target for target, _ in graph.after(node)]:
            t.speculate_generation(graph, node, targets[number % len(targets)])
        case "roll_back":
            t.roll_back(graph, node)
        case "scout":
            t.speculate_retrieval(graph, node)
        case "put":
            t.put(graph, node, "gpu", some if node.kind == RETRIEVAL else None)
        case "prefetch":
            t.prefetch(graph, node, some)


NAMES = ("begin", "finish", "split_search", "split_reply", "reorder", "guess", "roll_back",
         "scout", "put", "prefetch")  # fmt: skip


def check_integrity(graph: LiveGraph) -> None:
    """What is counted is what there is, and nothing begins before what it waits for is over."""
    for node in graph:
        held = [s for s, kind in graph.before(node) if kind in ("data", SPECULATIVE)]
        under_way = [s for s in held if s.state is not State.OVER]
        assert node.waits == len(under_way)
        assert (node in graph.ready) == (node.state is State.WAITING and not under_way)
        assert node.state is State.WAITING or not under_way


@given(data=st.data())
def test_a_graph_and_its_transformed_forms_give_the_same(data: st.DataObject) -> None:
    plain = data.draw(graphs())
    live = live_of(plain)
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=16)):
        try:
            rewrite(data.draw, live, name)  # type: ignore[arg-type]
        except WorkflowError:
            continue
        check_integrity(live)
    found = live.freeze()
    assert outputs(found) == outputs(plain)
    assert_same(contract(found), contract(plain))
    assert read_graph(found.to_json()) == found


def assert_same(one: ExecutionGraph, other: ExecutionGraph) -> None:
    """Whatever order nodes and edges stand in."""
    assert set(one.nodes) == set(other.nodes) and set(one.edges) == set(other.edges)


@given(data=st.data())
def test_no_node_is_lost_or_runs_twice(data: st.DataObject) -> None:
    """Whatever is done to it meanwhile, a graph comes to its end, each node begun once."""
    live, begun = live_of(data.draw(graphs())), list[LiveNode]()
    while any(node.state is not State.OVER for node in live if not node.provisional):
        with suppress(WorkflowError):
            rewrite(data.draw, live, data.draw(st.sampled_from(NAMES[2:])))
        ready = list(live.ready)
        running = [node for node in live if node.state is State.RUNNING]
        assert ready or running, "the graph stands still"
        node = data.draw(st.sampled_from([*ready, *running]))
        if node in live.ready:
            live.begin(node)
            begun.append(node)
        else:
            live.finish(node)
        check_integrity(live)
    assert len(begun) == len(set(begun))
