"""What has to wait for what in a workflow: an order of its nodes, and the loops between them.

In: edges by source. Out: `order`, in which each node comes after those that lead to it but for
loops, and `away`, the fewest loops between two nodes. Both let a runner tell whether a node may
still be reached by work under way, so that joins see the same state whatever is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import networkx as nx  # type: ignore[import-untyped]

from dovetail.ir.workflow import END, START, Edge, Name, Place, targets

Edges = Mapping[Place, Sequence[Edge]]


def order_places(names: Sequence[Name], edges: Edges) -> dict[Place, int]:
    """Return the rank of all places that can be reached, START first and END last.

    Edges that lead back to where a walk from START came through are loops. A choice that may lead
    anywhere says nothing about order but for the nodes to which nothing else leads. Ties are
    broken as nodes were added.
    """
    known = {
        source: {target for edge in found if not _open(edge) for target in targets(edge, names)}
        for source, found in edges.items()
    }
    hidden = set(names) - set(_leave(known, names))
    for source, found in edges.items():
        if any(map(_open, found)):
            known[source] |= hidden
    ranked = _leave(known, names)[::-1]
    return {place: rank for rank, place in enumerate((*ranked, END))}


def _open(edge: Edge) -> bool:
    """Tell whether an edge may lead anywhere."""
    return edge.choose is not None and edge.targets is None


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
    ways.add_weighted_edges_from(
        (source, target, int(order[target] <= order[source]))
        for source, found in edges.items()
        for edge in found
        for target in targets(edge, names)
        if target in order
    )
    far = dict(nx.all_pairs_dijkstra_path_length(ways))
    away: dict[Place, dict[Place, int]] = {place: {} for place in order}
    for place, following, loops in ways.edges.data("weight"):
        for other, more in far[following].items():
            away[place][other] = min(loops + more, away[place].get(other, loops + more))
    return away
