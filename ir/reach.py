"""What lies behind the nodes of a graph; a graph is a mapping from a node to those after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node")


def reach(after: Mapping[Node, Iterable[Node]], starts: Iterable[Node]) -> set[Node]:
    """Return the nodes that one edge or more lead to from some nodes.

    A node that is reached from itself is in a circle.
    """
    found: set[Node] = set()
    left = list(starts)
    while left:
        new = set(after.get(left.pop(), ())) - found
        found |= new
        left += new
    return found
