"""What rules of C declarations hand upwards while a unit is built: declarators, specifiers, lists.

In: parts found by the grammar. Out: frozen values with their spans; `build.py` makes types of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.ir.diagnostics import Span
from dovetail.ir.expr import Expr, NamedType
from dovetail.ir.low import nodes as low


@dataclass(frozen=True, slots=True)
class Pointer:
    """A `*` layer of a declarator."""

    const: bool
    restrict: bool


@dataclass(frozen=True, slots=True)
class Array:
    """A `[size]` layer of a declarator."""

    size: Expr | None


@dataclass(frozen=True, slots=True)
class Parameters:
    """A `(parameters)` layer of a declarator."""

    params: tuple[low.Param, ...]


Layer = Pointer | Array | Parameters


@dataclass(frozen=True, slots=True)
class Declarator:
    """A declared name (empty in a type name) and its layers, from the name outwards."""

    name: str
    layers: tuple[Layer, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Specifiers:
    """What stands before the declarators; struct definitions found there come along."""

    type: NamedType
    static: bool
    inline: bool
    structs: tuple[low.StructDef, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct or union specifier."""

    name: str
    structs: tuple[low.StructDef, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Items:
    """Nodes of a list rule, with the span of the text they came from."""

    nodes: tuple[Any, ...]
    span: Span


def wrapped(declarator: Declarator, *layers: Layer) -> Declarator:
    """Return the declarator with more layers around it."""
    return replace(declarator, layers=(*declarator.layers, *layers))


def array_size(children: Sequence[Any]) -> Expr | None:
    """Return the size between the brackets `children` end with; None where there is none."""
    last = children[-2]
    return last if isinstance(last, Expr) else None
