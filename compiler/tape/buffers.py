"""Plans activation buffers into one arena: buffers that are never live together may share bytes.

In: which buffers each stage (the entries between two barriers) reads and writes. Out: offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from dovetail.compiler.tape.operators import READS, WRITES

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Stage:
    """What the entries of one stage do to buffers. They run at the same time."""

    reads: frozenset[str]
    writes: frozenset[str]

    @classmethod
    def of(cls, uses: Iterable[tuple[str, str]]) -> Stage:
        """Return what an entry does: the name of each memory it uses, and the operand's kind."""
        known = [(name, kind.rstrip("?")) for name, kind in uses]
        reads = frozenset(name for name, kind in known if kind in READS)
        return cls(reads, frozenset(name for name, kind in known if kind in WRITES))

    def join(self, other: Stage) -> Stage:
        """Return what the entries of both do."""
        return Stage(self.reads | other.reads, self.writes | other.writes)


def live_sets(stages: Sequence[Stage]) -> list[frozenset[str]]:
    """Return, for each stage, the buffers whose bytes must be kept apart in it.

    A buffer is live from the stage that writes it to the last that reads what was written there.
    """
    live: frozenset[str] = frozenset()
    sets = []
    for stage in reversed(stages):
        touched = stage.reads | stage.writes
        sets.append(live | touched)
        live = (live - stage.writes) | stage.reads
    return sets[::-1]


def plan_offsets(sizes: dict[str, int], stages: Sequence[Stage]) -> tuple[dict[str, int], int]:
    """Return (offset of each buffer, arena size) in bytes; offsets are multiples of 64.

    The largest buffers are placed first, each at the lowest offset that is free of every buffer
    it is ever live with.
    """
    rivals: dict[str, set[str]] = {name: set() for name in sizes}
    for live in live_sets(stages):
        for a, b in combinations(live, 2):
            rivals[a].add(b)
            rivals[b].add(a)
    offsets: dict[str, int] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        taken = sorted((offsets[r], offsets[r] + sizes[r]) for r in rivals[name] & offsets.keys())
        offsets[name] = _first_gap(taken, sizes[name])
    end = max((offsets[name] + size for name, size in sizes.items()), default=0)
    return offsets, _align(end)


def _first_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    offset = 0
    for start, end in taken:
        if start - offset >= size:
            break
        offset = max(offset, _align(end))
    return offset


def _align(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT
