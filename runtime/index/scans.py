"""Parts of searches as values, from those who plan them to the scanner and back; filters.

In: a query, some of its clusters. Out: what a `Scanner` (`ivf.py`) takes, and what it found.
"""

from __future__ import annotations

from math import inf
from typing import Any
from weakref import ref

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.runtime.index.cursor import Hit

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
"""By number in a faiss index, whether a vector may be found."""
MARKED = 8
"""Parts of an index in which an `Only` remembers what it lets through."""


class Only:
    """The documents that filters let through: as large as these are many, however ids have grown.

    The same object for the same filters, so that scans share it.
    """

    def __init__(self, ids: Ids) -> None:
        """`ids`: rising, each once."""
        self.ids = ids
        self._marks: tuple[tuple[ref[Ids], Mask], ...] = ()  # replaced whole: threads share it

    @property
    def nbytes(self) -> int:
        """Bytes that it holds. What it remembers of parts that are gone is forgotten first."""
        self._marks = self._alive()
        return self.ids.nbytes + sum(mask.nbytes for _, mask in self._marks)

    def mark(self, among: Ids) -> Mask:
        """Tell of each of some rising ids, of a part of an index, whether it is let through."""
        for part, known in self._marks:
            if part() is among:
                return known
        mask = np.zeros(len(among), bool)
        mask[np.searchsorted(among, self.ids[are_in(self.ids, among)])] = True
        self._marks = (*self._alive(), (ref(among), mask))[-MARKED:]
        return mask

    def _alive(self) -> tuple[tuple[ref[Ids], Mask], ...]:
        return tuple(mark for mark in self._marks if mark[0]() is not None)


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some clusters of a search: what is to be scanned, and on the way back what was found.

    vector: of the query, float32 bytes. clusters: in the order they are wanted. centroids: how far
    theirs are. depth: hits that are wanted. bound: those farther than it are of no use, and need
    not be found. version: of the documents that it is to see. hits: nearest first. homes: the
    cluster of each hit.
    """

    vector: bytes = b""
    clusters: tuple[int, ...] = ()
    centroids: tuple[float, ...] = ()
    depth: int = 0
    bound: float = inf
    filters: dict[str, Any] = {}
    version: int = 0
    hits: tuple[Hit, ...] = ()
    homes: tuple[int, ...] = ()


def are_in(ids: Ids, among: Ids) -> Mask:
    """Tell of each id whether it is in rising ids."""
    if not len(among):
        return np.zeros(len(ids), bool)
    at = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    return np.asarray(among[at] == ids)
