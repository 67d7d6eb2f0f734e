"""Which blocks of the paged KV cache belong to which sequence: pure bookkeeping, no memory.

A block holds KV_BLOCK tokens. Full blocks carry a hash of all tokens up to their end; a new
sequence shares the live blocks that begin like it, so blocks are reference-counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dovetail.ir.errors import CapacityError
from dovetail.ir.model import KV_BLOCK


@dataclass(slots=True)
class _Table:
    """Blocks of one sequence, in order, and the hashes of those that are full and published."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
    hashes: list[bytes] = field(default_factory=list)


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // KV_BLOCK)


def hash_blocks(tokens: Sequence[int]) -> list[bytes]:
    """Return the hashes of the full blocks of `tokens` that may be shared.

    The last token is never shared: its row must be computed to give logits.
    """
    digests: list[bytes] = []
    previous = b""
    for i in range(max(0, len(tokens) - 1) // KV_BLOCK):
        previous = _chain(previous, tokens[i * KV_BLOCK : (i + 1) * KV_BLOCK])
        digests.append(previous)
    return digests


class KvPool:
    """Blocks 0..n_blocks-1, each free or held by one or more sequences."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free: deque[int] = deque(range(n_blocks))
        self._references = [0] * n_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._tables: dict[Hashable, _Table] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks nobody holds."""
        return len(self._free)

    def table(self, sequence: Hashable) -> array[int]:
        """Return the blocks of `sequence` in order (int32, not to be changed)."""
        return self._tables[sequence].blocks

    def references(self, block: int) -> int:
        """Return how many sequences hold `block`."""
        return self._references[block]

    @property
    def sequences(self) -> frozenset[Hashable]:
        """The sequences that are open."""
        return frozenset(self._tables)

    def hashes(self, sequence: Hashable) -> list[bytes]:
        """Return the hashes of the published blocks of `sequence` (not to be changed)."""
        return self._tables[sequence].hashes

    def open(self, sequence: Hashable, hashes: Sequence[bytes] = ()) -> int:
        """Start `sequence`; return how many of its tokens lie in blocks it now shares.

        `hashes` are those of its first blocks: of `hash_blocks`, or of another pool.
        """
        assert sequence not in self._tables, "the sequence is open already"
        table = self._tables[sequence] = _Table()
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._references[block] += 1
            table.blocks.append(block)
            table.hashes.append(digest)
        return len(table.blocks) * KV_BLOCK

    def missing(self, sequence: Hashable, length: int) -> int:
        """Return how many more blocks `sequence` needs to hold `length` tokens."""
        return max(0, blocks_for(length) - len(self._tables[sequence].blocks))

    def grow(self, sequence: Hashable, length: int) -> None:
        """Give `sequence` blocks for `length` tokens; CapacityError, and no change, if too few."""
        missing = self.missing(sequence, length)
        if missing > len(self._free):
            raise CapacityError(f"the KV pool lacks {missing - len(self._free)} blocks")
        for _ in range(missing):
            block = self._free.popleft()
            self._references[block] = 1
            self._tables[sequence].blocks.append(block)

    def publish(self, sequence: Hashable, tokens: Sequence[int], stored: int) -> None:
        """Hash the blocks that the first `stored` tokens fill, so that others may share them."""
        table = self._tables[sequence]
        while (len(table.hashes) + 1) * KV_BLOCK <= stored:
            i = len(table.hashes)
            previous = table.hashes[-1] if i else b""
            digest = _chain(previous, tokens[i * KV_BLOCK : (i + 1) * KV_BLOCK])
            table.hashes.append(digest)
            if digest not in self._block_of:
                self._block_of[digest] = table.blocks[i]
                self._hash_of[table.blocks[i]] = digest

    def close(self, sequence: Hashable) -> None:
        """Give back the blocks of `sequence`."""
        for block in self._tables.pop(sequence).blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                digest = self._hash_of.pop(block, None)
                if digest is not None:
                    del self._block_of[digest]
                self._free.append(block)

    def check_integrity(self) -> None:
        """Assert that every block is free or counted once per holder, and that hashes agree."""
        counts = [0] * self.n_blocks
        for table in self._tables.values():
            assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
            assert len(table.hashes) <= len(table.blocks), "a hash without a block"
            for block in table.blocks:
                counts[block] += 1
        assert counts == self._references, "reference counts do not match the tables"
        assert sorted(self._free) == [b for b, n in enumerate(counts) if n == 0], "wrong free list"
        assert self._block_of == {h: b for b, h in self._hash_of.items()}, "hash maps disagree"
        assert all(counts[b] for b in self._hash_of), "a free block has a hash"


def _chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()
