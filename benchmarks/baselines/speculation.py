"""Other rules by which a generation is begun on a guess, within our sub-stages (HedraRAG §6.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from dovetail.runtime.flows.control.costs import Learned, StageCosts
from dovetail.runtime.flows.control.front import Front
from dovetail.runtime.flows.control.messages import Catalog, Order
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import (
    register_transformation,
    unregister_transformation,
)
from dovetail.runtime.flows.control.transformations import SpeculateGeneration
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.control.work import Search

POINT = 0.5
"""Share of a search after which `FixedPoint` guesses."""


class Once(SpeculateGeneration):
    """Guesses once a search, in order of arrival, whatever the load."""

    wakes = ""  # of no news of ours: each looks when it is its time

    @classmethod
    def fits(cls, front: Front) -> Iterator[Self]:
        """See Transformation."""
        for search in front.known:
            if search.call is not None and not search.tried and search.full and cls.due(search):
                yield from cls.at(front, search, 0.0)

    @classmethod
    def due(cls, search: Search) -> bool:
        """Tell whether it is time to guess."""
        raise NotImplementedError

    def gain(self, costs: Learned) -> float:
        """See Transformation: it is taken for granted."""
        return 1.0


class CacheOnly(Once):
    """RaLMSpec-like: what the request's last search found, before anything is scanned."""

    name = "cache_only"

    @classmethod
    def due(cls, search: Search) -> bool:
        """See Once."""
        return not search.steps.position


class FixedPoint(Once):
    """RAGCache- and PipeRAG-like: what is found at a fixed point of the search."""

    name = "fixed_point"
    looks = True

    @classmethod
    def due(cls, search: Search) -> bool:
        """See Once."""
        return search.share >= POINT


class Guessing(Wavefront):
    """Our sub-stages under another rule of guessing, which verifies at the end of a search."""

    rule: ClassVar[type[Once]]
    others: ClassVar[frozenset[str]]

    def __init__(self, costs: StageCosts, catalog: Catalog, **settings: Any) -> None:
        names = self.others | {self.rule.name}
        with self._registered():
            super().__init__(WavefrontSettings(transformations=names, **settings), costs, catalog)

    def orders(self, now: float) -> tuple[Order, ...]:
        """See Wavefront."""
        with self._registered():
            return super().orders(now)

    def _searched_on(self, search: Search) -> None:
        """See Wavefront: a wrong guess goes on until the search is over."""

    @contextmanager
    def _registered(self) -> Iterator[None]:
        """Have the rule among the transformations while ours are asked."""
        register_transformation(self.rule)
        try:
            yield
        finally:
            unregister_transformation(self.rule.name)


class RalmSpec(Guessing):
    """History seeds the search, as RaLMSpec's local cache would."""

    rule = CacheOnly
    others = frozenset({"split", "split_reply", "reorder"})


class PipeRag(Guessing):
    """No history: similarity of successive searches is not used."""

    rule = FixedPoint
    others = frozenset({"split", "split_reply"})
