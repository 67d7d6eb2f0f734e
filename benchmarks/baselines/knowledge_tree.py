"""RAGCache's knowledge tree: KV of documents by the path of documents before them, bounded.

In: the hashes of a prompt's blocks, each of all tokens up to its end. Out: how many are there.
What is evicted is a leaf with the least priority: clock + frequency x cost / size (prefix-aware
GreedyDual-Size-Frequency), where the clock is the priority of what was evicted last. Blocks are of
one size and cost here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Leaf:
    """A block in the tree. parent: the one before it; children: blocks right behind it."""

    parent: bytes | None
    frequency: int = 0
    priority: float = 0.0
    children: int = 0


class KnowledgeTree:
    """Blocks that are kept, `room` at most."""

    def __init__(self, room: int) -> None:
        self._room, self._clock = room, 0.0
        self._kept: dict[bytes, Leaf] = {}

    def take(self, hashes: Sequence[bytes]) -> int:
        """Take that a prompt was computed; return how many of its first blocks were there."""
        there = next((n for n, each in enumerate(hashes) if each not in self._kept), len(hashes))
        for number, digest in enumerate(hashes):
            if digest not in self._kept and not self._add(digest, hashes, number):
                break
            block = self._kept[digest]
            block.frequency += 1
            block.priority = self._clock + block.frequency
        return there

    def _add(self, digest: bytes, path: Sequence[bytes], number: int) -> bool:
        if len(self._kept) >= self._room and not self._evict(frozenset(path)):
            return False
        parent = path[number - 1] if number else None
        self._kept[digest] = Leaf(parent)
        if parent is not None:
            self._kept[parent].children += 1
        return True

    def _evict(self, used: frozenset[bytes]) -> bool:
        """Drop a leaf that the prompt does not use; False where there is none."""
        leaves = [d for d, leaf in self._kept.items() if not leaf.children and d not in used]
        if not leaves:
            return False
        least = min(leaves, key=lambda digest: self._kept[digest].priority)
        gone = self._kept.pop(least)
        self._clock = gone.priority
        if gone.parent is not None:
            self._kept[gone.parent].children -= 1
        return True
