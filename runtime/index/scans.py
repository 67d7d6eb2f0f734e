"""Scans of clusters as values: what a piece of a search asks of an index, and who answers it.

In: a query, some of its clusters. Out: what a `Scanner` (`ivf.py`) takes. Pure but for the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from weakref import ref

import msgspec
import numpy as np
from numpy.typing import NDArray

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


class Scan(msgspec.Struct, frozen=True):
    """A piece of a search: some clusters of a query, with the centroid distances of these.

    only: documents that may be found, as its filters say; None = all. bound: those farther than it
    are of no use, and need not be found.
    """

    query: Vectors
    clusters: Sequence[int]
    distances: Vectors
    only: Only | None = None
    bound: float = inf


def are_in(ids: Ids, among: Ids) -> Mask:
    """Tell of each id whether it is in rising ids."""
    if not len(among):
        return np.zeros(len(ids), bool)
    at = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    return np.asarray(among[at] == ids)
