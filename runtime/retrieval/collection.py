"""An index as it is served: vectors and documents that change together while searches run.

In: queries with filters, passages that come and go. Out: an `IvfIndex` for each version: each
search keeps the one it began on, so it sees all of a change or nothing of it, in any number of
steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from threading import Lock

import msgspec
import numpy as np

from dovetail.ir.errors import RequestError
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.index.documents import Document, DocumentStore, Filters
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.scans import Only, Vectors
from dovetail.runtime.retrieval.change_log import KEPT_VERSIONS
from dovetail.runtime.retrieval.wire import Changed, RestoreIndex

KEPT_BASES = 4
"""Rewritten indexes among the versions that are kept: each may have all vectors of its own."""
KEPT_FILTERS = 64
"""Filters whose matches are kept: few enough to add up what they hold at each search."""
KEPT_FILTER_BYTES = 1 << 30
"""Bytes that these may hold, but for the last one used: of the 38 million passages of Wikipedia, 28
that let few through, or 5 that let half of them through."""


class Collection:
    """An index and its documents. Any number of threads may search while others change it."""

    def __init__(
        self, index: IvfIndex, store: DocumentStore, embedder: EmbedderEntry | None = None
    ) -> None:
        """`store` holds the passage of every id of `index`."""
        self.embedder, self.store = embedder, store
        self.now = 0, index  # how many changes there were, and the vectors after them
        self._past = {0: index}  # by version, the newest first
        self._removed: deque[tuple[int, tuple[int, ...]]] = deque()  # by which version, what
        self._filtered: dict[bytes, Only] = {}  # the last used last
        self._seen = 0  # documents that there had been when these were found
        self._lock, self._filtering = Lock(), Lock()

    def __len__(self) -> int:
        """Return how many documents there have been: one more than the last id."""
        return len(self.store)

    @property
    def index(self) -> IvfIndex:
        """The vectors as they are now."""
        return self.now[1]

    def at(self, version: int) -> IvfIndex:
        """Return the vectors of a version, the oldest that are kept where it is older than that."""
        past = self._past
        return past[version if version in past else min(past)]

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
            if self._seen != len(self.store):
                self._filtered, self._seen = {}, len(self.store)
            only = self._filtered.pop(key, None) or Only(self.store.match(filters))
            self._filtered[key] = only
            held = sum(each.nbytes for each in self._filtered.values())
            for oldest in tuple(self._filtered)[:-1]:  # until the others fit
                if len(self._filtered) <= KEPT_FILTERS and held <= KEPT_FILTER_BYTES:
                    break
                held -= self._filtered.pop(oldest).nbytes
            return only

    def find(
        self, query: Vectors, topk: int, nprobe: int, filters: Filters | None = None
    ) -> list[Document]:
        """Return the `topk` documents nearest to a query [d] that match, the nearest first."""
        index = self.index
        (hits,) = index.find(query[None], topk, nprobe, self.only(filters or {}))
        return self.store.documents(hits, index.metric)

    def change(
        self,
        passages: Sequence[Passage] = (),
        vectors: Vectors | None = None,
        *,
        remove: Iterable[str | int] = (),
        known: bool = False,
    ) -> Changed:
        """Add and remove documents at once.

        Args:
            passages: to add; one whose key is there already takes its place.
            vectors: of the passages, [n, d].
            remove: keys, or ids, of documents to take out; those that are not there are passed
                over.
            known: whether these are all, also of what passages take the place of.

        Raises:
            RequestError: two passages have one key.
            SpecError: the vectors do not fit the passages or the index; nothing has changed.
        """
        keys = [passage.key for passage in passages if not passage.part]
        if len(set(keys)) < len(keys):
            raise RequestError("two of the passages to add have the same key")
        with self._lock:
            version, before = self.now
            gone = (*remove, *(() if known else keys))
            named = (self.store.find(i) if isinstance(i, str) else (i,) for i in gone)
            left = sorted({i for found in named for i in found if before.home(i) is not None})
            ids = range(len(self.store), len(self.store) + len(passages))
            after = before.change(vectors, ids, remove=left)
            self.store.add(passages)
            self.now = version + 1, after
            return Changed(tuple(after.sizes), tuple(left), self._keep(tuple(left)))

    def restore(self, body: RestoreIndex) -> None:
        """Have it be as it was after changes in another process."""
        with self._lock:
            rows = np.frombuffer(body.vectors, np.float32).reshape(-1, self.index.dim)
            index = self.index.change(rows, body.ids, remove=body.remove)
            self.store.add(body.passages, body.ids)
            self.store.skip_to(body.count)
            self.store.forget(body.remove)
            self.now = body.version, index
            self._past, self._removed = {body.version: index}, deque()

    def _keep(self, left: tuple[int, ...]) -> tuple[int, ...]:
        """Keep the new version, which lacks `left`; return ids that only forgotten ones had."""
        version, after = self.now
        self._removed.append((version, left))
        past, bases = {}, set[int]()
        for number, index in islice({version: after, **self._past}.items(), KEPT_VERSIONS):
            bases.add(id(index.base.index))
            if len(bases) <= KEPT_BASES:
                past[number] = index
        self._past, forgotten = past, list[int]()
        while self._removed and self._removed[0][0] <= min(past):
            forgotten += self._removed.popleft()[1]
        self.store.forget(forgotten)
        return tuple(forgotten)
