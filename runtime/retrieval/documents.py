"""The documents beside the vectors of an index: text, title and metadata by id.

In: a file of JSON lines and where each begins, both mapped, and passages that came later. Out:
passages by id, ids by the corpus's own keys, and which documents match filters on metadata.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.ir.index_file import Passage
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.services import Document

if TYPE_CHECKING:  # an app opens documents, and leaves faiss to its retrieval worker
    from dovetail.runtime.retrieval.scans import Mask

Filters: TypeAlias = Mapping[str, object]
"""Metadata field -> the value, or the values, of which a document must have one."""

_DECODE = msgspec.json.Decoder(Passage)


class DocumentStore:
    """Passages by id, the number of their line. It only grows: an id never means another passage.

    Any number of threads may read while one adds.
    """

    def __init__(self, lines: mmap.mmap | bytes = b"", offsets: Sequence[int] = (0,)) -> None:
        """`offsets`: where each line begins in `lines`, and where the last one ends."""
        self._lines, self._offsets = lines, offsets
        self._added: list[Passage] = []
        self._lock = Lock()
        self._columns: dict[str, dict[Any, list[int]]] | None = None
        self._ids: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self._offsets) - 1 + len(self._added)

    def __getitem__(self, id_: int) -> Passage:
        """Return a passage; ArtifactError where its line is damaged."""
        stored = len(self._offsets) - 1
        if id_ >= stored:
            return self._added[id_ - stored]
        line = self._lines[int(self._offsets[id_]) : int(self._offsets[id_ + 1])]
        try:
            return _DECODE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ArtifactError(
                f"line {id_ + 1} of the documents of an index cannot be decoded ({error}); run "
                "`dovetail index build` again"
            ) from None

    def __iter__(self) -> Iterator[Passage]:
        return (self[id_] for id_ in range(len(self)))

    def documents(self, hits: Sequence[Hit], metric: str) -> list[Document]:
        """Return the documents of hits; scores are as the index has them: larger inner products."""
        sign = -1.0 if metric == "ip" else 1.0
        return [_document(self[id_], id_, sign * distance) for distance, id_ in hits]

    def find(self, key: str) -> int | None:
        """Return the id of the latest passage with a key of the corpus."""
        with self._lock:
            if self._ids is None:
                self._ids = {passage.key: id_ for id_, passage in enumerate(self)}
            return self._ids.get(key)

    def add(self, passages: Iterable[Passage]) -> range:
        """Append passages and return their ids."""
        with self._lock:
            first = len(self)
            for id_, passage in enumerate(passages, first):
                self._added.append(passage)
                if self._ids is not None:
                    self._ids[passage.key] = id_
                if self._columns is not None:
                    _enter(self._columns, id_, passage)
            return range(first, len(self))

    def take_back(self, first: int) -> None:
        """Forget the passages from the id `first` on, which nobody has been told of."""
        with self._lock:
            del self._added[first - (len(self._offsets) - 1) :]
            self._ids = self._columns = None

    def match(self, filters: Filters) -> Mask | None:
        """Return which documents have, in every field, one of the values asked for; None = all.

        A document whose field is a list has all values in it. RequestError for an unknown field.
        """
        if not filters:
            return None
        with self._lock:
            if self._columns is None:  # the first filter reads all documents, later ones none
                self._columns = {}
                for id_, passage in enumerate(self):
                    _enter(self._columns, id_, passage)
            allowed = np.ones(len(self), bool)
            for name, wanted in filters.items():
                allowed &= self._match_field(name, wanted)
        return allowed

    def _match_field(self, name: str, wanted: object) -> Mask:
        assert self._columns is not None
        if name not in self._columns:
            known = ", ".join(sorted(self._columns)) or "none"
            raise RequestError(f"no document has the metadata field {name!r}; there are: {known}")
        found = np.zeros(len(self), bool)
        for value in _values(wanted):
            found[self._columns[name].get(value, [])] = True
        return found


def encode_passages(passages: Iterable[Passage]) -> tuple[bytes, NDArray[np.int64]]:
    """Return the lines of a documents file, and where each begins and the last one ends."""
    lines = [msgspec.json.encode(passage) + b"\n" for passage in passages]
    offsets = np.zeros(len(lines) + 1, np.int64)
    np.cumsum([len(line) for line in lines], out=offsets[1:])
    return b"".join(lines), offsets


def open_documents(lines: Path, offsets: Path) -> DocumentStore:
    """Return the store of two files, mapped; ArtifactError where they do not fit each other."""
    try:
        begins = np.load(offsets, mmap_mode="r", allow_pickle=False)
        size = lines.stat().st_size
        with lines.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{lines.parent}: its documents cannot be read ({error}); run `dovetail index build` "
            "again"
        ) from None
    whole = begins.ndim == 1 and len(begins) and begins[0] == 0 and begins[-1] == size
    if not whole or begins.dtype != np.int64 or (np.diff(begins) <= 0).any():
        raise ArtifactError(
            f"{offsets} does not fit {lines.name}; run `dovetail index build` again"
        )
    return DocumentStore(content, begins)


def _enter(columns: dict[str, dict[Any, list[int]]], id_: int, passage: Passage) -> None:
    for name, value in passage.metadata.items():
        column = columns.setdefault(name, {})
        for one in _values(value):
            column.setdefault(one, []).append(id_)


def _document(passage: Passage, id_: int, score: float) -> Document:
    return Document(
        id=id_,
        text=passage.text,
        title=passage.title,
        score=score,
        metadata={**passage.metadata, "key": passage.key},
    )


def _values(value: object) -> list[Any]:
    """Return the single values of a field or filter; what is no plain value counts as its text."""
    many = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return [one if isinstance(one, str | int | float | None) else str(one) for one in many]
