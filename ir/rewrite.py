"""The one rewrite engine. A rule maps a node to its replacement.

`None` = unchanged; `()` or a tuple = delete or splice (only where the parent holds a tuple).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from dovetail.ir.node import Node

Replacement: TypeAlias = Node | tuple[Node, ...] | None
Rule: TypeAlias = Callable[[Any], Replacement]


def rewrite(root: Node, rules: Sequence[tuple[type[Node], Rule]]) -> Node | tuple[Node, ...]:
    """Apply `rules` bottom-up, once per node; the first rule of its type that changes it wins."""
    rebuilt = root.map_children(lambda child: rewrite(child, rules))
    for kind, rule in rules:
        if isinstance(rebuilt, kind):
            result = rule(rebuilt)
            if result is not None:
                return result
    return rebuilt


def rewrite_node(root: Node, rules: Sequence[tuple[type[Node], Rule]]) -> Node:
    """Apply `rules` where the root must stay a single node."""
    result = rewrite(root, rules)
    assert isinstance(result, Node), "a rule deleted or spliced the root"
    return result
