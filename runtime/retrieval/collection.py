"""An index as it is served: vectors and documents that change together while searches run.

In: queries with filters, passages that come and go. Out: `Snapshot`s: each search keeps the one it
began on, so it sees all of a change or nothing of it, however many steps it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

import msgspec

from dovetail.ir.errors import RequestError
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.retrieval.documents import DocumentStore, Filters
from dovetail.runtime.retrieval.ivf import IvfIndex
from dovetail.runtime.retrieval.scans import Mask, Vectors
from dovetail.runtime.services import Document

KEPT_VERSIONS = 64
"""Snapshots that can still be asked for by number; searches that hold one keep it anyway."""
KEPT_MASKS = 64


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The documents of one moment. Never changes; `version` counts the changes before it."""

    version: int
    index: IvfIndex
    store: DocumentStore

    def documents(self, hits: Sequence[Hit]) -> list[Document]:
        """Return the documents of hits; scores are as the index has them: larger inner products."""
        return self.store.documents(hits, self.index.metric)


class Collection:
    """An index and its documents. Any number of threads may search while others change it."""

    def __init__(
        self, index: IvfIndex, store: DocumentStore, embedder: EmbedderEntry | None = None
    ) -> None:
        """`store` holds the passage of every id of `index`."""
        self.embedder = embedder
        self._store = store
        self._now = Snapshot(0, index, store)
        self._past = {0: self._now}
        self._masks: dict[tuple[bytes, int], Mask | None] = {}
        self._lock = Lock()

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

    def mask(self, filters: Filters) -> Mask | None:
        """Return which documents match; the same object for the same filters, for scans to share.

        Raises RequestError for a field that no document has, or a filter that is no plain data.
        """
        if not filters:
            return None
        try:
            key = (msgspec.json.encode(filters, order="sorted"), len(self._store))
        except (TypeError, msgspec.MsgspecError) as error:
            raise RequestError(f"filters must be plain values: {error}") from None
        if key not in self._masks:
            found = self._store.match(filters)
            if len(self._masks) >= KEPT_MASKS:
                self._masks = {}
            self._masks[key] = found
        return self._masks[key]

    def find(
        self, query: Vectors, topk: int, nprobe: int, filters: Filters | None = None
    ) -> list[Document]:
        """Return the `topk` documents nearest to a query [d] that match, the nearest first."""
        seen = self._now
        (hits,) = seen.index.find(query[None], topk, nprobe, self.mask(filters or {}))
        return seen.documents(hits)

    def change(
        self,
        passages: Sequence[Passage] = (),
        vectors: Vectors | None = None,
        *,
        remove: Iterable[str | int] = (),
    ) -> Snapshot:
        """Add and remove documents at once, and return the snapshot after it.

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
            left = [id_ for item in (*remove, *keys) if (id_ := self._id(item)) is not None]
            first = len(self._store)
            ids = range(first, first + len(keys))
            index = before.index.change(vectors, ids, remove=left)
            assert self._store.add(passages) == ids
            after = Snapshot(before.version + 1, index, self._store)
            kept = dict(list(self._past.items())[1 - KEPT_VERSIONS :])
            self._past = kept | {after.version: after}
            self._now = after
        return after

    def _id(self, item: str | int) -> int | None:
        return self._store.find(item) if isinstance(item, str) else item
