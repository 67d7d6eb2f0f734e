"""One search after another of its request: where it begins, and what it learns of orders."""

from __future__ import annotations

from dovetail import workflows
from dovetail.runtime.flows.control.costs import Needed
from dovetail.runtime.flows.control.messages import (
    Embed,
    FindClusters,
    Finished,
    Generate,
    Invoke,
    ScanClusters,
)
from tests.runtime.flows.control.by_hand import Hand


def search_twice(hand: Hand) -> None:
    """Have a request search clusters 5, 6 and 7, reply, and ask where to search again."""
    hand.begin_search(5, 6, 7, graph=workflows.irg(topk=2, rounds=2))
    for hit in ((1.0, 50), (0.5, 60), (3.0, 70)):
        hand.scanned(hit)
    hand.tell(Finished(hand.last(Generate).job, "draft"))
    hand.tell(Finished(hand.last(Invoke).job, "x draft"))
    hand.tell(Finished(hand.last(Embed).job, [0.0, 1.0]))
    assert hand.last(FindClusters).known == (60, 50, 70)


def scan_all(hand: Hand, *clusters: int, **found: tuple[float, int]) -> list[int]:
    """Answer a probe, then scans with what is `found`; return the clusters in order of scans."""
    hand.probed(*clusters)
    order: list[int] = []
    for _ in clusters:
        (cluster,) = hand.last(ScanClusters).parts[0].clusters
        order.append(cluster)
        hand.scanned(*(hit for name, hit in found.items() if name.startswith(f"c{cluster}_")))
    return order


def test_a6_4_the_search_after_another_begins_where_that_found_something() -> None:
    hand = Hand(generation_load=0)
    search_twice(hand)
    assert scan_all(hand, 9, 7, 8, 5) == [5, 9, 7, 8]


def test_history_is_not_followed_where_it_finds_what_is_nearest_later() -> None:
    hand = Hand(generation_load=0)
    search_twice(hand)
    assert scan_all(hand, 9, 7, 8, 5, c9_a=(0.1, 90), c9_b=(0.2, 91)) == [5, 9, 7, 8]
    for _ in range(20):  # one search says little
        search_twice(hand)
        order = scan_all(hand, 9, 7, 8, 5, c9_a=(0.1, 90), c9_b=(0.2, 91))
    assert order == [9, 7, 8, 5]
    for _ in range(20):  # where history was right it is followed again
        search_twice(hand)
        order = scan_all(hand, 9, 7, 8, 5, c5_a=(0.1, 51), c5_b=(0.2, 52))
    assert order == [5, 9, 7, 8]


def test_what_history_showed_fades_with_each_search_that_has_none() -> None:
    hand = Hand(generation_load=0)
    hand.front.front.costs.needed["one-shot", "search"] = Needed(0.0, 0.0, 0.0)
    hand.begin_search(1)
    hand.scanned((1.0, 10), (2.0, 20))
    assert hand.front.front.costs.needed["one-shot", "search"].alone > 0.0
