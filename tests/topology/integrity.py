"""The invariants of every TopoTree."""

from __future__ import annotations

from itertools import pairwise

from dovetail.topology.tree import TopoTree


def check_tree(tree: TopoTree) -> None:
    """Full levels, one leaf per path, none twice, children in order."""
    assert tree.levels, "a tree has at least one level"
    for level in tree.levels:
        assert 1 <= level.arity <= level.full, f"{level} has impossible widths"
    leaves = tree.width(tree.depth)
    assert len(tree.pus) == len(tree.positions) == leaves, "one leaf per path"
    assert len(set(tree.pus)) == leaves == len(set(tree.positions)), "no leaf twice"
    heads = list(tree.positions)
    for level in reversed(tree.levels):
        for first in range(0, len(heads), level.arity):
            siblings = heads[first : first + level.arity]
            assert all(a < b for a, b in pairwise(siblings)), "children in order"
        heads = heads[:: level.arity]
