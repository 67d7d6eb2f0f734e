"""What has to wait for what in a workflow: an order of its nodes, and the loops between them.

In: edges by source. Out: `order`, in which each node comes after those that lead to it but for
loops, and `away`, the fewest loops between two nodes. Both let a runner tell whether a node may
still be reached by work under way, so that joins see the same state whatever is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import networkx as nx  # type: ignore[import-untyped]

from dovetail.ir.workflow import END, START, Edge, Name, Place, leads_anywhere, targets

Edges = Mapping[Place, Sequence[Edge]]


def order_places(names: Sequence[Name], edges: Edges) -> dict[Place, int]:
    """Return the rank of all places that can be reached, START first and END last.

    Edges that lead back to where a walk from START came through are loops. A choice that may lead
    anywhere says nothing about order but for the nodes to which nothing else leads. Ties are
    broken as nodes were added.
    """
    known = {
        source: {to for edge in found if not leads_anywhere(edge) for to in targets(edge, names)}
        for source, found in edges.items()
    }
    hidden = set(names) - set(_leave(known, names))
    for source, found in edges.items():
        if any(map(leads_anywhere, found)):
            known[source] |= hidden
    ranked = _leave(known, names)[::-1]
    return {place: rank for rank, place in enumerate((*ranked, END))}


def _leave(known: Mapping[Place, Set[Place]], names: Sequence[Name]) -> list[Place]:
    """Return places in the order in which a depth-first walk from START leaves them for good.

    Children that were added later are walked first: reversed, the order has them last. Not END.
    """
    walked = nx.DiGraph()
    walked.add_node(START)
    for place, following in known.items():
        walked.add_edges_from((place, name) for name in reversed(names) if name in following)
    return list(nx.dfs_postorder_nodes(walked, START))


def count_loops(
    names: Sequence[Name], edges: Edges, order: Mapping[Place, int]
) -> dict[Place, dict[Place, int]]:
    """Return for each place the places one can get to from it, and through how many loops."""
    ways = nx.DiGraph()
    ways.add_nodes_from(order)
    for place, rank in order.items():  # ("from", rank) leads to all places of a rank or later
        ways.add_edge(("from", rank), place, weight=0)
        ways.add_edge(("from", rank), ("from", rank + 1), weight=0)
    for source, found in edges.items():
        if any(map(leads_anywhere, found)):
            ways.add_edge(source, ("from", order[START] + 1), weight=1)
            ways.add_edge(source, ("from", order[source] + 1), weight=0)
        ways.add_weighted_edges_from(
            (source, target, int(order[target] <= order[source]))
            for edge in found
            if not leads_anywhere(edge)
            for target in targets(edge, names)
            if target in order
        )
    far = dict(nx.all_pairs_dijkstra_path_length(ways))
    away: dict[Place, dict[Place, int]] = {place: {} for place in order}
    for place, following, loops in ways.edges(order, data="weight"):
        for other, more in far[following].items():
            if other in order:
                away[place][other] = min(loops + more, away[place].get(other, loops + more))
    return away
