"""Budgets of sub-stages: the best mb, and plans that keep to it whatever the sizes of clusters."""

from __future__ import annotations

import statistics
from heapq import heapreplace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.index.cursor import begin_search
from dovetail.runtime.retrieval.budget import (
    ScanCost,
    ScanRow,
    best_budget,
    deal_rows,
    plan_sub_stage,
)


@given(st.floats(1e-5, 1e-2), st.floats(0.01, 2))
def test_a6_3_the_budget_has_the_least_mean_wait_on_a_grid(overhead: float, stage: float) -> None:
    """An arrival waits half a sub-stage, and its own search for the overhead of each piece."""

    def wait(budget: float) -> float:
        return budget / 2 + stage / budget * overhead

    best = best_budget(overhead, stage)
    grid = np.geomspace(stage / 1000, stage, 200)
    assert wait(best) <= 1.001 * min(wait(b) for b in grid)
    if best < stage:
        assert best == pytest.approx((2 * overhead * stage) ** 0.5)


def test_the_budget_is_the_whole_search_at_most() -> None:
    assert best_budget(0.0, 1.0) == 0.0
    assert best_budget(10.0, 1.0) == 1.0


def test_a_query_is_scanned_by_one_thread() -> None:
    cost = ScanCost(fixed=1.0, per_vector=0.5, threads=2)
    assert cost.seconds([4]) == cost.seconds([4, 4]) == 3.0
    assert cost.seconds([4, 2, 2, 2]) == 3.5 and cost.seconds([]) == 1.0


@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=30),
    portions=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    threads=st.integers(1, 4),
    budget=st.floats(0, 50),
)
def test_a6_2_no_sub_stage_is_longer_than_its_budget_unless_a_thread_has_one_cluster(
    sizes: list[int], portions: list[int], threads: int, budget: float
) -> None:
    cost = ScanCost(0.1, 0.2, threads)
    cursors = [begin_search(range(i % len(sizes), len(sizes)), 1) for i in range(len(portions))]
    while under_way := [cursor for cursor in cursors if not cursor.done]:
        plan = plan_sub_stage([c.left for c in under_way], sizes, cost, budget, most=portions)
        taken = [under_way[number].left[:count] for number, count in plan]
        for number, count in plan:
            under_way[number].advance(count, [])
            assert count <= portions[number]
        order = [sizes[cluster] for clusters in taken for cluster in clusters]
        loads = [0] * threads
        for size in order:
            heapreplace(loads, loads[0] + size)
        longest = cost.seconds([max(order)])
        assert cost.seconds([max(loads)]) <= max(budget, longest) * (1 + 1e-9)
        assert plan[0][0] == 0, "who goes first is always served"


@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=30),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    threads=st.integers(1, 8),
    fixed=st.floats(0, 50),
)
def test_dealing_leaves_each_search_its_clusters_and_pays_or_is_left(
    sizes: list[int], counts: list[int], threads: int, fixed: float
) -> None:
    cost = ScanCost(fixed, 1.0, threads)
    takes = [tuple(range(min(count, len(sizes)))) for count in counts]
    rows = deal_rows(takes, sizes, cost)
    for number, clusters in enumerate(takes):
        dealt = sorted(c for row in rows if row.search == number for c in row.clusters)
        assert dealt == list(clusters)
    assert all(row.clusters and row.vectors == sum(sizes[c] for c in row.clusters) for row in rows)
    loads = [sum(sizes[c] for c in clusters) for clusters in takes]
    if len(rows) > len(takes) or [row.clusters for row in rows] != takes:
        after = cost.seconds([row.vectors for row in rows])
        assert after < cost.seconds(loads) - fixed
        largest = max(sizes[c] for clusters in takes for c in clusters)
        assert after <= fixed + sum(loads) / threads + largest


def test_one_search_is_dealt_to_all_threads() -> None:
    rows = deal_rows([(0, 1, 2, 3)], [5, 1, 3, 4], ScanCost(0.0, 1.0, threads=2))
    assert rows == [ScanRow(0, (0, 1), 6), ScanRow(0, (3, 2), 7)], (
        "the largest first: 6 and 7, not 5 and 8"
    )


def test_a6_2_sub_stages_of_skewed_clusters_vary_less_than_half_as_much_as_fixed_counts() -> None:
    rng = np.random.default_rng(0)
    sizes = (100 * rng.pareto(1.5, 512) + 20).clip(max=1000).astype(int).tolist()
    cost = ScanCost(1e-4, 1e-6)
    fixed = [cost.seconds([sum(sizes[i : i + 8])]) for i in range(0, 512, 8)]
    cursor, planned = begin_search(range(512), 1), []
    while not cursor.done:
        plan = plan_sub_stage([cursor.left], sizes, cost, statistics.fmean(fixed))
        ((_, count),) = plan
        planned.append(cost.seconds([sum(sizes[c] for c in cursor.left[:count])]))
        cursor.advance(count, [])

    def variation(seconds: list[float]) -> float:
        return statistics.pstdev(seconds) / statistics.fmean(seconds)

    assert variation(planned[:-1]) < variation(fixed) / 2


def test_few_of_many_searches_that_wait_are_looked_at() -> None:
    looks: list[int] = []

    class Sizes(list[int]):
        def __getitem__(self, cluster: int) -> int:  # type: ignore[override]
            looks.append(cluster)
            return super().__getitem__(cluster)

    plan = plan_sub_stage([range(64)] * 400, Sizes([1] * 64), ScanCost(0.0, 1.0), 100.0)
    assert plan == [(0, 64), (1, 36)] and len(looks) == 101


def test_the_first_search_goes_before_the_next_up_to_its_portion() -> None:
    cost = ScanCost(0.0, 1.0, threads=2)
    lefts = [range(8), range(8)]
    assert dict(plan_sub_stage(lefts, [1] * 8, cost, 3.0)) == {0: 6}
    assert dict(plan_sub_stage(lefts, [1] * 8, cost, 5.0)) == {0: 8, 1: 2}
    assert dict(plan_sub_stage(lefts, [1] * 8, cost, 3.0, most=(1, 8))) == {0: 1, 1: 5}
