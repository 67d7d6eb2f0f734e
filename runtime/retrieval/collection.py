"""An index as it is served: vectors and documents that change together while searches run.

In: queries with filters, passages that come and go. Out: `Snapshot`s: each search keeps the one it
began on, so it sees all of a change or nothing of it, however many steps it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock

import msgspec

from dovetail.ir.errors import RequestError
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.retrieval.change_log import KEPT_VERSIONS
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.retrieval.documents import DocumentStore, Filters
from dovetail.runtime.retrieval.ivf import IvfIndex
from dovetail.runtime.retrieval.scans import Only, Vectors
from dovetail.runtime.services import Document

KEPT_BASES = 4
"""Rewritten indexes among the snapshots that are kept: each may have all vectors of its own."""
KEPT_FILTERS = 64
"""Filters whose matches are kept: few enough to add up what they hold at each search."""
KEPT_FILTER_BYTES = 1 << 30
"""Bytes that these may hold, but for the last one used: of the 38 million passages of Wikipedia, 28
that let few through, or 5 that let half of them through."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The documents of one moment. Never changes; `version` counts the changes before it."""

    version: int
    index: IvfIndex
    store: DocumentStore

    def documents(self, hits: Sequence[Hit]) -> list[Document]:
        """Return the documents of hits; scores are as the index has them: larger inner products."""
        return self.store.documents(hits, self.index.metric)


@dataclass(frozen=True, slots=True)
class Change:
    """What a change made: the documents after it, ids of what it removed.

    forgotten: ids of documents that no snapshot has any more.
    """

    snapshot: Snapshot
    removed: tuple[int, ...]
    forgotten: tuple[int, ...]


class Collection:
    """An index and its documents. Any number of threads may search while others change it."""

    def __init__(
        self, index: IvfIndex, store: DocumentStore, embedder: EmbedderEntry | None = None
    ) -> None:
        """`store` holds the passage of every id of `index`."""
        self.embedder = embedder
        self._store = store
        self._now = Snapshot(0, index, store)
        self._past = {0: self._now}  # the newest first
        self._removed: deque[tuple[int, tuple[int, ...]]] = deque()  # by which version, what
        self._filtered: dict[bytes, Only] = {}  # the last used last
        self._seen = 0  # documents that there had been when these were found
        self._lock, self._filtering = Lock(), Lock()

    def __len__(self) -> int:
        """Return how many documents there have been: one more than the last id."""
        return len(self._store)

    @property
    def snapshot(self) -> Snapshot:
        """The documents as they are now."""
        return self._now

    def at(self, version: int) -> Snapshot:
        """Return the snapshot of a version, the oldest that is kept where it is older than that."""
        past = self._past
        return past.get(version) or past[min(past)]

    @property
    def held(self) -> int:
        """Passages in memory or mapped: those of all snapshots that are kept."""
        return self._store.held

    def only(self, filters: Filters) -> Only | None:
        """Return which documents match; the same object for the same filters, for scans to share.

        Raises RequestError for a field that no document has, or a filter that is no plain data.
        """
        if not filters:
            return None
        try:
            key = msgspec.json.encode(filters, order="sorted")
        except (TypeError, msgspec.MsgspecError) as error:
            raise RequestError(f"filters must be plain values: {error}") from None
        with self._filtering:
            if self._seen != len(self._store):
                self._filtered, self._seen = {}, len(self._store)
            only = self._filtered.pop(key, None) or Only(self._store.match(filters))
            self._filtered[key] = only
            self._drop_filters()
            return only

    def find(
        self, query: Vectors, topk: int, nprobe: int, filters: Filters | None = None
    ) -> list[Document]:
        """Return the `topk` documents nearest to a query [d] that match, the nearest first."""
        seen = self._now
        (hits,) = seen.index.find(query[None], topk, nprobe, self.only(filters or {}))
        return seen.documents(hits)

    def change(
        self,
        passages: Sequence[Passage] = (),
        vectors: Vectors | None = None,
        *,
        remove: Iterable[str | int] = (),
    ) -> Change:
        """Add and remove documents at once.

        Args:
            passages: to add; one whose key is there already takes its place.
            vectors: of the passages, [n, d].
            remove: keys, or ids, of documents to take out; those that are not there are passed
                over.

        Raises:
            RequestError: two passages have one key.
            SpecError: the vectors do not fit the passages or the index; nothing has changed.
        """
        keys = [passage.key for passage in passages]
        if len(set(keys)) < len(keys):
            raise RequestError("two of the passages to add have the same key")
        with self._lock:
            before = self._now
            found = (self._id(item) for item in (*remove, *keys))
            left = sorted({i for i in found if i is not None and before.index.home(i) is not None})
            first = len(self._store)
            ids = range(first, first + len(keys))
            index = before.index.change(vectors, ids, remove=left)
            assert self._store.add(passages) == ids
            after = Snapshot(before.version + 1, index, self._store)
            self._now = after
            return Change(after, tuple(left), self._keep(after, tuple(left)))

    def restore(
        self,
        passages: Sequence[Passage],
        vectors: Vectors,
        ids: Sequence[int],
        remove: Sequence[int],
        version: int,
        count: int,
    ) -> None:
        """Have it be as it was after `version` changes, in another process.

        Args:
            passages: that were added and are there.
            vectors: of these, [n, d].
            ids: of these, rising.
            remove: ids of documents that are not there any more.
            version: how many changes this stands for.
            count: documents that there had been.
        """
        with self._lock:
            index = self._now.index.change(vectors, ids, remove=remove)
            self._store.add(passages, ids)
            self._store.skip_to(count)
            self._store.forget(remove)
            self._now = Snapshot(version, index, self._store)
            self._past, self._removed = {version: self._now}, deque()

    def _drop_filters(self) -> None:
        """Forget those not used for longest, until the others fit."""
        held = sum(only.nbytes for only in self._filtered.values())
        for key in tuple(self._filtered)[:-1]:
            if len(self._filtered) <= KEPT_FILTERS and held <= KEPT_FILTER_BYTES:
                return
            held -= self._filtered.pop(key).nbytes

    def _keep(self, after: Snapshot, left: tuple[int, ...]) -> tuple[int, ...]:
        """Keep a new snapshot, and forget what only older ones had; return the ids of that."""
        self._removed.append((after.version, left))
        past, bases = {}, set[int]()
        for snapshot in islice((after, *self._past.values()), KEPT_VERSIONS):
            bases.add(id(snapshot.index.base.index))
            if len(bases) <= KEPT_BASES:
                past[snapshot.version] = snapshot
        self._past, forgotten = past, list[int]()
        while self._removed and self._removed[0][0] <= min(past):
            forgotten += self._removed.popleft()[1]
        self._store.forget(forgotten)
        return tuple(forgotten)

    def _id(self, item: str | int) -> int | None:
        return self._store.find(item) if isinstance(item, str) else item
