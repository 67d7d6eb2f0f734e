"""Enumerates the transformations of a TopoTree (Sandwich §5.2, Appendix A).

In: a fundamental tree, and a function that scores trees. Out: grouped trees, and the descendants by
`remove` of each that are worth a look. Both stop at a budget and say what they left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import prod

from dovetail.topology.tree import TopoTree

MAX_STEPS = 16
"""Groupings of one level; each at least halves its width, so that no machine needs more."""

MARGIN = 1e-9
"""Relative gain below which a score counts as no better."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Nodes of kind `kind` in groups of `n`, `t` apart."""

    kind: str
    n: int
    t: int

    def __str__(self) -> str:
        apart = f" every {self.t}" if self.t > 1 else ""
        return f"{self.kind} by {self.n}{apart}"


@dataclass(frozen=True, slots=True)
class GroupedTree:
    """A tree and the steps that made it from the fundamental one, in order."""

    tree: TopoTree
    steps: tuple[GroupStep, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps)) or "as shown by the system"


@dataclass(frozen=True, slots=True)
class GroupSearch:
    """The trees within the budget, simplest first, of `total` that there are."""

    trees: tuple[GroupedTree, ...]
    total: int
    every_divisor: bool


@dataclass(frozen=True, slots=True)
class RemovalWalk:
    """Numbers of trees: scored, no better than their parents, and never looked at.

    `unseen` counts only direct children of surviving trees, left when the budget ended.
    """

    scored: int
    pruned: int
    unseen: int


def count_partitions(n: int, k: int) -> int:
    """Return F(n, k): the ways to tile n nodes with groups of k, all of one stride (Appendix A)."""
    return sum((n // k) % t == 0 for t in range(1, n // k + 1)) if n % k == 0 else 0


@cache
def count_groupings(n: int, *, every_divisor: bool = False) -> int:
    """Return S(n): the hierarchies of groups over n nodes, the flat one included (Appendix A)."""
    return 1 + sum(
        count_groupings(n // k, every_divisor=every_divisor) * count_partitions(n, k)
        for k in _sizes(n, every_divisor)
    )


def enumerate_groups(
    tree: TopoTree, *, budget: int = 512, every_divisor: bool = False
) -> GroupSearch:
    """Return `tree` with every hierarchy of groups at every level, fewest groups first.

    Args:
        tree: a fundamental tree, from which nothing was removed.
        budget: trees to return at most.
        every_divisor: take groups of any size that divides, not of powers of two only (A.3).
    """
    depths = [d for d in range(1, tree.depth + 1) if tree.levels[d - 1].kind != "pu"]
    widths = [tree.levels[d - 1].arity for d in depths]
    total = prod(count_groupings(w, every_divisor=every_divisor) for w in widths)
    plans = (
        plan
        for length in range(MAX_STEPS * len(depths) + 1)
        for plan in _plans(widths, length, every_divisor)
    )
    trees = [_apply(tree, depths, plan) for plan in islice(plans, min(budget, total))]
    return GroupSearch(tuple(trees), total, every_divisor)


def walk_removals(
    root: TopoTree, score: Callable[[TopoTree], float], *, budget: int = 256
) -> RemovalWalk:
    """Score `root` and its descendants by `remove`, in topological order.

    A tree is looked at once, whichever removals lead to it. One that does not beat the best of the
    parents it was reached from has no descendants looked at (§5.2, the transformation tree).
    """
    alive = [(root, score(root))]
    scored, pruned, unseen = 1, 0, 0
    while alive:
        # descendants of one root are equal when as much was removed at every depth
        targets: dict[tuple[int, ...], tuple[TopoTree, int, float]] = {}
        for parent, least in alive:
            for depth, widths in _removals(parent):
                known = targets.get(widths)
                targets[widths] = (parent, depth, min(least, known[2]) if known else least)
        alive = []
        room = max(0, budget - scored)
        unseen += max(0, len(targets) - room)
        for parent, depth, bar in islice(targets.values(), room):
            tree = parent.remove(1, depth)
            seconds = score(tree)
            scored += 1
            if seconds < bar * (1 - MARGIN):
                alive.append((tree, seconds))
            else:
                pruned += 1
    return RemovalWalk(scored, pruned, unseen)


def _removals(tree: TopoTree) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each depth that can lose a node per parent, and the widths of the tree without it."""
    widths = tuple(level.arity for level in tree.levels)
    for i in range(tree.depth - 1, -1, -1):
        if widths[i] > 1:
            yield i + 1, (*widths[:i], widths[i] - 1, *widths[i + 1 :])


def _sizes(n: int, every_divisor: bool) -> Iterator[int]:
    """Yield the group sizes below n, larger than one, that divide n."""
    for k in range(2, n):
        if n % k == 0 and (every_divisor or k & (k - 1) == 0):
            yield k


def _hierarchies(n: int, length: int, every_divisor: bool) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield (size, stride) from the bottom up, `length` groupings over n nodes."""
    if length == 0:
        yield ()
        return
    for k in _sizes(n, every_divisor):
        for t in range(1, n // k + 1):
            if (n // k) % t == 0:
                for rest in _hierarchies(n // k, length - 1, every_divisor):
                    yield ((k, t), *rest)


Plan = tuple[tuple[tuple[int, int], ...], ...]


def _plans(widths: Sequence[int], length: int, every_divisor: bool) -> Iterator[Plan]:
    """Yield one hierarchy per level, `length` groupings in all; deeper levels take theirs first."""
    if not widths:
        if length == 0:
            yield ()
        return
    for here in range(min(length, MAX_STEPS) + 1):
        for hierarchy in _hierarchies(widths[0], here, every_divisor):
            for rest in _plans(widths[1:], length - here, every_divisor):
                yield (hierarchy, *rest)


def _apply(tree: TopoTree, depths: Sequence[int], plan: Plan) -> GroupedTree:
    steps: list[GroupStep] = []
    # from the leaves up, so that new levels do not shift the depths still to come
    for depth, hierarchy in reversed(list(zip(depths, plan, strict=True))):
        kind = tree.levels[depth - 1].kind
        for n, t in hierarchy:
            tree = tree.group(n, t, depth)
            steps.append(GroupStep(kind, n, t))
    return GroupedTree(tree, tuple(steps))
