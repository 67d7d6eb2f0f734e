"""Order and loops: an order that fits all edges but loops, and distances against brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.workflow import END, START, Edge, Place
from dovetail.ir.workflow_order import count_loops, order_places

SIZE = 6


def edges_of(pairs: list[tuple[Place, Place]]) -> dict[Place, tuple[Edge, ...]]:
    found: dict[Place, list[Edge]] = {}
    for source, target in pairs:
        found.setdefault(source, []).append(Edge(source, target))
    return {source: tuple(edges) for source, edges in found.items()}


NODES = st.integers(0, SIZE - 1)
PAIRS = st.lists(st.tuples(NODES | st.just(START), NODES | st.just(END)), max_size=14)


def test_ties_are_broken_as_nodes_were_added() -> None:
    edges = edges_of([(START, 2), (START, 0), (START, 1), (1, 3), (0, 3)])
    assert list(order_places([0, 1, 2, 3], edges)) == [START, 0, 1, 3, 2, END]


def test_a_loop_is_what_leads_back() -> None:
    edges = edges_of([(START, 0), (0, 1), (1, 2), (2, 1), (2, END)])
    order = order_places([2, 1, 0], edges)
    assert list(order) == [START, 0, 1, 2, END]
    away = count_loops([2, 1, 0], edges, order)
    assert away[2] == {END: 0, 1: 1, 2: 1} and away[START] == {0: 0, 1: 0, 2: 0, END: 0}


def test_a_choice_that_may_lead_anywhere_comes_before_what_only_it_leads_to() -> None:
    edges = {**edges_of([(START, 2), (2, 1), (0, 1), (1, END)])}
    edges[2] += (Edge(2, choose=lambda state: 0),)
    assert list(order_places([0, 1, 2], edges)) == [START, 2, 0, 1, END]


@given(PAIRS)
def test_an_order_without_loops_fits_all_edges(pairs: list[tuple[Place, Place]]) -> None:
    straight = [
        (s, t)
        for s, t in pairs
        if s is START or t is END or (s < t)  # type: ignore[operator]
    ]
    straight += [(START, name) for name in range(SIZE)]
    order = order_places(range(SIZE), edges_of(straight))
    assert set(order) == {START, END, *range(SIZE)} and list(order)[-1] is END
    assert all(order[s] < order[t] for s, t in straight)


@given(PAIRS, st.sets(NODES | st.just(START)))
def test_loops_are_the_fewest_on_any_way(
    pairs: list[tuple[Place, Place]], anywhere: set[Place]
) -> None:
    """anywhere: nodes behind which a choice says nothing."""
    pairs = [*pairs, *((START, name) for name in range(SIZE))]
    edges = edges_of(pairs)
    for source in anywhere:
        edges[source] = (*edges.get(source, ()), Edge(source, choose=lambda state: END))
    order = order_places(range(SIZE), edges)
    away = count_loops(range(SIZE), edges, order)
    pairs += [(source, target) for source in anywhere for target in (*range(SIZE), END)]
    cost = {(s, t): int(order[t] <= order[s]) for s, t in pairs}
    best = dict(cost)
    for _ in order:  # Bellman and Ford: ways of one edge more
        for (a, b), n in list(best.items()):
            for (c, d), m in cost.items():
                if b == c and n + m < best.get((a, d), 99):
                    best[a, d] = n + m
    assert {(a, b): n for a, found in away.items() for b, n in found.items()} == best
