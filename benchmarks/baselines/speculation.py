"""Other rules by which a generation is begun on a guess, within our sub-stages (HedraRAG §6.3)."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.runtime.flows.control.costs import StageCosts
from dovetail.runtime.flows.control.messages import Catalog
from dovetail.runtime.flows.control.search import Search
from dovetail.runtime.flows.control.settings import (
    REORDER,
    SPECULATE_GENERATION,
    SPLIT,
    WavefrontSettings,
)
from dovetail.runtime.flows.control.speculation import Speculation
from dovetail.runtime.flows.control.wavefront import Wavefront

POINT = 0.5
"""Share of a search after which `FixedPoint` guesses."""


class Once(Speculation):
    """Guesses once a search, in order of arrival, whatever the load; verifies at its end."""

    def guess(self, now: float) -> None:
        """See Speculation."""
        for search in self._searches.active:
            if search.call is not None and not search.tried and self.due(search):
                for prompt in self._prompts(search):
                    self._begin(search, prompt, now)

    def check(self, search: Search) -> None:
        """See Speculation: a wrong guess goes on until the search is over."""

    def due(self, search: Search) -> bool:
        """Tell whether it is time to guess."""
        raise NotImplementedError


class CacheOnly(Once):
    """RaLMSpec-like: what the request's last search found, before anything is scanned."""

    def due(self, search: Search) -> bool:
        """See Once."""
        return not search.steps.position and len(search.steps.partial) == search.node.topk


class FixedPoint(Once):
    """RAGCache- and PipeRAG-like: what is found at a fixed point of the search."""

    def due(self, search: Search) -> bool:
        """See Once."""
        return search.share >= POINT and len(search.steps.partial) == search.node.topk


class Guessing(Wavefront):
    """Our sub-stages under another rule of guessing."""

    rule: ClassVar[type[Speculation]]
    transformations: ClassVar[frozenset[str]]

    def __init__(self, costs: StageCosts, catalog: Catalog, **settings: Any) -> None:
        chosen = WavefrontSettings(transformations=self.transformations, **settings)
        super().__init__(chosen, costs, catalog)
        tickets, parts = self._tickets, (self._searches, self._replies)
        self._speculation = self.rule(chosen, self.learned, self._board, catalog, tickets, *parts)


class RalmSpec(Guessing):
    """History seeds the search, as RaLMSpec's local cache would."""

    rule = CacheOnly
    transformations = frozenset({SPLIT, REORDER, SPECULATE_GENERATION})


class PipeRag(Guessing):
    """No history: similarity of successive searches is not used."""

    rule = FixedPoint
    transformations = frozenset({SPLIT, SPECULATE_GENERATION})
