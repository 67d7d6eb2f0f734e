"""How much of which searches one sub-stage does (HedraRAG §4.2).

In: what searches have left, in order of arrival, cluster sizes, measured costs. Out: clusters to
scan now, whose predicted time stays within the budget mb, whatever the sizes of clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import inf, sqrt
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ScanCost:
    """Seconds of a scan: `fixed` for each, and `per_vector` on the thread that compares it.

    A query of a scan is scanned by one thread, several by as many as there are.
    """

    fixed: float
    per_vector: float
    threads: int = 1

    @classmethod
    def of(cls, few: tuple[float, int], many: tuple[float, int], threads: int = 1) -> ScanCost:
        """Return the cost by two scans for one query, each (seconds, vectors)."""
        (short, some), (long, more) = few, many
        per_vector = max(0.0, long - short) / (more - some) if more > some else 0.0
        return cls(max(0.0, short - per_vector * some), per_vector, threads)

    def seconds(self, vectors: Sequence[int]) -> float:
        """Predict a scan of so many vectors for each query."""
        longest = max(sum(vectors) / self.threads, max(vectors, default=0))
        return self.fixed + self.per_vector * longest


def best_budget(overhead: float, stage: float) -> float:
    """Return mb, the seconds that one sub-stage should take: sqrt(2 overhead stage).

    It balances waiting for a sub-stage to end, (stage - mb) / 2 less, against paying `overhead`
    (beta) in each of stage / mb of them. The paper's Eq. 1 as printed has no maximum; this is
    that of (stage - mb) / 2 - stage / mb * overhead, which it means.

    Args:
        overhead: seconds that a sub-stage costs beyond its work, measured.
        stage: mean seconds of a whole search, measured.
    """
    return min(sqrt(2 * overhead * stage), stage)


def plan_sub_stage(
    lefts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    cost: ScanCost,
    budget: float,
    *,
    most: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Return what the next sub-stage scans within `budget` seconds (mb).

    That is (search by its place in `lefts`, its next clusters), one search after the other. A
    thread's clusters take no longer than the budget, unless it has a single one; then what the
    others scan meanwhile costs nothing, either. So no thread is left without a cluster. The first
    cluster that is too much ends the plan: of many searches that wait, few are looked at.

    lefts: clusters that each search has left, in order. sizes: vectors of each cluster. most:
    clusters that each search gets at most; all by default.
    """
    room = (budget - cost.fixed) / cost.per_vector if cost.per_vector else inf
    threads, takes, longest = [0] * cost.threads, list[tuple[int, int]](), 0
    for number, left in enumerate(lefts):
        count, wanted = 0, len(left) if most is None else min(len(left), most[number])
        for cluster in left[:wanted]:
            load = threads[0] + sizes[cluster]
            if load > longest:
                if load > room and threads[0]:
                    break
                longest = load
            heapreplace(threads, load)
            count += 1
        if count:
            takes.append((number, count))
        if count < wanted:
            break
    return takes


def count_vectors(clusters: Iterable[int], sizes: Sequence[int]) -> int:
    """Return how many vectors clusters hold; sizes: of each cluster."""
    return sum(map(sizes.__getitem__, clusters))


class ScanRow(NamedTuple):
    """A query of a scan: some clusters of a search, by its place in what was given."""

    search: int
    clusters: tuple[int, ...]
    vectors: int


def deal_rows(
    takes: Sequence[tuple[int, ...]], sizes: Sequence[int], cost: ScanCost
) -> list[ScanRow]:
    """Return the queries of a scan of so many clusters of each search, one thread having each.

    Clusters of one search are dealt to several threads if this saves more than a scan costs. The
    largest is dealt first, each to the thread that has least to do.
    """
    whole = [ScanRow(i, taken, count_vectors(taken, sizes)) for i, taken in enumerate(takes)]
    if cost.threads == 1:
        return whole
    threads = [(0, thread) for thread in range(cost.threads)]
    dealt: dict[tuple[int, int], list[int]] = {}
    largest_first = sorted((-sizes[c], i, c) for i, taken in enumerate(takes) for c in taken)
    for size, search, cluster in largest_first:
        load, thread = threads[0]
        heapreplace(threads, (load - size, thread))
        dealt.setdefault((thread, search), []).append(cluster)
    rows = [
        ScanRow(search, tuple(clusters), count_vectors(clusters, sizes))
        for (_, search), clusters in sorted(dealt.items())
    ]
    before, after = (cost.seconds([row.vectors for row in each]) for each in (whole, rows))
    return rows if before - after > cost.fixed else whole
