"""The indexes that an app's workflows search, as the app knows them: no vectors, no faiss.

In: what the retrieval worker said of an index, its documents; documents and keys that come and go,
from any thread. Out: sizes of clusters, documents of hits, what turns a text into a query; changes
that the worker has made: searches under way see nothing of one, those that begin later all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeAlias

import msgspec
import numpy as np

from dovetail.ir.errors import DovetailError, RequestError, SpecError, WorkflowError, describe_error
from dovetail.ir.index_file import EarlyEnd, Passage
from dovetail.ir.workflow import Retrieval
from dovetail.runtime.child.framing import MAX_MESSAGE
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.documents import Document, DocumentStore, divide
from dovetail.runtime.native.encoder import Rows
from dovetail.runtime.retrieval import wire
from dovetail.runtime.retrieval.process import RetrievalProcess

EmbedTexts: TypeAlias = Callable[[list[str]], Rows]
"""Texts -> a float32 row for each."""
CutText: TypeAlias = Callable[[str, str], Sequence[str]]
NewDocument: TypeAlias = Passage | Mapping[str, Any]
"""A document with `key` and `text`, and `title` and `metadata` where it has them.

Other fields of a mapping become metadata, as those of a line of a corpus do."""

MOST_CHANGED = 0.1
"""Part of an index's documents that may change before the early end of searches counts no more."""
PARTS = ("key", "text", "title", "metadata")

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class BoundIndex:
    """An index that the worker has open. nprobe: clusters that a search scans.

    embed: of queries. embed_passages: of documents that are added; None: nothing here is known to
    embed them as they are in the index. cut: gives the parts of a text
    that fit these behind another text; None: they take all. early: when searches may end.
    changed: documents that came and went since it was built. changing: held by who does it.
    """

    name: str
    opened: wire.Opened
    documents: DocumentStore
    nprobe: int
    embed: EmbedTexts
    embed_passages: EmbedTexts | None
    cut: CutText | None = None
    early: tuple[EarlyEnd, ...] = ()
    changed: int = 0
    changing: Lock = field(default_factory=Lock)

    @property
    def bytes(self) -> list[int]:
        """Bytes of the vectors in each cluster."""
        return [size * self.opened.code_bytes for size in self.opened.sizes]

    def after(self, change: wire.Changed, added: int) -> BoundIndex:
        """Return it as a change leaves it that added so many documents.

        Once many have changed, nobody knows any more when a search may end early: none does.
        """
        changed, early = self.changed + added + len(change.removed), self.early
        if early and changed > MOST_CHANGED * sum(change.sizes):
            early = ()
            log.warning(
                "index %r: %d documents came or went since it was built, so its searches end early "
                "no longer; build it again (`dovetail index build`)", self.name, changed,
            )  # fmt: skip
        opened = msgspec.structs.replace(self.opened, sizes=change.sizes)
        return replace(self, opened=opened, early=early, changed=changed)


def embed_checked(embed: EmbedTexts, texts: list[str]) -> Rows:
    """Return a row for each text by a function of users; SpecError whatever else it does."""
    try:
        rows = np.array(embed(texts), np.float32, order="C")  # which it may write over later
        if rows.ndim != 2 or len(rows) != len(texts):
            raise SpecError(f"`embed=` gave values of shape {rows.shape} for {len(texts)} texts")
    except DovetailError:
        raise
    except (Exception, SystemExit) as error:
        raise SpecError(f"`embed=` failed: {describe_error(error)}") from error
    return rows


class Indexes:
    """All indexes by name. Any thread may add one; see `wavefront.messages.Catalog`."""

    def __init__(self) -> None:
        self._bound: dict[str, BoundIndex] = {}

    def add(self, index: BoundIndex) -> None:
        """Add an index, or put it in the place of the one of that name."""
        self._bound[index.name] = index

    def hold(self, name: str) -> AbstractContextManager[object]:
        """Return what keeps the index of a name from being changed, if there is one."""
        return self._bound[name].changing if name in self._bound else nullcontext()

    def find(self, name: str | None) -> BoundIndex:
        """Return the index of a name; None means the only one there is.

        Raises WorkflowError where there is no such index, or several may be meant.
        """
        bound = self._bound
        if name is None and len(bound) == 1:
            return next(iter(bound.values()))
        if name is not None and name in bound:
            return bound[name]
        known = ", ".join(map(repr, bound)) or "none; add one (app.add_index, --index)"
        wanted = "several indexes may be meant" if name is None and bound else f"no index {name!r}"
        raise WorkflowError(f"{wanted if name or bound else 'no index'}; there are: {known}")

    def sizes(self, index: str | None) -> Sequence[int]:
        """See Catalog."""
        return self.find(index).opened.sizes

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        """See Catalog."""
        index = self.find(node.index)
        return index.documents.documents(hits, index.opened.metric)


class AppIndex:
    """An index that workflows of an app search. For any thread.

    Changes are of this app: the index folder stays as it is.
    """

    def __init__(self, name: str, indexes: Indexes, worker: RetrievalProcess) -> None:
        self.name, self._indexes, self._worker = name, indexes, worker

    def add(self, documents: Sequence[NewDocument], vectors: Rows | None = None) -> None:
        """Add documents; one whose key is there already takes its place. See `change`."""
        self.change(documents, vectors)

    def remove(self, keys: str | int | Iterable[str | int]) -> None:
        """Remove documents by their keys, or by the ids of those found. See `change`."""
        self.change(remove=keys)

    def change(
        self,
        documents: Sequence[NewDocument] = (),
        vectors: Rows | None = None,
        *,
        remove: str | int | Iterable[str | int] = (),
    ) -> None:
        """Add and remove at once; searches see all of it or nothing.

        A search sees the documents as they were when it began, and so do scans of it that come
        later, but for one that 64 changes overtake, or 4 that made the worker rewrite the index:
        that one lacks what was removed meanwhile.

        Args:
            documents: to add, each with a key of its own.
            vectors: of these, float32 [n, d]. By default the app's encoder makes them, and splits
                texts that are too long for it; or `embed=` of the index, whole, if its passages
                have the same prompt as queries.
            remove: keys or ids, or one of them; those that are not there are passed over.

        Raises:
            RequestError: a document is none, two have one key, `embed=` is for queries alone, or
                it is too much for one change.
            SpecError: the vectors do not fit the index.
            WorkflowError: there is no such index any more, or another in its place meanwhile.
            DeviceError: the worker could not make the change; nothing has changed.
        """
        passages, gone = tuple(map(_read, documents)), _read_keys(remove)
        if len({passage.key for passage in passages}) < len(passages):
            raise RequestError("two of the documents to add have the same key")
        found = self._find()
        if vectors is None and (cut := found.cut) is not None:
            before = found.opened.passage_prompt
            parts, long = divide(passages, lambda text, head: cut(text, before + head))
            passages = tuple(parts)
            if long:
                log.warning("%d documents were longer than the encoder reads and were split", long)
        rows = self._embed(found, passages, vectors)
        with found.changing:
            index = self._find()  # another change may have come before
            if index.changing is not found.changing:
                raise WorkflowError(f"index {self.name!r} was replaced; make the change again")
            first = len(index.documents)
            body = wire.ChangeIndex(self.name, first, passages, rows.tobytes(), gone)
            _check(body)
            index.documents.add(passages)  # a search may find them before the answer is here
            try:
                changed = self._worker.ask(body).result().body
            except DovetailError:  # after anything else, such as Ctrl-C, the worker may yet do it
                index.documents.take_back(first)
                raise
            assert isinstance(changed, wire.Changed)
            index.documents.forget(changed.forgotten)
            self._indexes.add(index.after(changed, len(passages)))

    def _find(self) -> BoundIndex:
        return self._indexes.find(self.name)

    @staticmethod
    def _embed(index: BoundIndex, passages: Sequence[Passage], vectors: Rows | None) -> Rows:
        """Return the vectors of passages, as they are given or by the encoder."""
        if not passages and vectors is None:
            return np.empty((0, index.opened.dim), np.float32)
        if vectors is None:
            if index.embed_passages is None:
                raise RequestError(
                    f"`embed=` of index {index.name!r} is for queries, and its passages begin with "
                    f"{index.opened.passage_prompt!r}; give `vectors` of what is added, made so"
                )
            vectors = index.embed_passages([passage.embedded for passage in passages])
        expected = f"{len(passages)} vectors of {index.opened.dim} values expected"
        try:
            rows = np.ascontiguousarray(vectors, np.float32)
        except (TypeError, ValueError) as error:
            raise SpecError(f"{expected}: {error}") from None
        if rows.shape != (len(passages), index.opened.dim):
            raise SpecError(f"{expected}, not {rows.shape}")
        if not np.isfinite(rows).all():
            raise SpecError("a vector has values that are not finite")
        return rows


def _read(document: NewDocument) -> Passage:
    try:
        if isinstance(document, Passage):  # whose fields nobody has looked at
            return msgspec.convert(msgspec.structs.asdict(document), Passage)
        other = dict(msgspec.convert(document, dict[str, Any]))
        fields = {name: other.pop(name) for name in PARTS if name in other}
        fields["metadata"] = {**other, **fields.get("metadata", {})}
        passage = msgspec.convert(fields, Passage)
        msgspec.json.encode((passage.key, passage.title, passage.text))  # may hold half a surrogate
        return passage
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise RequestError(
            f"a document has `key` and `text`, `title` and `metadata`: {error}"
        ) from None


def _read_keys(given: str | int | Iterable[str | int]) -> tuple[str | int, ...]:
    keys = (given,) if isinstance(given, str | int) else given
    try:
        return msgspec.convert(tuple(keys), tuple[str | int, ...])
    except (msgspec.ValidationError, TypeError) as error:
        raise RequestError(f"keys are texts, and ids whole numbers: {error}") from None


def _check(body: wire.ChangeIndex) -> None:
    """Raise RequestError for what cannot be sent to the worker."""
    try:
        size = len(msgspec.msgpack.encode(body))
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"documents, metadata and keys must be plain values: {error}") from None
    if size > MAX_MESSAGE // 2:
        raise RequestError(f"{len(body.passages)} documents are too many for one change")
