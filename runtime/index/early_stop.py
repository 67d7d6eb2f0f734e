"""When a search may end before all its clusters are scanned, and what recall that leaves.

In: an index and sample queries. Out: an `EarlyStop`: the patience (clusters scanned without change
of the nearest documents) of `WavefrontSettings`, with a recall it keeps at a stated certainty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import SpecError
from dovetail.ir.index_file import EarlyEnd
from dovetail.runtime.index.cursor import HISTORY, Hit, begin_search
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.scans import Part, Vectors

CERTAINTY = 0.95
RECALL = 0.99
"""Part of what a whole search finds that one by default finds, on the mean."""
TOPKS = (1, 5, HISTORY)
"""Documents wanted for which that is measured; a search for others uses the next larger one's."""


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
    drawn as `queries` were; it needs many of them, about 350 for 0.9.

    Raises SpecError: there are no queries, or `recall` is not within 0..1.
    """
    if not len(queries) or not 0 <= recall <= 1:
        raise SpecError("patience is chosen on sample queries, for a recall from 0 to 1")
    found = [_stops(clusters, topk) for clusters in _scan_each(index, queries, nprobe)]
    width = max(len(recalls) for recalls, _ in found)
    # one of `width` patiences is chosen: the bound must hold for all of them
    slack = sqrt(log(max(1, width) / (1 - CERTAINTY)) / (2 * len(queries)))
    for patience in range(1, width):
        kept, scanned = _end_at(found, patience)
        if (mean := float(kept.mean())) - slack >= recall:
            return EarlyStop(patience, mean, mean - slack, scanned)
    return EarlyStop(width, 1.0, 1.0, 1.0)


def calibrate(index: IvfIndex, queries: Vectors, nprobe: int) -> tuple[EarlyEnd, ...]:
    """Return when searches of an index may end: for TOPKS documents, where that was shown.

    A patience is chosen on half of the queries, with a recall of RECALL and twice its standard
    error; it counts only if the other half has RECALL, too. Searches of fewer clusters keep at
    least as much of what they find: fewer documents compete with it.
    """
    found, ends = list(_scan_each(index, queries, nprobe)), list[EarlyEnd]()
    half = len(found) // 2
    for topk in TOPKS:
        stops = [_stops(clusters, topk) for clusters in found]
        for patience in range(1, nprobe):
            kept, _ = _end_at(stops[:half], patience)
            if kept.mean() - 2 * kept.std() / sqrt(half) < RECALL:
                continue
            kept, scanned = _end_at(stops[half:], patience)
            if kept.mean() >= RECALL:
                end = EarlyEnd(
                    topk=topk,
                    nprobe=nprobe,
                    patience=patience,
                    recall=float(kept.mean()),
                    scanned=scanned,
                    queries=len(kept),
                )
                ends.append(end)
            break
    return tuple(ends)


def _scan_each(
    index: IvfIndex, queries: Vectors, nprobe: int
) -> Iterator[list[tuple[int, list[Hit]]]]:
    """Yield of each query its clusters, nearest first, and what each of them holds."""
    for probe in index.probe(queries, nprobe):
        scans = [
            Part(probe.vector, (cluster,), (far,))
            for cluster, far in zip(probe.clusters, probe.centroids, strict=True)
        ]
        yield list(zip(probe.clusters, index.scan(scans, HISTORY), strict=True))


def _stops(clusters: list[tuple[int, list[Hit]]], topk: int) -> tuple[list[float], list[int]]:
    """Return the recall after each cluster, and after how many each patience 1, 2 .. ends it."""
    cursor = begin_search([cluster for cluster, _ in clusters], topk)
    bests, ends = [], [len(clusters)] * max(1, len(clusters))
    for _, hits in clusters:
        cursor.advance(1, hits)
        bests.append({id_ for _, id_ in cursor.partial})
        if len(bests[-1]) == topk and cursor.unchanged:
            ends[cursor.unchanged - 1] = min(ends[cursor.unchanged - 1], len(bests))
    recalls = [len(best & bests[-1]) / max(1, len(bests[-1])) for best in bests]
    return recalls, ends


def _end_at(
    found: Sequence[tuple[list[float], list[int]]], patience: int
) -> tuple[NDArray[np.float64], float]:
    """Return the recall of each query with a patience, and the mean part that is scanned."""
    ends = [(recalls, stops[min(patience, len(stops)) - 1]) for recalls, stops in found]
    scanned = float(np.mean([end / len(recalls) for recalls, end in ends]))
    return np.array([recalls[end - 1] for recalls, end in ends]), scanned
