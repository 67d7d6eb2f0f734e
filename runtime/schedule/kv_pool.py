"""Which blocks of the paged KV cache belong to which sequence: pure bookkeeping, no memory.

A block holds KV_BLOCK tokens. Full blocks carry a hash of all tokens up to their end; a new
sequence shares the blocks that begin like it, so blocks are reference-counted. A pool may keep what
free blocks hold until it needs them: then a prompt also shares with those that have ended. Blocks
that nobody came back for go first, ends before beginnings.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.ir.errors import CapacityError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.states import StateSlots

if TYPE_CHECKING:
    from dovetail.runtime.machine.kv_file import KvFile


@dataclass(slots=True)
class _Table:
    """Blocks of one sequence, in order, and the hashes of those that are full and published."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
    hashes: list[bytes] = field(default_factory=list)
    adapter: str = ""


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // KV_BLOCK)


def hash_blocks(tokens: Sequence[int], adapter: str = "") -> list[bytes]:
    """Return the hashes of the full blocks of `tokens` that may be shared.

    The last token is never shared: its row must be computed to give logits. adapter: whose KV it
    is, which no other shares.
    """
    digests: list[bytes] = []
    previous = _begin(adapter)
    for i in range(max(0, len(tokens) - 1) // KV_BLOCK):
        previous = _chain(previous, tokens[i * KV_BLOCK : (i + 1) * KV_BLOCK])
        digests.append(previous)
    return digests


class KvPool:
    """Blocks 0..n_blocks-1, each free or held by one or more sequences."""

    def __init__(
        self, n_blocks: int, *, keep: bool = False, states: StateSlots | None = None
    ) -> None:
        """`keep`: free blocks stay shareable until they are given away.

        Those that one sequence alone has held go first, then those that others shared; of each
        kind the one freed first, of one sequence its last. Shared ones of long ago do not stay for
        ever: half of the blocks at most are kept for that reason (as a segmented LRU does).
        states: of sequences, where the model has recurrent layers; then a prefix is shared where
        the state at its end is kept.
        """
        self.n_blocks, self.keep, self.states = n_blocks, keep, states
        self.file: KvFile | None = None  # keeps what blocks hold beyond that
        self._blank = list(range(n_blocks))[::-1]  # free, nothing to share; the last goes first
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, hashed; the first goes first
        self._popular: OrderedDict[int, None] = OrderedDict()  # likewise, after all of those
        self._shared: set[int] = set()  # hashed, and held by more than one sequence so far
        self._references = [0] * n_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._tables: dict[Hashable, _Table] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks nobody holds."""
        return len(self._blank) + len(self._kept) + len(self._popular)

    def slot(self, sequence: Hashable) -> int:
        """Return which state is that of `sequence`, 0 where there are none."""
        return self.states.slot(sequence) if self.states else 0

    def table(self, sequence: Hashable) -> array[int]:
        """Return the blocks of `sequence` in order (int32, not to be changed)."""
        return self._tables[sequence].blocks

    def hashes(self, sequence: Hashable) -> list[bytes]:
        """Return the hashes of the published blocks of `sequence` (not to be changed)."""
        return self._tables[sequence].hashes

    def open(self, sequence: Hashable, hashes: Sequence[bytes] = (), adapter: str = "") -> int:
        """Start `sequence`; return how many of its tokens lie in blocks it now shares.

        `hashes` are those of its first blocks: of `hash_blocks`, or of another pool. adapter: as of
        `hash_blocks`.
        """
        assert sequence not in self._tables, "the sequence is open already"
        if self.states is not None:
            hashes = hashes[: self._restorable(hashes, self.states)]
            self.states.open(sequence, hashes[-1] if hashes else None)
        table = self._tables[sequence] = _Table(adapter=adapter)
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None and (block := self._fetch(digest)) is None:
                break
            self._kept.pop(block, None)
            self._popular.pop(block, None)
            self._shared.add(block)
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
        if missing > self.free_blocks:
            raise CapacityError(f"the KV pool lacks {missing - self.free_blocks} blocks")
        for _ in range(missing):
            block = self._take()
            self._references[block] = 1
            self._tables[sequence].blocks.append(block)

    def publish(self, sequence: Hashable, tokens: Sequence[int], stored: int) -> None:
        """Hash the blocks that the first `stored` tokens fill, so that others may share them."""
        table = self._tables[sequence]
        while (len(table.hashes) + 1) * KV_BLOCK <= stored:
            i = len(table.hashes)
            previous = table.hashes[-1] if i else _begin(table.adapter)
            digest = _chain(previous, tokens[i * KV_BLOCK : (i + 1) * KV_BLOCK])
            table.hashes.append(digest)
            if digest not in self._block_of:
                self._block_of[digest] = table.blocks[i]
                self._hash_of[table.blocks[i]] = digest

    def keep_state(self, sequence: Hashable, stored: int, *, decoding: bool) -> None:
        """Keep the state of `sequence` behind its first `stored` tokens, if a block ends there."""
        hashes = self._tables[sequence].hashes
        if self.states is not None and self.keep and len(hashes) * KV_BLOCK == stored > 0:
            self.states.keep(sequence, hashes[-1], decoding=decoding)

    def close(self, sequence: Hashable, *, sound: bool = True) -> None:
        """Give back the blocks of `sequence`; nobody shares them from now on if it is not sound."""
        table = self._tables.pop(sequence)
        if self.states is not None:
            self.states.close(sequence)
        for i in reversed(range(len(table.blocks))):  # the end of a prompt goes first
            block = table.blocks[i]
            self._references[block] -= 1
            free = self._references[block] == 0
            if not sound or (free and not self.keep):
                self._forget(block)
            elif free and i < len(table.hashes):
                self._settle(block, table.hashes[i])
                if self.file is not None:
                    self.file.save(table.hashes[i], block)
            if free and block not in self._hash_of:
                self._blank.append(block)
            elif free:
                (self._popular if block in self._shared else self._kept)[block] = None
        while len(self._popular) > self.n_blocks // 2:
            self._kept[self._popular.popitem(last=False)[0]] = None

    def forget(self) -> None:
        """Share none of the free blocks any more: what they held is lost."""
        for kept in (self._kept, self._popular):
            for block in kept:
                self._forget(block)
            self._blank += kept
            kept.clear()
        if self.states is not None:
            self.states.forget()

    def _restorable(self, hashes: Sequence[bytes], states: StateSlots) -> int:
        """Return how many first blocks are here and end where a state is kept."""
        count = 0
        for i, digest in enumerate(hashes, start=1):
            if digest not in self._block_of:
                break
            count = i if states.holds(digest) else count
        return count

    def _settle(self, block: int, digest: bytes) -> None:
        """Keep `block` for what it holds, or rather the one that holds the same.

        Two prompts that began alike at one time have each stored their own. Blocks behind one that
        is gone cannot be reached, so the one there is must go after them.
        """
        twin = self._block_of.setdefault(digest, block)
        if twin == block:
            self._hash_of[block] = digest
        for kept in (self._kept, self._popular):
            if twin in kept:
                kept.move_to_end(twin)

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        block, _ = (self._kept or self._popular).popitem(last=False)
        self._forget(block)
        return block

    def _fetch(self, digest: bytes) -> int | None:
        """Return a block that has been filled from the file, None where it cannot be."""
        if self.file is None or not self.free_blocks or not self.file.holds(digest):
            return None
        block = self._take()
        if not self.file.load(digest, block):
            self._blank.append(block)
            return None
        self._block_of[digest], self._hash_of[block] = block, digest
        return block

    def _forget(self, block: int) -> None:
        self._shared.discard(block)
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]


def _begin(adapter: str) -> bytes:
    """Return what the first block of a sequence follows."""
    return _chain(adapter.encode(), ()) if adapter else b""


def _chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()
