"""Cursors against a one-shot search of made-up clusters: splits, orders, seeds, ties."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.index.cursor import (
    Cursor,
    Hit,
    SearchHistory,
    begin_search,
    merge_hits,
    reorder_probes,
    share_until,
)
from tests.runtime.flows.control.integrity import check_cursor

# documents of each cluster; few distances, so that many tie
CLUSTERS = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8)


def documents(clusters: list[list[int]]) -> list[list[Hit]]:
    ids = iter(range(1000))
    return [[(float(distance), next(ids)) for distance in cluster] for cluster in clusters]


def scan(docs: list[list[Hit]], clusters: tuple[int, ...], depth: int) -> list[Hit]:
    return merge_hits([docs[c] for c in clusters], depth)


def run(cursor: Cursor, docs: list[list[Hit]], steps: random.Random) -> list[Hit]:
    while not cursor.done:
        count = steps.randint(1, len(cursor.left))
        cursor.advance(count, scan(docs, cursor.left[:count], cursor.depth))
        check_cursor(cursor)
    return cursor.best[: cursor.topk]


@given(CLUSTERS, st.sampled_from([1, 5, 20]), st.randoms(use_true_random=False))
def test_a6_1_any_split_and_order_finds_what_one_scan_finds(
    clusters: list[list[int]], topk: int, steps: random.Random
) -> None:
    docs = documents(clusters)
    order = list(range(len(clusters)))
    steps.shuffle(order)
    wanted = scan(docs, tuple(order), topk)
    assert run(begin_search(order, topk), docs, steps) == wanted


@given(CLUSTERS, st.sampled_from([1, 5]), st.randoms(use_true_random=False))
def test_a6_4_a_history_changes_the_way_and_not_the_result(
    clusters: list[list[int]], topk: int, steps: random.Random
) -> None:
    docs = documents(clusters)
    home = {id_: c for c, hits in enumerate(docs) for _, id_ in hits}
    first = begin_search(range(len(docs)), topk)
    run(first, docs, steps)
    history = first.history(home)
    probes = [c for c in range(len(docs)) if steps.random() < 0.7]
    # the next query sees other distances to the same documents
    moved = [[(float((d + i) % 7), i) for d, i in hits] for hits in docs]
    distances = {i: d for hits in moved for d, i in hits if i in history.homes}
    cursor = begin_search(probes, topk, history, distances)
    nearest = scan(moved, tuple(probes), topk)
    known = {(d, i) for hits in moved for d, i in hits}
    assert set(cursor.partial) <= known, "seeds are true distances"
    if set(nearest) <= {hit for hits in cursor.seeds.values() for hit in hits}:
        assert list(cursor.partial) == nearest, "a result within the history is known at once"
    assert run(cursor, moved, steps) == nearest and not cursor.seeds


def test_clusters_come_first_that_held_the_nearest_not_all_that_were_probed() -> None:
    history = SearchHistory((3, 4, 9, 1), ((0.1, 7), (0.2, 8), (0.3, 6)), {7: 4, 8: 9, 6: 1})
    assert reorder_probes((7, 3, 9, 1, 4), history, 2) == (9, 4, 7, 3, 1)
    assert reorder_probes((7, 3, 9, 1, 4), history, 1) == (4, 7, 3, 9, 1)
    assert reorder_probes((7, 3), None, 2) == (7, 3)


def test_what_is_left_is_scanned_in_the_order_that_is_said() -> None:
    history = SearchHistory((3, 4), ((0.1, 7),), {7: 4})
    cursor = begin_search((7, 3, 4), 1, history, {7: 0.3})
    assert cursor.clusters == (7, 3, 4) and cursor.partial == ((0.3, 7),)
    cursor.advance(1, [])
    cursor.follow((4, 3))
    assert cursor.left == (4, 3) and cursor.clusters == (7, 4, 3)
    cursor.advance(1, [(0.5, 1)])
    assert cursor.partial == ((0.5, 1),) and not cursor.seeds


def test_the_share_of_an_order_ends_with_the_last_that_is_wanted() -> None:
    assert share_until((4, 9, 7, 1), {9, 7}) == 0.75
    assert share_until((4, 9), ()) == share_until((), {3}) == 0.0


@given(st.permutations(range(9)), st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8)))
def test_a6_4_reordering_is_a_stable_partition(
    probes: list[int], probed: set[int], hit: set[int]
) -> None:
    hits = tuple((float(i), i) for i in range(len(hit)))
    history = SearchHistory(tuple(probed | hit), hits, dict(enumerate(hit)))
    found = reorder_probes(probes, history, len(hit))
    parts = [c for c in probes if c in hit], [c for c in probes if c not in hit]
    assert list(found) == parts[0] + parts[1]


def test_a_cursor_counts_clusters_that_changed_nothing() -> None:
    cursor = begin_search([0, 1, 2, 3], 1)
    cursor.advance(1, [(1.0, 5)])
    assert cursor.unchanged == 0
    cursor.advance(2, [(2.0, 6), (3.0, 7)])
    assert cursor.unchanged == 2 and cursor.partial == ((1.0, 5),)
    cursor.advance(1, [(0.5, 9)])
    assert cursor.unchanged == 0 and cursor.done
    assert set(cursor.history({5: 0, 6: 1, 7: 1, 9: 3}).homes.values()) == {0, 1, 3}
    with pytest.raises(AssertionError, match="pass its end"):
        cursor.advance(1, [])


def test_a_history_keeps_the_nearest_twenty() -> None:
    cursor = begin_search([0], 1)
    cursor.advance(1, [(float(i), i) for i in range(30)])
    assert [i for _, i in cursor.history(dict.fromkeys(range(30), 0)).hits] == list(range(20))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20), st.integers(1, 6))
def test_a6_9_devices_that_share_the_clusters_find_what_one_finds(
    found: list[tuple[int, int]], count: int
) -> None:
    hits = [(float(d), i) for i, (d, _) in enumerate(found)]
    sides = [[h for h, (_, side) in zip(hits, found, strict=True) if side % 2 == s] for s in (0, 1)]
    merged = merge_hits([merge_hits([side], count) for side in sides], count)
    assert merged == sorted(hits)[:count]


def test_seeds_count_as_found_and_only_the_order_of_centroids_counts() -> None:
    history = SearchHistory((4, 5), ((1.0, 8), (2.0, 9)), {8: 4, 9: 5})
    seeded = begin_search((1, 2, 3, 4, 5), 2, history, {8: 1.0, 9: 2.0})
    seeded.follow((4, 5, 1, 2, 3))
    seeded.advance(2, [(1.0, 8), (2.0, 9)])
    assert seeded.partial == ((1.0, 8), (2.0, 9)) and seeded.unchanged == 0
    seeded.advance(2, [(3.0, 1)])
    assert seeded.unchanged == 2  # clusters 1 and 2 hold nothing nearer than what history knew
    seeded.advance(1, [(0.5, 3)])
    assert seeded.unchanged == 0 and seeded.done
    early = begin_search((1, 2, 3), 1, SearchHistory((3,), ((1.0, 8),), {8: 3}), {8: 1.0})
    early.advance(2, [(4.0, 7)])
    assert early.unchanged == 2 and early.history({7: 1, 8: 3}).hits == ((1.0, 8), (4.0, 7))
