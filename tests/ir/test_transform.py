"""Transformations of execution graphs: what each makes, where it is refused, and equal outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    read_graph,
)
from dovetail.ir.transform import STEPS, Step, speculate_generation, split_search, transform
from tests.ir.fake_engine import outputs

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


def step(name: str, node: str, *numbers: int, target: str | None = None) -> Step:
    return Step(name=name, node=node, target=target, numbers=numbers)


def drawn(graph: ExecutionGraph) -> list[str]:
    """Return the edges as text, in the arrows of the docstrings."""
    arrows = {"data": "-->", SPECULATIVE: "~~>", HISTORY: "··>", PREFETCH: "··>"}
    return [f"{e.source} {arrows[e.kind]} {e.target}" for e in graph.edges]


def test_a_search_is_cut_into_a_chain() -> None:
    after = transform(chain(), [step("split_search", "R", 2, 3)])
    assert [n.clusters for n in after.parts("R")] == [(7, 3), (9, 1, 4)]
    assert {"Q --> R/0", "R/0 --> R/1", "R/1 --> G"} <= set(drawn(after))
    assert split_search(chain(), "R", (5,)) == chain()


def test_a_reply_is_cut_after_decode_steps() -> None:
    after = transform(chain(), [step("split_reply", "G", 3, 3)])
    assert [n.steps for n in after.parts("G")] == [3, 3, None]
    assert {"R --> G/0", "G/0 --> G/1", "G/2 --> X"} <= set(drawn(after))


def test_a_search_is_reordered() -> None:
    after = transform(chain(), [step("reorder", "R", 4, 3, 9, 7, 1)])
    assert after.node("R").clusters == (4, 3, 9, 7, 1) and after.edges == chain().edges


def test_a_generation_is_begun_on_a_part_of_a_search_and_checked() -> None:
    steps = [
        step("split_search", "R", 2, 2, 1),
        step("speculate_generation", "R/0", target="G"),
        step("speculate_generation", "R/1", target="G"),
    ]
    after = transform(chain(), steps)
    assert {
        "R/0 ~~> G/guess/0",
        "R/1 ~~> G/guess/1",
        "G/guess/0 --> G/check",
        "G/guess/1 --> G/check",
        "R/2 --> G/check",
        "G/check --> X",
    } <= set(drawn(after))
    assert [n.provisional for n in after.parts("G")] == [True, True, False]


def test_a_scout_searches_ahead_and_only_shows_the_way() -> None:
    steps = [
        step("split_reply", "G", 2),
        step("speculate_retrieval", "G/0", target="S"),
        step("split_search", "S", 1, 1),
    ]
    after = transform(chain(), steps)
    assert {"G/0 ~~> S/scout", "S/scout ··> S/0"} <= set(drawn(after))
    assert after.node("S/scout").provisional
    assert after.ordered().index("S/scout") > after.ordered().index("G/0")


def test_a_sub_stage_is_scanned_on_two_devices_and_merged() -> None:
    after = transform(
        chain(), [step("split_search", "R", 3, 2), step("split_devices", "R/0", 3, 8, 9)]
    )
    assert {"Q --> R/0/cpu", "Q --> R/0/gpu", "R/0/gpu --> R/0/merge", "R/0/merge --> R/1"} <= set(
        drawn(after)
    )
    assert after.node("R/0/cpu").clusters == (7,) and after.node("R/0/gpu").clusters == (3, 9)
    assert after.node("R/0/gpu").device == "gpu"


def test_clusters_are_copied_beside_a_search() -> None:
    after = transform(chain(), [step("prefetch", "R", 5, 6)])
    assert "R/copy ··> R" in drawn(after) and after.node("R/copy").clusters == (5, 6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (step("split_search", "R", 2, 2), "its 5"),
        (step("split_search", "R", 5, 0), "its 5"),
        (step("split_search", "G", 1), "'G' is no retrieval but a generation"),
        (step("split_search", "Z", 1), "'Z' is not in the graph"),
        (step("split_reply", "G", 0), "cannot be cut"),
        (step("reorder", "R", 7, 3, 9, 1), "must be its clusters"),
        (step("speculate_generation", "R", target="G"), "no part of a search before"),
        (step("speculate_generation", "S", target="G"), "no part of a search before"),
        (step("speculate_generation", "R", target="X"), "no generation"),
        (step("speculate_generation", "R"), "needs a target"),
        (step("speculate_retrieval", "G", target="X"), "no search"),
        (step("split_devices", "R", 5), "no cluster"),
        (step("prefetch", "R"), "nothing more to copy"),
        (step("dream", "R"), "no transformation 'dream'"),
    ],
)
def test_transformations_are_refused_where_they_do_not_fit(wrong: Step, said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        transform(chain(), [wrong])


def test_a_scout_is_sent_once_and_clusters_are_copied_once() -> None:
    scout, copy = step("speculate_retrieval", "G", target="S"), step("prefetch", "R", 1)
    for twice in (scout, copy):
        with pytest.raises(WorkflowError):
            transform(chain(), [twice, twice])


def test_a_wrong_guess_is_generated_anew_and_a_right_one_counts() -> None:
    """Of many graphs both happen; what is given is the same."""
    held = set()
    for first in range(40):
        plain = chain_from(first)
        after = speculate_generation(split_search(plain, "R", (3, 2)), "R/0", "G")
        assert outputs(after) == outputs(plain)
        early = split_search(plain, "R", (3, 2))
        partial = ExecutionGraph([n for n in early.nodes if n.name != "R/1"])
        held.add(outputs(partial)["R"] == outputs(plain)["R"])
    assert held == {True, False}


def chain_from(first: int) -> ExecutionGraph:
    nodes = [
        GraphNode(name="R", kind=RETRIEVAL, clusters=tuple(range(first, first + 5))),
        GraphNode(name="G", kind=GENERATION),
    ]
    return ExecutionGraph(nodes, [edge("R", "G")])


@st.composite
def graphs(draw: st.DrawFn) -> ExecutionGraph:
    """Return an acyclic graph of all kinds."""
    count = draw(st.integers(2, 7))
    nodes, edges = [], []
    for i in range(count):
        kind = draw(st.sampled_from([RETRIEVAL, RETRIEVAL, GENERATION, GENERATION, FUNCTION]))
        clusters = draw(st.permutations(range(6))) if kind == RETRIEVAL else ()
        nodes.append(GraphNode(name=f"n{i}", kind=kind, clusters=tuple(clusters)))
        for before in draw(st.sets(st.integers(0, max(0, i - 1)), max_size=min(i, 3))):
            if before < i:
                edges.append(edge(f"n{before}", f"n{i}"))
    return ExecutionGraph(nodes, edges)


def cut(draw: Callable[..., int], total: int) -> tuple[int, ...]:
    """Return numbers above 0 that add up to `total`."""
    counts = []
    while total:
        counts.append(draw(st.integers(1, total)))
        total -= counts[-1]
    return tuple(counts)


def guessable(graph: ExecutionGraph) -> Iterator[tuple[str, str]]:
    """Yield the parts of searches, and the generations after these."""
    for part in graph.nodes:
        if part.kind == RETRIEVAL and part.origin and not part.provisional:
            whole = contract(graph)
            for child in whole.nodes:
                if child.kind == GENERATION and part.root in whole.parents(child.name):
                    yield part.name, child.name


def a_step(draw: st.DrawFn, graph: ExecutionGraph) -> Step:
    """Return a step that may fit."""
    node = draw(st.sampled_from(graph.nodes))
    name = draw(st.sampled_from([*sorted(STEPS), "split_search", "speculate_generation"]))
    target = draw(st.sampled_from(graph.nodes)).root
    numbers: tuple[int, ...] = tuple(draw(st.permutations(node.clusters)))
    if name == "split_search":
        numbers = cut(draw, len(node.clusters))
    elif name == "split_reply":
        numbers = cut(draw, draw(st.integers(1, 5)))
    elif name == "speculate_generation" and (fits := list(guessable(graph))):
        at, target = draw(st.sampled_from(fits))
        return Step(name=name, node=at, target=target)
    elif name in ("split_devices", "prefetch"):
        numbers = tuple(draw(st.sets(st.integers(0, 5), min_size=1)))
    return Step(name=name, node=node.name, target=target, numbers=numbers)


@given(data=st.data())
def test_a_graph_and_its_transformed_forms_give_the_same(data: st.DataObject) -> None:
    plain = graph = data.draw(graphs())
    steps = []
    for _ in range(data.draw(st.integers(1, 12))):
        wanted = a_step(data.draw, graph)  # type: ignore[arg-type]
        try:
            graph = transform(graph, [wanted])
        except WorkflowError:
            continue
        steps.append(wanted)
    assert outputs(graph) == outputs(plain)
    assert contract(graph) == contract(plain)
    assert read_graph(graph.to_json()) == graph
    tape = msgspec.json.decode(msgspec.json.encode(steps), type=list[Step])
    assert transform(plain, tape) == graph
