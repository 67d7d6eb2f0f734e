"""The indexes that an app's workflows search, as the app knows them: no vectors, no faiss.

In: what the retrieval worker said of an index, and its documents. Out: sizes of clusters, documents
of hits, and what turns a text into a query of that index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

from dovetail.ir.errors import WorkflowError
from dovetail.ir.workflow import Retrieval
from dovetail.runtime.encoder import Rows
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.retrieval.documents import DocumentStore
from dovetail.runtime.retrieval.wire import Opened
from dovetail.runtime.services import Document

EmbedTexts: TypeAlias = Callable[[list[str]], Rows]
"""Texts -> a float32 row for each."""


@dataclass(frozen=True, slots=True)
class BoundIndex:
    """An index that the worker has open. nprobe: clusters that a search scans.

    embed: of queries. embed_passages: of documents that are added. changing: held by who does it.
    """

    name: str
    opened: Opened
    documents: DocumentStore
    nprobe: int
    embed: EmbedTexts
    embed_passages: EmbedTexts
    changing: Lock = field(default_factory=Lock)


class Indexes:
    """All indexes by name. Any thread may add one; see `wavefront.messages.Catalog`."""

    def __init__(self) -> None:
        self._bound: dict[str, BoundIndex] = {}

    def add(self, index: BoundIndex) -> None:
        """Add an index, or put it in the place of the one of that name."""
        self._bound[index.name] = index

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
