"""The base of all IR nodes, frozen dataclasses that know their children; how trees are rewritten.

`span` never takes part in equality, so a re-parsed print equals the tree it was printed from.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeAlias

from dovetail.ir.diagnostics import NO_SPAN, Span

MOST_NESTING = 150
"""Levels of a tree, or of macros; Python's own stack bounds what can be walked."""
NESTING_HINT = "each operand of a sum and each `elif` is a level; give parts names of their own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A typed tree node. Fields that hold nodes, or tuples of nodes, are its children."""

    span: Span = field(default=NO_SPAN, compare=False, repr=False)

    def children(self) -> list[Node]:
        """Return the direct child nodes in field order."""
        found: list[Node] = []
        for name in _field_names(type(self)):
            _add_nodes(getattr(self, name), found)
        return found

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first."""
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children()))

    def map_children(self, change: Callable[[Node], Any]) -> Self:
        """Return the node with `change` applied to every child; the same object if nothing changed.

        In a tuple field, `change` may return a tuple to splice several nodes or none.
        """
        updates: dict[str, Any] = {}
        for name in _field_names(type(self)):
            old = getattr(self, name)
            new = _map_value(old, change)
            if new is not old:
                updates[name] = new
        return replace(self, **updates) if updates else self


def _field_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields that may hold nodes; looked up once per class, as walks are many."""
    names = _FIELD_NAMES.get(kind)
    if names is None:
        names = tuple(f.name for f in fields(kind) if f.type not in _PLAIN)
        _FIELD_NAMES[kind] = names
    return names


_PLAIN = ("Span", "str", "int", "float", "bool", "frozenset[str] | None")
"""Annotations, as written, of fields that never hold nodes."""
_FIELD_NAMES: dict[type[Any], tuple[str, ...]] = {}


def _add_nodes(value: object, found: list[Node]) -> None:
    if isinstance(value, Node):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _add_nodes(item, found)


def _map_value(value: Any, change: Callable[[Node], Any]) -> Any:
    if isinstance(value, Node):
        return change(value)
    if not isinstance(value, tuple):
        return value
    out: list[Any] = []
    changed = False
    for item in value:
        new = _map_value(item, change)
        changed = changed or new is not item
        if isinstance(new, tuple) and isinstance(item, Node):
            out.extend(new)
        else:
            out.append(new)
    return tuple(out) if changed else value


@contextmanager
def no_collector() -> Iterator[None]:
    """Pause Python's cycle collector: trees have no cycles, and its work grows with each node."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# ---- the one rewrite engine: a rule maps a node to its replacement ----

Replacement: TypeAlias = Node | tuple[Node, ...] | None
"""`None` = unchanged; `()` or a tuple = delete or splice, where the parent holds a tuple."""
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
