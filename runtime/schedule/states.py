"""Which slot of memory holds the state of which sequence, or of which prefix: pure bookkeeping.

A model with recurrent layers has a state of one size for each sequence. What a sequence's state was
where a KV block ended may be kept, so that another that begins alike goes on from a copy. The
executor copies: `take_copies` tells what, in order, before it runs the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from dovetail.ir.errors import CapacityError


class StateSlots:
    """Slots 0..count-1, each free, held by a sequence, or kept for a prefix by its hash."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._blank = list(range(count))[::-1]
        self._held: dict[Hashable, int] = {}
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # the one to give away comes first
        self._newest: dict[Hashable, bytes] = {}  # what a sequence has kept as it decoded
        self._copies: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        """Slots that no sequence holds."""
        return len(self._blank) + len(self._kept)

    def slot(self, sequence: Hashable) -> int:
        """Return the slot of a sequence."""
        return self._held[sequence]

    def holds(self, digest: bytes) -> bool:
        """Tell whether the state at the end of a prefix is kept."""
        return digest in self._kept

    def open(self, sequence: Hashable, prefix: bytes | None = None) -> None:
        """Give a sequence a slot, with the state of a prefix that is kept, or any to be cleared.

        CapacityError where none is free.
        """
        if not self.free:
            raise CapacityError("no sequence has ended whose state could be given away")
        if prefix is not None and self.free == 1:
            self._held[sequence] = self._kept.pop(prefix)
            return
        if prefix is not None:
            self._kept.move_to_end(prefix)
        slot = self._held[sequence] = self._take()
        if prefix is not None:
            self._copies.append((self._kept[prefix], slot))

    def keep(self, sequence: Hashable, digest: bytes, *, decoding: bool = False) -> None:
        """Keep a sequence's state as it is now, at the end of the prefix with this hash.

        Of what one keeps as it decodes only the newest stays. Without a free slot nothing is kept.
        """
        if decoding:
            self._drop(self._newest.pop(sequence, None))
        if digest in self._kept:
            self._kept.move_to_end(digest)
        elif self.free:
            slot = self._kept[digest] = self._take()
            self._copies.append((self._held[sequence], slot))
            if decoding:
                self._newest[sequence] = digest

    def close(self, sequence: Hashable) -> None:
        """Give back the slot of a sequence; what it kept stays."""
        self._newest.pop(sequence, None)
        self._blank.append(self._held.pop(sequence))

    def forget(self) -> None:
        """Keep none for a prefix any more."""
        self._blank += self._kept.values()
        self._kept.clear()
        self._newest.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """Return (source, target) of what must be copied before the next step, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def _take(self) -> int:
        return self._blank.pop() if self._blank else self._kept.popitem(last=False)[1]

    def _drop(self, digest: bytes | None) -> None:
        slot = self._kept.pop(digest, None) if digest is not None else None
        if slot is not None:
            self._blank.append(slot)
