"""KV of beginnings of prompts in a file: what the pool has no room for, and what outlives the app.

In: blocks of the pool when their sequence ends, hashes of those wanted. Out: their bytes, put back
into the pool. The file is mapped and bounded; what was written outlives a process that is killed.
All blocks take about the same time to compute, so that which was wanted least goes first, and what
was wanted long ago counts less and less (GreedyDual).
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import mmap
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import RequestError

PAGE = 4096
ENTRY = np.dtype([("digest", "S16"), ("check", "<u4"), ("used", "<u4"), ("full", "<u4")])


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """K of all layers of one process, then V, each `[block][bytes]`, as views."""

    layers: tuple[npt.NDArray[np.uint8], ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, K and V."""
        return sum(layer.shape[1] for layer in self.layers)

    def read(self, block: int) -> npt.NDArray[np.uint8]:
        """Return a copy of a block."""
        return np.concatenate([layer[block] for layer in self.layers])

    def write(self, block: int, stored: npt.NDArray[np.uint8]) -> None:
        """Put the copy of a block into its place."""
        ends = np.cumsum([layer.shape[1] for layer in self.layers])
        for layer, part in zip(self.layers, np.split(stored, ends[:-1]), strict=True):
            layer[block] = part


class KvFile:
    """Blocks by the hash of all tokens up to their end. Of one process at a time."""

    def __init__(self, path: Path, identity: str, blocks: KvBlocks, most_bytes: int) -> None:
        """Open the file, or begin it anew where it is of another identity or size.

        identity: of all that decides what KV a prompt has. RequestError where it cannot be opened.
        """
        self._blocks = blocks
        self.copied: Callable[[], object] = lambda: None
        """Called after each block that goes to the disk or comes from there: many take long."""
        self._slots = most_bytes // (blocks.block_bytes + ENTRY.itemsize)
        if self._slots < 1:
            raise RequestError(
                f"kv_file_bytes is too small: one KV block needs more than {most_bytes} bytes"
            )
        head = hashlib.sha256(f"{identity} {self._slots} {blocks.block_bytes}".encode()).digest()
        begin = -(-(len(head) + self._slots * ENTRY.itemsize) // PAGE) * PAGE
        size = begin + self._slots * blocks.block_bytes
        self._lock = filelock.FileLock(f"{path}.lock", thread_local=False)  # another closes
        try:
            self._lock.acquire(timeout=0)
            kept = path.is_file() and path.stat().st_size == size
            with path.open("r+b" if kept else "w+b") as file:
                file.truncate(size)
                os.posix_fallocate(file.fileno(), 0, size)  # a disk that is full later would kill
                self._map = mmap.mmap(file.fileno(), size)
        except (OSError, OverflowError, filelock.Timeout) as error:
            self._lock.release()
            if getattr(error, "errno", None) == errno.ENOSPC:
                path.unlink()  # what of it there was room for
            why = "another process has it" if isinstance(error, filelock.Timeout) else str(error)
            raise RequestError(
                f"cannot store the KV cache in {path}: {why}; name another file, or lower "
                "kv_file_bytes"
            ) from None
        whole = np.frombuffer(self._map, np.uint8)
        self._entries = whole[len(head) :][: self._slots * ENTRY.itemsize].view(ENTRY)
        self._data = whole[begin:].reshape(self._slots, blocks.block_bytes)
        if self._map[: len(head)] != head:
            self._entries[:] = np.zeros((), ENTRY)
            self._map[: len(head)] = head
        full = np.flatnonzero(self._entries["full"]).tolist()
        self._slot_of = {self._digest(slot): slot for slot in full}
        self._free = sorted(set(range(self._slots)) - set(self._slot_of.values()))[::-1]
        self._age, self._turn = 0, 0
        self._turns = [0] * self._slots  # when each was wanted last
        self._queue: list[tuple[int, int, int]] = []  # worth, turn, slot: the first goes first
        for slot in self._slot_of.values():
            self._wanted(slot)

    def __len__(self) -> int:
        return len(self._slot_of)

    def save(self, digest: bytes, block: int) -> None:
        """Keep a block of the pool; nothing happens where it is kept already."""
        if digest in self._slot_of:
            return
        slot = self._free.pop() if self._free else self._drop_least()
        stored = self._blocks.read(block)
        self._data[slot] = stored
        self._entries[slot] = (digest, zlib.crc32(stored.data), 0, 1)  # after what it tells of
        self._slot_of[digest] = slot
        self._wanted(slot)
        self.copied()

    def load(self, digest: bytes, block: int) -> bool:
        """Put what is kept under a hash into a block of the pool; False where there is nothing."""
        slot = self._slot_of.get(digest)
        if slot is None:
            return False
        stored, entry = self._data[slot], self._entries[slot]
        if zlib.crc32(stored.data) != entry["check"]:  # a machine went down while it was written
            self._drop(slot)
            self._free.append(slot)
            return False
        self._blocks.write(block, stored)
        self._entries["used"][slot] += 1
        self._wanted(slot)
        self.copied()
        return True

    def holds(self, digest: bytes) -> bool:
        """Tell whether something is kept under a hash."""
        return digest in self._slot_of

    def close(self) -> None:
        """Leave the file to others."""
        del self._entries, self._data  # views of the map
        self._map.flush()
        self._lock.release()

    def _digest(self, slot: int) -> bytes:
        return bytes(self._entries["digest"][slot]).ljust(16, b"\0")  # numpy cuts zeros off

    def _wanted(self, slot: int) -> None:
        self._turn += 1
        self._turns[slot] = self._turn
        worth = self._age + int(self._entries["used"][slot])
        heapq.heappush(self._queue, (worth, self._turn, slot))
        if len(self._queue) > 4 * self._slots:
            self._queue = [each for each in self._queue if each[1] == self._turns[each[2]]]
            heapq.heapify(self._queue)

    def _drop_least(self) -> int:
        """Forget the block that is worth least, and return its place."""
        while True:
            worth, turn, slot = heapq.heappop(self._queue)
            if turn == self._turns[slot]:  # else it was wanted again since
                self._age = worth
                self._drop(slot)
                return slot

    def _drop(self, slot: int) -> None:
        del self._slot_of[self._digest(slot)]
        self._turns[slot] = 0
        self._entries[slot] = np.zeros((), ENTRY)
