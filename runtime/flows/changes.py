"""Documents of an app's index that come and go while workflows search it.

In: documents and keys, from any thread. Out: a change that the retrieval worker has made: searches
that were under way see nothing of it, those that begin later all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np

from dovetail.ir.errors import DovetailError, RequestError, SpecError
from dovetail.ir.index_file import Passage
from dovetail.runtime.encoder import Rows
from dovetail.runtime.flows.indexes import BoundIndex, Indexes
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import MAX_MESSAGE, Changed, ChangeIndex

NewDocument: TypeAlias = Passage | Mapping[str, Any]
"""A document with `key` and `text`, and `title` and `metadata` where it has them."""


class AppIndex:
    """An index that workflows of an app search. For any thread.

    Changes are of this app: the index folder stays as it is.
    """

    def __init__(self, name: str, indexes: Indexes, worker: RetrievalProcess) -> None:
        self.name, self._indexes, self._worker = name, indexes, worker

    def add(self, documents: Sequence[NewDocument], vectors: Rows | None = None) -> None:
        """Add documents; one whose key is there already takes its place. See `change`."""
        self.change(documents, vectors)

    def remove(self, keys: Iterable[str | int]) -> None:
        """Remove documents by their keys, or by the ids of those found. See `change`."""
        self.change(remove=keys)

    def change(
        self,
        documents: Sequence[NewDocument] = (),
        vectors: Rows | None = None,
        *,
        remove: Iterable[str | int] = (),
    ) -> None:
        """Add and remove at once; searches see all of it or nothing.

        A search sees the documents as they were when it began, and so do scans of it that come
        later, but for one that 64 changes overtake, or 4 that made the worker rewrite the index:
        that one lacks what was removed meanwhile.

        Args:
            documents: to add, each with a key of its own.
            vectors: of these, float32 [n, d]; by default the app's encoder makes them.
            remove: keys or ids; those that are not there are passed over.

        Raises:
            RequestError: a document is none, two have one key, or it is too much for one change.
            SpecError: the vectors do not fit the index.
            WorkflowError: there is no such index any more.
            DeviceError: the worker could not make the change; nothing has changed.
        """
        passages, gone = tuple(map(_read, documents)), tuple(remove)
        if len({passage.key for passage in passages}) < len(passages):
            raise RequestError("two of the documents to add have the same key")
        rows = self._embed(passages, vectors)
        with self._find().changing:
            index = self._find()  # another change may have come before
            first = len(index.documents)
            body = ChangeIndex(self.name, first, passages, rows.tobytes(), gone)
            _check(body)
            index.documents.add(passages)  # a search may find them before the answer is here
            try:
                changed = self._worker.ask(body).result().body
            except DovetailError:  # after anything else, such as Ctrl-C, the worker may yet do it
                index.documents.take_back(first)
                raise
            assert isinstance(changed, Changed)
            index.documents.forget(changed.forgotten)
            opened = msgspec.structs.replace(index.opened, sizes=changed.sizes)
            self._indexes.add(replace(index, opened=opened))

    def _find(self) -> BoundIndex:
        return self._indexes.find(self.name)

    def _embed(self, passages: Sequence[Passage], vectors: Rows | None) -> Rows:
        """Return the vectors of passages, as they are given or by the encoder."""
        index = self._find()
        if not passages and vectors is None:
            return np.empty((0, index.opened.dim), np.float32)
        if vectors is None:
            vectors = index.embed_passages([passage.embedded for passage in passages])
        rows = np.ascontiguousarray(vectors, np.float32)
        if rows.shape != (len(passages), index.opened.dim):
            raise SpecError(
                f"{len(passages)} vectors of {index.opened.dim} values expected, not {rows.shape}"
            )
        if not np.isfinite(rows).all():
            raise SpecError("a vector has values that are not finite")
        return rows


def _read(document: NewDocument) -> Passage:
    if isinstance(document, Passage):
        return document
    try:
        return msgspec.convert(document, Passage)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"a document has `key` and `text`, `title` and `metadata`: {error}"
        ) from None


def _check(body: ChangeIndex) -> None:
    """Raise RequestError for what cannot be sent to the worker."""
    try:
        size = len(msgspec.msgpack.encode(body))
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"documents, metadata and keys must be plain values: {error}") from None
    if size > MAX_MESSAGE // 2:
        raise RequestError(f"{len(body.passages)} documents are too many for one change")
