"""The documents beside the vectors of an index: text, title and metadata by id.

In: a file of JSON lines and where each begins, and passages that came later. Out:
passages by id, ids by the corpus's own keys, and which documents match filters on metadata.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias
from weakref import finalize

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.ir.index_file import Passage
from dovetail.runtime.index.cursor import Hit

Filters: TypeAlias = Mapping[str, object]
"""Metadata field -> the value, or the values, of which a document must have one."""

_DECODE = msgspec.json.Decoder(Passage)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One passage of an index. score: distance or inner product, as the index has it."""

    id: int
    text: str
    title: str = ""
    score: float = 0.0
    metadata: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.title}: {self.text}" if self.title else self.text


class DocumentStore:
    """Passages by id, the number of their line. An id never means another passage.

    Any number of threads may read while one adds or forgets.
    """

    def __init__(self, lines: Path | None = None, offsets: Sequence[int] = (0,)) -> None:
        """`offsets`: where each line begins in the file `lines`, and where the last one ends."""
        self._path, self._offsets = lines, offsets
        if lines is not None:
            self._file = os.open(lines, os.O_RDONLY)
            finalize(self, os.close, self._file)
        self._stored = self._next = len(offsets) - 1
        self._added: dict[int, Passage] = {}
        self._lock = Lock()
        self._columns: dict[str, dict[Any, list[int]]] | None = None
        self._ids: dict[str, tuple[int, ...]] | None = None

    def __len__(self) -> int:
        """Return how many passages there have been: one more than the last id."""
        return self._next

    def __getitem__(self, id_: int) -> Passage:
        """Return a passage; KeyError for a forgotten one, ArtifactError for a damaged line."""
        if id_ >= self._stored:
            return self._added[id_]
        begin, end = int(self._offsets[id_]), int(self._offsets[id_ + 1])
        try:  # not mapped: to read mapped bytes of a file that was cut off ends the process
            return _DECODE.decode(os.pread(self._file, end - begin, begin))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ArtifactError(
                f"line {id_ + 1} of {self._path} cannot be read ({error}); run `dovetail index "
                "build` again"
            ) from None

    def documents(self, hits: Sequence[Hit], metric: str) -> list[Document]:
        """Return the documents of hits; scores are as the index has them: larger inner products.

        Those that were forgotten meanwhile are left out.
        """
        sign, found = -1.0 if metric == "ip" else 1.0, list[Document]()
        for distance, id_ in hits:
            passage = self[id_] if id_ < self._stored else self._added.get(id_)
            if passage is not None:
                about = {**passage.metadata, "key": passage.key}
                text, title, score = passage.text, passage.title, sign * distance
                found.append(Document(id=id_, text=text, title=title, score=score, metadata=about))
        return found

    def find(self, key: str) -> tuple[int, ...]:
        """Return the ids of the latest passage with a key of the corpus: of all its parts."""
        with self._lock:
            if self._ids is None:
                ids = dict[str, tuple[int, ...]]()  # not kept where a line is damaged
                for id_, passage in self._items():
                    _name(ids, id_, passage)
                self._ids = ids
            return self._ids.get(key, ())

    def add(self, passages: Iterable[Passage], ids: Iterable[int] | None = None) -> None:
        """Append passages. `ids`: those that they are to have, rising; default the next ones."""
        with self._lock:
            chosen = count(self._next) if ids is None else ids
            for id_, passage in zip(chosen, passages, strict=False):
                self._added[id_] = passage
                self._next = id_ + 1
                if self._ids is not None:
                    _name(self._ids, id_, passage)
                if self._columns is not None:
                    _enter(self._columns, id_, passage)

    def forget(self, ids: Iterable[int]) -> None:
        """Free passages that were added and that nobody will be told of any more."""
        with self._lock:
            for id_ in ids:
                passage = self._added.pop(id_, None)
                if passage is None:
                    continue
                if self._ids is not None and id_ in self._ids.get(passage.key, ()):
                    left = tuple(i for i in self._ids.pop(passage.key) if i != id_)
                    self._ids |= {passage.key: left} if left else {}
                if self._columns is not None:
                    _leave(self._columns, id_, passage)

    def skip_to(self, first: int) -> None:
        """Have the next passage be `first` or later: those before it have been forgotten."""
        self._next = max(self._next, first)

    def take_back(self, first: int) -> None:
        """Forget the passages from the id `first` on, which nobody has been told of."""
        self.forget(range(first, self._next))
        with self._lock:
            self._next, self._ids = first, None  # what they took the place of counts again

    def match(self, filters: Filters) -> NDArray[np.int64]:
        """Return the documents that have, in every field, one of the values asked for; ids rise.

        A document whose field is a list has all values in it. RequestError for an unknown field.
        """
        with self._lock:
            if self._columns is None:  # the first filter reads all documents, later ones none
                columns = dict[str, dict[Any, list[int]]]()
                for id_, passage in self._items():
                    _enter(columns, id_, passage)
                self._columns = columns
            found = []
            for name, wanted in filters.items():
                if name not in self._columns:
                    known = ", ".join(sorted(self._columns)) or "none"
                    raise RequestError(
                        f"no document has the metadata field {name!r}; there are: {known}"
                    )
                ids = [i for v in _values(wanted) for i in self._columns[name].get(v, ())]
                found.append(np.unique(np.array(ids, np.int64)))
        return reduce(partial(np.intersect1d, assume_unique=True), found)

    def _items(self) -> Iterator[tuple[int, Passage]]:
        yield from ((id_, self[id_]) for id_ in range(self._stored))
        yield from tuple(self._added.items())


def divide(
    passages: Iterable[Passage], cut: Callable[[str, str], Sequence[str]]
) -> tuple[list[Passage], int]:
    """Return passages in parts that an encoder takes whole, and how many passages had to be cut.

    `cut` gives the parts of a text before each of which another one goes.
    """
    found, long = list[Passage](), 0
    for passage in passages:
        texts = cut(passage.text, passage.head)
        long += len(texts) > 1
        found += (
            msgspec.structs.replace(passage, text=text, part=part)
            for part, text in enumerate(texts)
        )
    return found, long


def encode_passages(passages: Iterable[Passage]) -> tuple[bytes, NDArray[np.int64]]:
    """Return the lines of a documents file, and where each begins and the last one ends."""
    lines = [msgspec.json.encode(passage) + b"\n" for passage in passages]
    offsets = np.zeros(len(lines) + 1, np.int64)
    np.cumsum([len(line) for line in lines], out=offsets[1:])
    return b"".join(lines), offsets


def open_documents(lines: Path, offsets: Path) -> DocumentStore:
    """Return the store of two files; ArtifactError where they do not fit each other."""
    try:
        begins = np.load(offsets, allow_pickle=False)  # read, as the lines are: see __getitem__
        size = lines.stat().st_size
        store = DocumentStore(lines, begins)
    except (OSError, EOFError, ValueError) as error:
        raise ArtifactError(
            f"{lines.parent}: its documents cannot be read ({error}); run `dovetail index build` "
            "again"
        ) from None
    whole = begins.ndim == 1 and len(begins) and begins[0] == 0 and begins[-1] == size
    if not whole or begins.dtype != np.int64 or (np.diff(begins) <= 0).any():
        raise ArtifactError(
            f"{offsets} does not fit {lines.name}; run `dovetail index build` again"
        )
    return store


def _name(ids: dict[str, tuple[int, ...]], id_: int, passage: Passage) -> None:
    before = ids.get(passage.key, ()) if passage.part else ()
    ids[passage.key] = (*before, id_)


def _enter(columns: dict[str, dict[Any, list[int]]], id_: int, passage: Passage) -> None:
    for name, value in passage.metadata.items():
        column = columns.setdefault(name, {})
        for one in _values(value):
            column.setdefault(one, []).append(id_)


def _leave(columns: dict[str, dict[Any, list[int]]], id_: int, passage: Passage) -> None:
    for name, value in passage.metadata.items():
        for one in _values(value):
            ids = columns[name][one]
            del ids[bisect_left(ids, id_)]
            if not ids:
                del columns[name][one]


def _values(value: object) -> list[tuple[bool, Any]]:
    """Return the single values of a field or filter; what is no plain value counts as its text.

    Before each is whether it is True or False, which Python has equal to 1 and 0.
    """
    many = value if isinstance(value, list | tuple | set | frozenset) else [value]
    plain = (one if isinstance(one, str | int | float | None) else str(one) for one in many)
    return list(dict.fromkeys((isinstance(one, bool), one) for one in plain))
