"""How much of which searches one sub-stage does (HedraRAG §4.2).

In: cursors in order of arrival, cluster sizes, measured costs. Out: a frozen `SubStagePlan` whose
predicted time stays within the budget mb, whatever the sizes of clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, sqrt

from dovetail.runtime.retrieval.cursor import Cursor


@dataclass(frozen=True, slots=True)
class ScanCost:
    """Seconds of a scan: `fixed` for each, and `per_vector` on the thread that compares it.

    A query of a scan is scanned by one thread, several by as many as there are.
    """

    fixed: float
    per_vector: float
    threads: int = 1

    def seconds(self, vectors: Sequence[int]) -> float:
        """Predict a scan of so many vectors for each query."""
        longest = max(sum(vectors) / self.threads, max(vectors, default=0))
        return self.fixed + self.per_vector * longest


@dataclass(frozen=True, slots=True)
class SubStagePlan:
    """For each search (by its place in what was given) how many clusters it scans now."""

    takes: tuple[tuple[int, int], ...]
    seconds: float


def best_budget(overhead: float, stage: float, least: float = 0.0) -> float:
    """Return mb, the seconds that one sub-stage should take: sqrt(2 overhead stage).

    It balances waiting for a sub-stage to end, (stage - mb) / 2 less, against paying `overhead`
    (beta) in each of stage / mb of them. The paper's Eq. 1 as printed has no maximum; this is
    that of (stage - mb) / 2 - stage / mb * overhead, which it means.

    Args:
        overhead: seconds that a sub-stage costs beyond its work, measured.
        stage: mean seconds of a whole search, measured.
        least: seconds of the smallest piece of work.
    """
    return max(least, min(sqrt(2 * overhead * stage), stage))


def plan_sub_stage(
    cursors: Sequence[Cursor],
    sizes: Sequence[int],
    cost: ScanCost,
    budget: float,
    *,
    most: Sequence[int] | None = None,
) -> SubStagePlan:
    """Return what the next sub-stage scans: one search after the other, within the budget.

    A thread's clusters take no longer than the budget, unless it has a single one; then what the
    others scan meanwhile costs nothing, either. So no thread is left without a cluster.

    Args:
        cursors: searches that are not done, those that go first first.
        sizes: vectors of each cluster.
        cost: what scanning takes.
        budget: seconds (mb).
        most: clusters that each search gets at most; all by default.
    """
    room = (budget - cost.fixed) / cost.per_vector if cost.per_vector else inf
    threads, takes, longest = [0] * cost.threads, list[tuple[int, ...]](), 0
    for number, cursor in enumerate(cursors):
        wanted = cursor.left if most is None else cursor.left[: most[number]]
        count = 0
        for cluster in wanted:
            least = heappop(threads)
            load = least + sizes[cluster]
            fits = not least or load <= max(room, longest)
            heappush(threads, load if fits else least)
            if not fits:
                break
            count, longest = count + 1, max(longest, load)
        takes.append(wanted[:count])
    used = tuple((number, len(clusters)) for number, clusters in enumerate(takes) if clusters)
    rows = deal_rows([clusters for clusters in takes if clusters], sizes, cost)
    return SubStagePlan(used, cost.seconds([_vectors(clusters, sizes) for _, clusters in rows]))


def deal_rows(
    takes: Sequence[tuple[int, ...]], sizes: Sequence[int], cost: ScanCost
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (search, clusters) for each query that is scanned, one thread having each.

    Clusters of one search are dealt to several threads, the largest first where that is better, if
    this saves more than a scan costs.
    """
    whole = list(enumerate(takes))
    if cost.threads == 1:
        return whole

    def seconds(rows: list[tuple[int, tuple[int, ...]]]) -> float:
        return cost.seconds([_vectors(clusters, sizes) for _, clusters in rows])

    ordered = [(number, cluster) for number, clusters in whole for cluster in clusters]
    longest_first = sorted(ordered, key=lambda item: -sizes[item[1]])
    best = min((_deal(items, sizes, cost) for items in (longest_first, ordered)), key=seconds)
    return best if seconds(whole) - seconds(best) > cost.fixed else whole


def _deal(
    items: Sequence[tuple[int, int]], sizes: Sequence[int], cost: ScanCost
) -> list[tuple[int, tuple[int, ...]]]:
    """Give each (search, cluster) to the thread that has least to do."""
    threads = [(0, thread) for thread in range(cost.threads)]
    dealt: dict[tuple[int, int], list[int]] = {}
    for number, cluster in items:
        load, thread = heappop(threads)
        heappush(threads, (load + sizes[cluster], thread))
        dealt.setdefault((thread, number), []).append(cluster)
    return [(number, tuple(clusters)) for (_, number), clusters in sorted(dealt.items())]


def _vectors(clusters: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(sizes[cluster] for cluster in clusters)
