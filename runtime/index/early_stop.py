"""When a search may end before all its clusters are scanned, and what recall that leaves.

In: an index and sample queries. Out: an `EarlyStop`: the patience (clusters scanned without change
of the nearest documents) of `WavefrontSettings`, with a recall it keeps at a stated certainty.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from dovetail.ir.errors import SpecError
from dovetail.runtime.index.cursor import begin_search
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.scans import Part, Vectors

CERTAINTY = 0.95


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """Stop after `patience` clusters without change.

    recall: documents of the whole search that were found, mean over the queries it was chosen on;
    at_least: what it is for new queries like them, with CERTAINTY (Hoeffding, over all patiences).
    scanned: part of the clusters that were scanned.
    """

    patience: int
    recall: float
    at_least: float
    scanned: float


def choose_patience(
    index: IvfIndex, queries: Vectors, topk: int, nprobe: int, *, recall: float
) -> EarlyStop:
    """Return the least patience with which searches keep a recall of `recall`, or the whole search.

    Larger steps than one cluster stop later, so they find no less. The bound holds for queries
    drawn as `queries` were, in the order of centroids; it needs many of them, about 350 for 0.9.
    A history changes the order, and so what a patience leaves out.

    Raises SpecError: there are no queries, or `recall` is not within 0..1.
    """
    if not len(queries) or not 0 <= recall <= 1:
        raise SpecError("patience is chosen on sample queries, for a recall from 0 to 1")
    found = [_stops(index, query, topk, nprobe) for query in queries]
    width = max(len(recalls) for recalls, _ in found)
    # one of `width` patiences is chosen: the bound must hold for all of them
    slack = sqrt(log(max(1, width) / (1 - CERTAINTY)) / (2 * len(queries)))
    for patience in range(1, width):
        ends = [(recalls, stops[patience - 1]) for recalls, stops in found]
        mean = float(np.mean([recalls[end - 1] for recalls, end in ends]))
        if mean - slack >= recall:
            part = float(np.mean([end / len(recalls) for recalls, end in ends]))
            return EarlyStop(patience, mean, mean - slack, part)
    return EarlyStop(width, 1.0, 1.0, 1.0)


def _stops(
    index: IvfIndex, query: Vectors, topk: int, nprobe: int
) -> tuple[list[float], list[int]]:
    """Return the recall after each cluster, and after how many each patience 1, 2 .. ends it."""
    (probe,) = index.probe(query[None], nprobe)
    scans = [
        Part(probe.vector, (cluster,), (far,))
        for cluster, far in zip(probe.clusters, probe.centroids, strict=True)
    ]
    cursor = begin_search(probe.clusters, topk)
    bests, still = [], []
    for hits in index.scan(scans, cursor.depth):
        cursor.advance(1, hits)
        bests.append({id_ for _, id_ in cursor.best[:topk]})
        still.append(cursor.unchanged if len(bests[-1]) == topk else 0)
    recalls = [len(best & bests[-1]) / max(1, len(bests[-1])) for best in bests]
    ends = [
        next((at for at, count in enumerate(still, 1) if count >= patience), len(bests))
        for patience in range(1, max(2, nprobe) + 1)
    ]
    return recalls, ends
