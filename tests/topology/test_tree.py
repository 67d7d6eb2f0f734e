from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import read_hardware
from dovetail.topology.tree import LATENT, Level, TopoTree
from tests.topology.integrity import check_tree


def tree_of(*widths: int) -> TopoTree:
    levels = tuple(Level(f"kind{i}", width, width) for i, width in enumerate(widths))
    count = 1
    for width in widths:
        count *= width
    return TopoTree(levels, tuple(range(count)), tuple(range(100, 100 + count)))


def test_groups_are_tiled_by_stride() -> None:
    tree = tree_of(8).group(2, 2, 1)
    check_tree(tree)
    assert [level.kind for level in tree.levels] == [LATENT, "kind0"]
    assert list(tree.subtrees(1)) == [(100, 102), (101, 103), (104, 106), (105, 107)]


def test_groups_keep_parents_and_their_descendants() -> None:
    tree = tree_of(2, 4, 2).group(2, 2, 2)
    check_tree(tree)
    assert [level.arity for level in tree.levels] == [2, 2, 2, 2]
    assert list(tree.subtrees(1)) == [
        tuple(100 + i for i in (0, 1, 4, 5, 2, 3, 6, 7)),
        tuple(108 + i for i in (0, 1, 4, 5, 2, 3, 6, 7)),
    ]


def test_remove_takes_the_right_most_children() -> None:
    tree = tree_of(2, 3).remove(2, 2)
    check_tree(tree)
    assert tree.pus == (100, 103)
    assert tree.levels[1] == Level("kind1", 1, 3)


@pytest.mark.parametrize(
    ("n", "t", "d"), [(1, 1, 1), (6, 1, 1), (4, 1, 1), (2, 2, 1), (2, 0, 1), (2, 1, 3), (2, 1, 0)]
)
def test_groups_that_do_not_tile(n: int, t: int, d: int) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        tree_of(6, 4).group(n, t, d)


def test_removed_levels_cannot_be_grouped_nor_emptied() -> None:
    tree = tree_of(4).remove(2, 1)
    with pytest.raises(ValueError, match="lost 2 of 4"):
        tree.group(2, 1, 1)
    with pytest.raises(ValueError, match="cannot remove 2 of 2"):
        tree.remove(2, 1)


def test_equal_trees_have_one_hash_whatever_led_to_them() -> None:
    tree = tree_of(2, 8)
    outside_in = tree.group(4, 1, 2).group(2, 1, 3)
    inside_out = tree.group(2, 1, 2).group(2, 1, 2)
    assert outside_in.hash() == inside_out.hash()
    assert tree.remove(1, 1).remove(2, 2).hash() == tree.remove(2, 2).remove(1, 1).hash()
    assert tree.remove(1, 2).remove(1, 2).hash() == tree.remove(2, 2).hash()
    assert tree.group(4, 1, 2).hash() != tree.group(4, 2, 2).hash()


def test_numbering_does_not_change_the_hash() -> None:
    line = build_tree(read_hardware("package:2 core:4")).tree
    renamed = TopoTree(line.levels, line.positions, tuple(90 - pu for pu in line.pus))
    assert renamed.group(2, 2, 2).hash() == line.group(2, 2, 2).hash()


@pytest.mark.parametrize(
    "change",
    [
        {"pus": (1, 1)},
        {"positions": (1, 0)},
        {"levels": (Level("a", 2, 1),)},
        {"levels": (Level("a", 3, 3),)},
        {"levels": ()},
    ],
)
def test_integrity_is_checked(change: dict[str, object]) -> None:
    sound = {"levels": (Level("a", 2, 2),), "positions": (0, 1), "pus": (4, 7)}
    check_tree(TopoTree(**sound))
    with pytest.raises(AssertionError, match=r"\w"):
        check_tree(TopoTree(**(sound | change)))


def random_tree(draw: random.Random) -> TopoTree:
    """A tree of up to 96 leaves after up to 6 transformations, checked after each."""
    widths = [draw.choice((1, 2, 3, 4, 6, 8)) for _ in range(draw.randrange(1, 4))]
    while len(tree_of(*widths).pus) > 96:
        widths.pop()
    tree = tree_of(*widths)
    for _ in range(draw.randrange(7)):
        depth = draw.randrange(1, tree.depth + 1)
        level = tree.levels[depth - 1]
        moves = [
            (n, t)
            for n in range(2, level.arity)
            for t in range(1, level.arity)
            if level.arity % (n * t) == 0 and level.arity == level.full
        ]
        if moves and draw.random() < 0.5:
            tree = tree.group(*draw.choice(moves), depth)
        elif level.arity > 1:
            tree = tree.remove(draw.randrange(1, level.arity), depth)
        check_tree(tree)
    return tree


def nested(tree: TopoTree) -> object:
    """What a tree is, spelt out: nested sets of positions with kinds and full widths."""
    return (
        tuple((level.kind, level.full) for level in tree.levels),
        frozenset(
            (depth, frozenset(found))
            for depth in range(tree.depth + 1)
            for found in TopoTree(tree.levels, tree.positions, tree.positions).subtrees(depth)
        ),
    )


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_random_transformations_keep_the_invariants(draw: random.Random) -> None:
    random_tree(draw)


def compare_pairs(trees: list[TopoTree], pairs: int) -> None:
    known = [(nested(tree), tree.hash()) for tree in trees]
    seen = 0
    for (left, left_hash), (right, right_hash) in combinations(known, 2):
        assert (left == right) == (left_hash == right_hash)
        seen += 1
        if seen == pairs:
            return
    raise AssertionError(f"only {seen} pairs")


def test_hashes_agree_with_equality() -> None:
    draw = random.Random(5)
    compare_pairs([random_tree(draw) for _ in range(60)], 1000)


@pytest.mark.long
def test_hashes_agree_with_equality_for_100000_pairs() -> None:
    draw = random.Random(6)
    compare_pairs([random_tree(draw) for _ in range(450)], 100_000)
