"""TopoTree: the PUs of a machine under the resources they share, and its two transformations.

In: levels and PUs (`dovetail.topology.fundamental` reads them off a HardwareSpec). Out: new trees.
Every tree is symmetric: all nodes of one depth have equally many children (Sandwich §5, A.1), so
the levels' widths and the order of the leaves say everything.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

LATENT = "latent"
"""Kind of the levels that `group` adds: structure that system tools do not show."""


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes of one depth: `arity` under each parent, of `full` that the machine has there."""

    kind: str
    arity: int
    full: int


@dataclass(frozen=True, slots=True)
class TopoTree:
    """`levels[i]` describes depth i + 1; the root has depth 0; leaves are PUs.

    positions: of each leaf in the fundamental tree, which does not depend on how PUs are numbered.
    pus: the operating system's id of each leaf, in the same order.
    """

    levels: tuple[Level, ...]
    positions: tuple[int, ...]
    pus: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Depth of the leaves."""
        return len(self.levels)

    def width(self, depth: int) -> int:
        """Return the number of nodes at `depth`."""
        return prod(level.arity for level in self.levels[:depth])

    def subtrees(self, depth: int) -> Iterator[tuple[int, ...]]:
        """Yield the PUs below each node at `depth`, from left to right."""
        span = prod(level.arity for level in self.levels[depth:])
        for first in range(0, len(self.pus), span):
            yield self.pus[first : first + span]

    def group(self, n: int, t: int, d: int) -> TopoTree:
        """Return the tree with nodes at depth `d` put in groups of `n`, `t` apart (§5.2).

        The new level lies at depth `d`; the nodes it groups move down to `d + 1`. Parents keep
        their descendants.

        Raises:
            ValueError: the groups do not tile the children of each parent, are all of them, or
                some of these children were removed before.
        """
        level = self._level(d)
        if level.arity != level.full:
            raise ValueError(f"depth {d} has lost {level.full - level.arity} of {level.full} nodes")
        if not (n >= 2 and t >= 1 and n < level.arity and level.arity % (n * t) == 0):
            raise ValueError(f"groups of {n} with stride {t} do not tile {level.arity} nodes")
        order = [
            block + first + member * t
            for block in range(0, level.arity, n * t)
            for first in range(t)
            for member in range(n)
        ]
        groups = level.arity // n
        levels = (
            *self.levels[: d - 1],
            Level(LATENT, groups, groups),
            Level(level.kind, n, n),
            *self.levels[d:],
        )
        span = prod(below.arity for below in self.levels[d:])
        index = [
            parent + child * span + leaf
            for parent in range(0, len(self.pus), level.arity * span)
            for child in order
            for leaf in range(span)
        ]
        positions = tuple(map(self.positions.__getitem__, index))
        return TopoTree(levels, positions, tuple(map(self.pus.__getitem__, index)))

    def remove(self, n: int, d: int) -> TopoTree:
        """Return the tree without the `n` right-most children of each node at depth `d - 1`.

        Raises:
            ValueError: n is not between 1 and the children that each node has, less one.
        """
        level = self._level(d)
        if not 1 <= n < level.arity:
            raise ValueError(f"cannot remove {n} of {level.arity} nodes at depth {d}")
        levels = (*self.levels[: d - 1], replace(level, arity=level.arity - n), *self.levels[d:])
        span = prod(below.arity for below in self.levels[d:])
        whole, kept = level.arity * span, (level.arity - n) * span
        starts = range(0, len(self.pus), whole)
        positions = chain.from_iterable(self.positions[i : i + kept] for i in starts)
        pus = chain.from_iterable(self.pus[i : i + kept] for i in starts)
        return TopoTree(levels, tuple(positions), tuple(pus))

    def hash(self) -> str:
        """Return a digest of shape, kinds and which leaves are where; PU ids do not enter.

        Equal for equal trees whatever transformations led to them, as a Merkle tree's head is.
        """
        shape = [(level.kind, level.arity, level.full) for level in self.levels]
        digest = hashlib.blake2b(repr(shape).encode(), digest_size=16)
        digest.update(array("I", self.positions).tobytes())
        return digest.hexdigest()

    def _level(self, depth: int) -> Level:
        if not 1 <= depth <= self.depth:
            raise ValueError(f"depth {depth} is not between 1 and {self.depth}")
        return self.levels[depth - 1]
