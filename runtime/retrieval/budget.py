"""How much of which searches one sub-stage does (HedraRAG §4.2).

In: cursors in order of arrival, cluster sizes, measured costs. Out: a frozen `SubStagePlan` whose
predicted time stays within the budget mb, whatever the sizes of clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from dovetail.runtime.retrieval.cursor import Cursor


@dataclass(frozen=True, slots=True)
class ScanCost:
    """Seconds of a scan: `fixed` for each, and `per_vector` on the thread that compares it.

    A query's clusters are scanned by one thread, several queries by as many as there are.
    """

    fixed: float
    per_vector: float
    threads: int = 1

    def seconds(self, vectors: Sequence[int]) -> float:
        """Predict a scan of so many vectors for each query."""
        return self.seconds_of(sum(vectors), max(vectors, default=0))

    def seconds_of(self, total: int, largest: int) -> float:
        """Predict a scan of `total` vectors, `largest` of them for one query."""
        return self.fixed + self.per_vector * max(total / self.threads, largest)


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
    width: int | None = None,
) -> SubStagePlan:
    """Return what the next sub-stage scans: clusters one by one, in turns, within the budget.

    Args:
        cursors: searches that are not done, in order of arrival.
        sizes: vectors of each cluster.
        cost: what scanning takes.
        budget: seconds (mb). One cluster is taken even if it alone takes longer, and then what
            other threads scan meanwhile.
        width: searches that share a sub-stage at most, the oldest ones; twice the threads by
            default, so that searches that wait do not slow down those before them.
    """
    chosen = list(range(min(len(cursors), width or 2 * cost.threads)))
    takes, vectors = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0)
    open_ = list(chosen)
    clusters = total = largest = 0
    while open_:
        for number in tuple(open_):
            cursor, taken = cursors[number], takes[number]
            if cursor.position + taken == len(cursor.clusters):
                open_.remove(number)
                continue
            more = sizes[cursor.clusters[cursor.position + taken]]
            load = vectors[number] + more
            limit = max(budget, cost.seconds_of(total, largest))  # threads that idle are free
            if clusters and cost.seconds_of(total + more, max(largest, load)) > limit:
                open_.remove(number)
                continue
            takes[number], vectors[number] = taken + 1, load
            clusters, total, largest = clusters + 1, total + more, max(largest, load)
    used = tuple((number, count) for number, count in takes.items() if count)
    return SubStagePlan(used, cost.seconds([vectors[number] for number, _ in used]))
