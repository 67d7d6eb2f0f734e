"""One search on its way through the clusters of an IVF index (HedraRAG §4.2, §4.3).

In: the clusters to probe, what scans of some of them found. Out: the best so far and, when all
clusters are scanned, the result with its history. Pure; distances come from an index.

A `Hit` is (distance, id), smaller is nearer: inner products are negated. Equal distances go by id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TypeAlias

from dovetail.ir.index_file import EarlyEnd

HISTORY = 20
"""Documents that a search leaves to the next one of its request (HedraRAG §4.3)."""

LEAST_PROBES = 64
"""Clusters that a search scans at least, unless it is said; else an eighth of all.

Of 7,776 parts of Wikipedia in 199 clusters, 64 hold 0.99 of the nearest five, an eighth 0.95.
"""

Hit: TypeAlias = tuple[float, int]


@dataclass(frozen=True, slots=True)
class SearchHistory:
    """What a search knows: the clusters it has scanned, its nearest documents and where.

    hits: nearest first, HISTORY at most. homes: the cluster of each of them.
    """

    clusters: tuple[int, ...]
    hits: tuple[Hit, ...]
    homes: Mapping[int, int]


def reorder_probes(
    clusters: Sequence[int], history: SearchHistory | None, topk: int
) -> tuple[int, ...]:
    """Return the clusters with those first that held the nearest `topk` of the last search.

    The order inside both parts stays. The paper (§4.3) puts all other clusters that it has probed
    between them. They say little of what is near now, and hold up the early end, which counts in
    the order of centroids (docs/notes/workflows.md).

        before: 7 3 9 1 4     nearest were in: 4     after: 4 | 7 3 9 1
    """
    if history is None:
        return tuple(clusters)
    hit = frozenset(history.homes[id_] for _, id_ in history.hits[:topk])
    return tuple(sorted(clusters, key=lambda cluster: cluster not in hit))


def share_until(order: Sequence[int], wanted: Collection[int]) -> float:
    """Return the part of some clusters, in order, that holds all that are wanted; 0 if none is."""
    return max((at for at, c in enumerate(order, 1) if c in wanted), default=0) / max(1, len(order))


@dataclass(slots=True)
class Cursor:
    """A search under way. Invariant: `scanned` and `left` are together the clusters, each once.

    topk: documents wanted. seeds: distances to documents of the history, by cluster; they stand for
    what scanning that cluster will find, so they say early what the result may be, and are
    forgotten as soon as it is scanned. plain: the clusters, nearest centroid first, of which
    `reached` are scanned up to the first that is not; settled: those that were when what is nearest
    changed last.
    """

    clusters: tuple[int, ...]
    topk: int
    seeds: dict[int, list[Hit]] = field(default_factory=dict)
    position: int = 0
    best: list[Hit] = field(default_factory=list)
    plain: tuple[int, ...] = ()
    reached: int = 0
    settled: int = 0
    _scanned: set[int] = field(default_factory=set, repr=False, compare=False)
    _partial: tuple[Hit, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def unchanged(self) -> int:
        """Clusters in the order of centroids since what is nearest last changed.

        Seeds count as found: it says no more than that these clusters hold nothing nearer, in
        whichever order they are scanned.
        """
        return self.reached - self.settled

    @property
    def left(self) -> tuple[int, ...]:
        """Clusters still to be scanned, in order."""
        return self.clusters[self.position :]

    @property
    def done(self) -> bool:
        """Whether all clusters are scanned."""
        return self.position == len(self.clusters)

    @property
    def depth(self) -> int:
        """How many hits are kept: `topk`, and no less than a history holds."""
        return max(self.topk, HISTORY)

    @property
    def bound(self) -> float:
        """Distance of the last of the hits that are kept: documents farther than it are of no use.

        Infinity as long as fewer than `depth` are known.
        """
        return self.best[-1][0] if len(self.best) == self.depth else inf

    def follow(self, order: tuple[int, ...]) -> None:
        """Scan what is left in another order."""
        self.clusters = (*self.clusters[: self.position], *order)

    def advance(self, count: int, found: Sequence[Hit]) -> None:
        """Take the nearest documents of the next `count` clusters: their best `depth` at least.

        `found` may be shorter where these clusters hold no more.
        """
        end = self.position + count
        assert end <= len(self.clusters), "a cursor cannot pass its end"
        before, scanned = self.partial, self.left[:count]
        for cluster in scanned if self.seeds else ():
            self.seeds.pop(cluster, None)
        self._scanned.update(scanned)
        self.position, self._partial = end, None
        for cluster in self.plain[self.reached :]:
            if cluster not in self._scanned:
                break
            self.reached += 1
        if found:
            self.best = merge_hits((self.best, found), self.depth)
        if self.partial != before:
            self.settled = self.reached

    @property
    def partial(self) -> tuple[Hit, ...]:
        """The nearest `topk` as far as is known: of what was scanned, and the seeds."""
        if self._partial is None:  # asked for far more often than it changes
            found = self.best
            if self.seeds:
                found = merge_hits((found, *self.seeds.values()), self.topk)
            self._partial = tuple(found[: self.topk])
        return self._partial

    def history(self, homes: Mapping[int, int]) -> SearchHistory:
        """Return what the next search of the request may use; homes: id -> its cluster.

        Of a search that ended early also what it has known without scanning.
        """
        kept = tuple(merge_hits((self.best, *self.seeds.values()), HISTORY))
        scanned = self.clusters[: self.position]
        return SearchHistory(scanned, kept, {i: homes[i] for _, i in kept})


def merge_hits(parts: Iterable[Iterable[Hit]], count: int) -> list[Hit]:
    """Return the nearest `count` of all parts, each id once; ties go by id.

    Parts of different clusters never share an id, so merging in any order gives the same.
    """
    merged = sorted(chain.from_iterable(parts))
    if len({id_ for _, id_ in merged}) < len(merged):
        nearest = {id_: distance for distance, id_ in reversed(merged)}
        merged = sorted((distance, id_) for id_, distance in nearest.items())
    return merged[:count]


def begin_search(
    clusters: Sequence[int],
    topk: int,
    history: SearchHistory | None = None,
    distances: Mapping[int, float] | None = None,
) -> Cursor:
    """Return a cursor over `clusters`, nearest centroid first; `topk` documents are wanted.

    history: of the request's search before; distances: from the new query to its documents, which
    become seeds.
    """
    cursor = Cursor(tuple(clusters), topk, plain=tuple(clusters))
    for id_, distance in (distances or {}).items():
        assert history is not None, "seeds are documents of a history"
        if (home := history.homes[id_]) in clusters:
            cursor.seeds.setdefault(home, []).append((distance, id_))
    return cursor


def choose_probes(clusters: int) -> int:
    """Return how many of an index's clusters a search scans at most, unless it is said."""
    return min(clusters, max(LEAST_PROBES, clusters // 8))


def find_patience(ends: Iterable[EarlyEnd], topk: int, nprobe: int) -> int | None:
    """Return the patience of a search, None where it was not measured for so much.

    Between two numbers of documents it is the longer of theirs: the more are wanted, the oftener
    the nearest change, and the less a pause says, but the less one document counts.
    """
    wide = sorted((end for end in ends if end.nprobe >= nprobe), key=lambda end: end.nprobe)
    able = sorted((end for end in wide if end.nprobe == wide[0].nprobe), key=lambda end: end.topk)
    below = [end.patience for end in able if end.topk <= topk]
    above = [end.patience for end in able if end.topk >= topk]
    return max(*below[-1:], *above[:1], above[0]) if above else None
