from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import prod

import pytest

from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import read_hardware
from dovetail.topology.transform import (
    count_groupings,
    count_partitions,
    enumerate_groups,
    walk_removals,
)
from dovetail.topology.tree import TopoTree
from tests.topology.integrity import check_tree
from tests.topology.test_tree import nested, tree_of

Partition = tuple[tuple[int, ...], ...]


def all_partitions(items: tuple[int, ...], k: int) -> Iterator[Partition]:
    """Every partition of `items` into sets of k, by trying all."""
    if not items:
        yield ()
        return
    head, *tail = items
    for others in combinations(tail, k - 1):
        rest = tuple(item for item in tail if item not in others)
        for parts in all_partitions(rest, k):
            yield ((head, *others), *parts)


def strided(parts: Partition) -> bool:
    """Is every set an arithmetic progression, all with one stride?"""
    strides = {b - a for part in parts for a, b in pairwise(part)}
    return len(strides) == 1


def brute_partitions(n: int, k: int) -> set[Partition]:
    return {parts for parts in all_partitions(tuple(range(n)), k) if strided(parts)}


def brute_hierarchies(n: int) -> int:
    """Hierarchies over n ordered nodes: group all of them, or group groups of them."""
    if n == 1:
        return 1
    sizes = [k for k in range(2, n + 1) if n % k == 0]
    return sum(len(brute_partitions(n, k)) * brute_hierarchies(n // k) for k in sizes)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_counts_equal_the_recurrence_and_brute_force(n: int) -> None:
    for k in (k for k in range(2, n + 1) if n % k == 0):
        assert count_partitions(n, k) == len(brute_partitions(n, k))
    assert count_groupings(n, every_divisor=True) == brute_hierarchies(n)


def test_the_recurrence_of_appendix_a() -> None:
    s = {1: 1}
    for n in range(2, 65):
        divisors = [k for k in range(2, n + 1) if n % k == 0]
        s[n] = sum(s[n // k] * count_partitions(n, k) for k in divisors)
    assert s == {n: count_groupings(n, every_divisor=True) for n in s}
    assert [s[n] for n in (4, 8, 16, 24)] == [3, 12, 60, 286]


@pytest.mark.parametrize("widths", [(12,), (4, 6), (2, 8, 2), (5, 3)])
@pytest.mark.parametrize("every_divisor", [True, False])
def test_enumeration_gives_every_tree_once(widths: tuple[int, ...], every_divisor: bool) -> None:
    tree = tree_of(*widths)
    found = enumerate_groups(tree, budget=10**6, every_divisor=every_divisor)
    expected = prod(count_groupings(w, every_divisor=every_divisor) for w in widths)
    assert found.total == expected == len(found.trees)
    assert len({nested(item.tree) for item in found.trees}) == expected
    assert found.trees[0].tree == tree and found.trees[0].steps == ()
    for item in found.trees:
        check_tree(item.tree)
        assert sorted(item.tree.pus) == sorted(tree.pus)


def test_powers_of_two_are_the_default() -> None:
    trees = enumerate_groups(tree_of(12)).trees
    assert {step.n for item in trees for step in item.steps} == {2, 4}
    every = enumerate_groups(tree_of(12), every_divisor=True).trees
    assert {step.n for item in every for step in item.steps} == {2, 3, 4, 6}


@pytest.mark.parametrize(
    "line", ["package:4 numa:2 core:24", "package:2 numa:1 l3:16 core:4 pu:2", "core:192"]
)
def test_large_machines_stay_within_the_budget_and_say_what_was_cut(line: str) -> None:
    tree = build_tree(read_hardware(line)).tree
    found = enumerate_groups(tree, budget=150, every_divisor=True)
    assert len(found.trees) == 150 < found.total
    lengths = [len(item.steps) for item in found.trees]
    assert lengths == sorted(lengths)


def test_smt_threads_are_not_grouped() -> None:
    tree = build_tree(read_hardware("core:4 pu:4")).tree
    kinds = {step.kind for item in enumerate_groups(tree).trees for step in item.steps}
    assert kinds == {"core"}


def keep(tree: TopoTree) -> tuple[int, ...]:
    return tuple(level.arity for level in tree.levels)


def test_removals_are_seen_once_and_pruned() -> None:
    best = (2, 3)
    calls: dict[tuple[int, ...], float] = {}

    def distance(tree: TopoTree) -> float:
        check_tree(tree)
        assert keep(tree) not in calls
        calls[keep(tree)] = sum(abs(a - b) for a, b in zip(keep(tree), best, strict=True)) + 1.0
        return calls[keep(tree)]

    walk = walk_removals(tree_of(4, 6), distance)
    assert len(calls) == walk.scored
    assert min(calls, key=calls.__getitem__) == best
    # beyond the optimum each line of descent ends with the first tree that is worse
    assert (1, 2) not in calls and (1, 6) in calls and walk.pruned == 7 and walk.unseen == 0


def test_a_budget_ends_the_walk_and_is_reported() -> None:
    walk = walk_removals(tree_of(4, 6), lambda tree: float(len(tree.pus)), budget=4)
    assert walk.scored == 4 and walk.unseen == 4
