"""What has to wait for what in a workflow: an order of its nodes, and the loops between them.

In: edges by source. Out: `order`, in which each node comes after those that lead to it but for
loops, and `away`, the fewest loops between two nodes. Both let a runner tell whether a node may
still be reached by work under way, so that joins see the same state whatever is faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set

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
    hidden = set(names) - set(_leave(START, known, names))
    for source, found in edges.items():
        if any(map(_open, found)):
            known[source] |= hidden
    ranked = _leave(START, known, names)[::-1]
    return {place: rank for rank, place in enumerate((*ranked, END))}


def _open(edge: Edge) -> bool:
    """Tell whether an edge may lead anywhere."""
    return edge.choose is not None and edge.targets is None


def _leave(start: Place, known: Mapping[Place, Set[Place]], names: Sequence[Name]) -> list[Place]:
    """Return places in the order in which a depth-first walk from `start` leaves them for good.

    Children that were added later are walked first: reversed, the order has them last. Not END.
    """

    def children(place: Place) -> Iterator[Place]:
        following = known.get(place, frozenset())
        return (name for name in reversed(names) if name in following)

    seen = {start}
    left: list[Place] = []
    stack = [(start, children(start))]
    while stack:
        place, rest = stack[-1]
        following = next((p for p in rest if p not in seen), None)
        if following is None:
            left.append(place)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, children(following)))
    return left


def count_loops(
    names: Sequence[Name], edges: Edges, order: Mapping[Place, int]
) -> dict[Place, dict[Place, int]]:
    """Return for each place the places one can get to from it, and through how many loops."""
    steps = {
        source: {
            target: int(order[target] <= order[source])
            for edge in found
            for target in targets(edge, names)
            if target in order
        }
        for source, found in edges.items()
    }
    return {place: _reach(place, steps) for place in order}


def _reach(start: Place, steps: Mapping[Place, Mapping[Place, int]]) -> dict[Place, int]:
    """Return the fewest loops to each place: breadth first, steps through no loop before others."""
    found: dict[Place, int] = {}
    waiting: deque[tuple[Place, int]] = deque()

    def spread(place: Place, loops: int) -> None:
        for following, more in steps.get(place, {}).items():
            (waiting.append if more else waiting.appendleft)((following, loops + more))

    spread(start, 0)
    while waiting:
        place, loops = waiting.popleft()
        if place not in found:
            found[place] = loops
            spread(place, loops)
    return found
