"""Scans of clusters as values: what a piece of a search asks of an index, and who answers it.

In: a query, some of its clusters. Out: hits, by a `Scanner`. Pure but for the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.runtime.retrieval.cursor import Hit

if TYPE_CHECKING:
    from dovetail.runtime.retrieval.ivf import IvfIndex

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
"""By id, whether a document may be found; ids beyond its end may not."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The clusters of one query, nearest centroid first, and faiss's distances to them."""

    clusters: tuple[int, ...]
    distances: Vectors


class Scan(msgspec.Struct, frozen=True):
    """A piece of a search: some clusters of a query, with the centroid distances of these.

    only: documents that may be found, as its filters say; None = all. bound: those farther than it
    are of no use, and need not be found.
    """

    query: Vectors
    clusters: Sequence[int]
    distances: Vectors
    only: Mask | None = None
    bound: float = inf


class Scanner(Protocol):
    """What scans lists of an index. Any number of threads may call it at once."""

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """Return of each scan the nearest `depth` vectors of the base that are allowed.

        Equally near ones by id; none that is farther than the scan's bound need be among them.
        Filters of the scans are in `allowed`; None = all may be found.
        """
