"""Which clusters are kept on a device: scripted traces, shifts of what is hot, any call order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.runtime.retrieval.hot import HotSet, Swap
from tests.runtime.flows.control.integrity import check_hot

CLUSTERS, INTERVAL = 64, 50


def refresh(hot: HotSet) -> Swap | None:
    """Begin the swap that is wanted now, if there is one; what was counted counts less then."""
    if (swap := hot.wanted()) is not None:
        hot.begin(swap)
    hot.fade()
    return swap


def run_interval(hot: HotSet, trace: list[list[int]]) -> float:
    """Count the sub-stages of an interval; return the part of accesses that hit the device."""
    hits = [hot.resident(cluster) for clusters in trace for cluster in clusters]
    for clusters in trace:
        hot.count(clusters)
    return sum(hits) / len(hits)


def test_a6_8_the_hottest_are_there_after_updates_only() -> None:
    hot = HotSet([100] * CLUSTERS, 4 * 100)  # gc = 4
    for stage in range(INTERVAL):
        hot.count([stage % 2, 10 + stage % 3, 30] if stage < 40 else [5, 6])
        assert not any(map(hot.resident, range(CLUSTERS)))
    assert refresh(hot) == Swap(load=(30, 0, 1, 10), drop=())
    # in transfer they count as absent, and nothing else is ordered
    assert not any(map(hot.resident, range(CLUSTERS))) and refresh(hot) is None
    hot.settle()
    assert [c for c in range(CLUSTERS) if hot.resident(c)] == [0, 1, 10, 30]
    for _ in range(INTERVAL):
        hot.count([5, 30])
    swap = refresh(hot)
    assert swap == Swap(load=(5,), drop=(10,))
    # what goes is absent at once, what stays is there
    assert [c for c in range(CLUSTERS) if hot.resident(c)] == [0, 1, 30]
    hot.settle()
    assert [c for c in range(CLUSTERS) if hot.resident(c)] == [0, 1, 5, 30]
    assert refresh(hot) is None  # nothing changed


def test_a6_8_hits_recover_within_two_intervals_of_a_shift() -> None:
    rng = np.random.default_rng(2)
    popular = 1 / np.arange(1, CLUSTERS + 1) ** 1.2
    popular /= popular.sum()
    hot, rates = HotSet([100] * CLUSTERS, 1600), []
    for interval in range(14):
        names = np.arange(CLUSTERS) if interval < 8 else np.arange(CLUSTERS)[::-1]
        trace = [names[rng.choice(CLUSTERS, 8, p=popular)].tolist() for _ in range(INTERVAL)]
        rates.append(run_interval(hot, trace))
        if refresh(hot):
            hot.settle()
    before, recovered = np.mean(rates[3:8]), rates[10]
    assert rates[8] < 0.5 * before and recovered >= 0.95 * before and min(rates[10:]) > 0.6


def test_clusters_of_other_sizes_fill_the_memory_by_frequency() -> None:
    hot = HotSet([50, 400, 60, 0, 100], 160)
    hot.count([1] * 9 + [0] * 8 + [3] * 7 + [2] * 6 + [4] * 5)
    assert refresh(hot) == Swap(load=(0, 2), drop=())  # 1 is too large, 3 empty, 4 has no room
    hot.settle()
    hot.lose([0])
    assert hot.residents == {2}
    hot.resize([100] * 5, 160)
    hot.count([0] * 3)
    assert refresh(hot) == Swap(load=(0,), drop=(2,))
    hot.lose([0, 2])
    hot.settle()
    assert hot.residents == {0}
    hot.resize([100] * 5, 300)
    hot.count([0, 1, 1, 2])
    assert refresh(hot) == Swap(load=(1, 2), drop=())


@settings(max_examples=100)
@given(data=st.data())
def test_any_order_of_counts_refreshes_and_copies_keeps_the_bounds(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=12))
    hot, under_way = HotSet(sizes, data.draw(st.integers(0, 200))), False
    for _ in range(data.draw(st.integers(1, 25))):
        hot.count(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=6)))
        if under_way and data.draw(st.booleans()):
            hot.settle()
            under_way = False
        before = hot.residents
        swap = refresh(hot)
        assert swap is None or not under_way
        if swap:
            under_way = True
            assert swap.load and set(swap.drop) <= before and not set(swap.load) & before
        check_hot(hot)
