"""What a transformation of live graphs is, and the registry of those there are (HedraRAG §4.5).

In: classes. Out: `REGISTRY`, in the order in which each cycle of the control plane asks them. A
transformation that is not in it never happens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from dovetail.ir.errors import SpecError
from dovetail.ir.live_graph import LiveGraph, LiveNode


@dataclass(frozen=True, slots=True)
class Transformation(ABC):
    """One place in a live graph, and how it may be rewritten there without changing the answer.

    The class finds the places (`fits`). Of each it predicts what rewriting it gains (`gain`); if
    that is more than nothing, it is done (`apply`), before the next place is looked for. Rewrites
    are made of functions of `dovetail.ir.transform`; nodes that they make ready are begun.

    graph: of a request. node: of it, which is rewritten. guesses: whether it begins generations
    before what they read is known. wakes: the field of `Changes` without which it fits nowhere, and
    is not asked; "" = it is asked in each cycle. looks: whether it reads what a search has found so
    far, which then is cut for it. One with a method `why_not(costs)` says why it is
    left where `gain` is nothing, as a text or a `Left`.
    """

    name: ClassVar[str]
    guesses: ClassVar[bool] = False
    wakes: ClassVar[str] = ""
    looks: ClassVar[bool] = False
    graph: LiveGraph
    node: LiveNode

    @classmethod
    @abstractmethod
    def fits(cls, front: Any) -> Iterable[Transformation]:
        """Yield the places where it may be applied now, the best first; `front`: see `Front`."""

    @abstractmethod
    def gain(self, costs: Any) -> float:
        """Predict the seconds that requests save, less those that others lose; `costs`: `Learned`.

        What was measured elsewhere may be returned as it is.
        """

    @abstractmethod
    def apply(self, graph: LiveGraph) -> None:
        """Rewrite the graph."""


NEWS = ("found", "scanned", "progressed", "room", "begins")
"""The fields of `Changes`: what a cycle may have news of."""
REGISTRY: dict[str, type[Transformation]] = {}
"""Transformations by name, in the order in which they are asked."""

Kind = TypeVar("Kind", bound=type[Transformation])


def register_transformation(kind: Kind) -> Kind:
    """Have a transformation asked from now on, after those that are there; a class decorator.

    All requests of this process are served with it, unless `WavefrontSettings.transformations`
    names others. Raises SpecError where one of its name is there already, or what it wakes on is
    nothing that is told.
    """
    if kind.wakes and kind.wakes not in NEWS:
        raise SpecError(f"{kind.name}: wakes is one of {', '.join(NEWS)}, not {kind.wakes!r}")
    if REGISTRY.setdefault(kind.name, kind) is not kind:
        raise SpecError(f"there is a transformation {kind.name!r}; unregister it or choose a name")
    return kind


def unregister_transformation(name: str) -> type[Transformation]:
    """Have a transformation never asked any more; return it. SpecError where there is none."""
    check_transformations({name})
    return REGISTRY.pop(name)


def check_transformations(names: Iterable[str]) -> None:
    """Raise SpecError where a name is none of a transformation's."""
    if unknown := sorted(set(names) - REGISTRY.keys()):
        known = ", ".join(REGISTRY)
        raise SpecError(f"there is no transformation {unknown[0]!r}; there are {known}")
