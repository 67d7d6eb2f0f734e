"""A retrieval index's own files: `manifest.json` and the lines of `documents.jsonl`.

An index folder holds `vectors.faiss`, `documents.jsonl` (a passage a line) and `offsets.npy` (where
each line begins); kernels that scan lists may lie under `kernels/<target>/`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dovetail.ir.artifact import FileEntry

INDEX_MAJOR, INDEX_MINOR = 1, 1
VECTORS, DOCUMENTS, OFFSETS = "vectors.faiss", "documents.jsonl", "offsets.npy"


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """What an index finds. key: the corpus's own name for it; `title` may be empty.

    part: which part of the corpus's passage it is, where an encoder could not take it whole.
    """

    key: str
    text: str
    title: str = ""
    metadata: dict[str, Any] = {}
    part: int = 0

    @property
    def embedded(self) -> str:
        """What of it is turned into a vector."""
        return self.head + self.text

    @property
    def head(self) -> str:
        """What goes before its text there."""
        return f"{self.title}: " if self.title else ""


class EmbedderEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What made the vectors, and what goes before a query and before a passage."""

    name: str
    fingerprint: str
    query_prompt: str = ""
    passage_prompt: str = ""


class EarlyEnd(msgspec.Struct, frozen=True, kw_only=True):
    """When searches for `topk` documents in `nprobe` clusters may end: measured for one index.

    patience: clusters in the order of centroids after the nearest documents last changed. recall:
    of the documents of the whole search, mean over `queries` that it was not chosen on. scanned:
    part of the clusters that these scanned.
    """

    topk: int
    nprobe: int
    patience: int
    recall: float
    scanned: float
    queries: int


class IndexManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json` of an index; `files` lists every other file by its relative path."""

    kind: Literal["index"] = "index"
    format_major: int = INDEX_MAJOR
    format_minor: int = INDEX_MINOR
    producer: str
    created: str
    documents: int
    dim: int
    clusters: int
    codes: str
    metric: str
    embedder: EmbedderEntry | None = None
    targets: tuple[str, ...] = ()
    early: tuple[EarlyEnd, ...] = ()
    files: dict[str, FileEntry]
