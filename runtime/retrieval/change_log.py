"""The changes of an index, for a worker that has to make them again.

In: changes as they were made, and the ids of what they removed. Out: few requests after which
another worker has the same documents and versions. The log is as large as what was added and is
still there, however often documents come and go. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from dovetail.ir.index_file import Passage
from dovetail.runtime.retrieval.wire import ChangeIndex, RestoreIndex

KEPT_VERSIONS = 64
"""Versions of the documents that searches under way can still ask for by number."""
MESSAGE = 64 << 20
"""Bytes of documents that one request restores, or a single one of more."""


class ChangeLog:
    """The last changes one by one, so that a new worker has their versions too; others as a sum."""

    def __init__(self, index: str) -> None:
        self._index = index
        self._last: deque[tuple[ChangeIndex, tuple[int, ...]]] = deque()
        self._added: dict[int, tuple[Passage, bytes]] = {}  # with its vector; ids rise
        self._removed: set[int] = set()  # of those that were there before all changes
        self._version = self._count = 0

    def add(self, change: ChangeIndex, removed: tuple[int, ...]) -> None:
        """Take a change that was made, and the ids of all that it removed."""
        # By ids: to look up the first key a worker reads all documents, which takes long
        again = msgspec.structs.replace(change, remove=removed, known=True)
        self._last.append((again, removed))
        if len(self._last) > KEPT_VERSIONS:
            self._sum(*self._last.popleft())

    def replay(self) -> Iterator[RestoreIndex | ChangeIndex]:
        """Yield what makes all changes again."""
        part, size = dict[int, tuple[Passage, bytes]](), 0
        for id_, (passage, vector) in self._added.items():
            nbytes = len(msgspec.msgpack.encode(passage)) + len(vector)
            if part and size + nbytes > MESSAGE:
                yield self._restore(part)
                part, size = {}, 0
            part[id_] = passage, vector
            size += nbytes
        if self._version:
            yield self._restore(part)
        yield from (change for change, _ in self._last)

    def _restore(self, part: Mapping[int, tuple[Passage, bytes]]) -> RestoreIndex:
        passages, vectors = zip(*part.values(), strict=True) if part else ((), ())
        gone, rows = tuple(sorted(self._removed)), b"".join(vectors)
        counts = self._version, self._count
        return RestoreIndex(self._index, tuple(part), passages, rows, gone, *counts)

    def _sum(self, change: ChangeIndex, removed: tuple[int, ...]) -> None:
        count = len(change.passages)
        width = len(change.vectors) // max(1, count)
        for number, passage in enumerate(change.passages):
            vector = change.vectors[number * width : (number + 1) * width]
            self._added[change.first + number] = passage, vector
        for id_ in removed:
            if self._added.pop(id_, None) is None:
                self._removed.add(id_)
        self._version, self._count = self._version + 1, change.first + count
