"""What rules of C declarations hand upwards while a unit is built: declarators, specifiers, lists.

In: parts found by the grammar. Out: frozen values with their spans; `build.py` makes types of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dovetail.ir.diagnostics import NO_SPAN, Span
from dovetail.ir.expr import ArrayType, Expr, NamedType, PointerType, Type
from dovetail.ir.low import nodes as low


@dataclass(frozen=True, slots=True)
class Parameters:
    """A `(parameters)` layer of a declarator."""

    params: tuple[low.Param, ...]


Layer = Callable[..., Type] | Parameters
"""What stands around a name: it makes a type of a type `of` and a `span`, or is outside C's types.

`pointer` and `array_layer` make the former.
"""


@dataclass(frozen=True, slots=True)
class Declarator:
    """A declared name (empty in a type name) and its layers, from the name outwards."""

    name: str
    layers: tuple[Layer, ...] = ()
    span: Span = NO_SPAN


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


def pointer(children: Sequence[Any], span: Span) -> Declarator:
    """Return the declarator of `*`, qualifiers and what may stand behind them."""
    inner, kinds = children[-1], {getattr(child, "type", None) for child in children}
    declared = inner if isinstance(inner, Declarator) else Declarator("", (), span)
    layer = partial(PointerType, const="CONST" in kinds, restrict="RESTRICT" in kinds)
    return wrapped(declared, layer)


def array_layer(children: Sequence[Any]) -> Layer:
    """Return the layer of the brackets that `children` end with."""
    last = children[-2]
    return partial(ArrayType, size=last if isinstance(last, Expr) else None)
