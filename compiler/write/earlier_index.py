"""The index that a build replaces: texts that it knows need not be embedded again.

In: an index folder and an encoder. Out: vectors of texts, the folder's where it has exact ones of
the same encoder, else the encoder's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import ArtifactError
from dovetail.ir.index_file import EmbedderEntry
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.retrieval.folder import open_index

Rows = npt.NDArray[np.float32]


class Embeds(Protocol):
    """What turns texts into vectors: a loaded artifact."""

    def embed(self, texts: Sequence[str], /, *, prompt: str | None = None) -> Rows:
        """Return float32 [len(texts), d]; `prompt` goes before each text."""


@dataclass(slots=True)
class EarlierIndex:
    """What an index knows of texts. ids: by the digest of each. used: texts it had vectors of."""

    index: IvfIndex | None = None
    ids: Mapping[bytes, int] = field(default_factory=dict)
    used: int = 0

    def complete(self, texts: Sequence[str], encoder: Embeds, prompt: str) -> Rows:
        """Return the vectors of texts; `encoder` makes unknown ones, with `prompt` before each."""
        ids = [self.ids.get(_digest(text)) for text in texts]
        new = [text for text, id_ in zip(texts, ids, strict=True) if id_ is None]
        if self.index is None or len(new) == len(texts):
            return encoder.embed(texts, prompt=prompt)
        known = [id_ for id_ in ids if id_ is not None]
        self.used += len(known)
        rows = np.empty((len(texts), self.index.dim), np.float32)
        there = np.array([id_ is not None for id_ in ids])
        found, vectors = self.index.vectors(known)  # each once, also where texts are equal
        places = {id_: place for place, id_ in enumerate(found)}
        rows[there] = vectors[[places[id_] for id_ in known]]
        if new:
            rows[~there] = encoder.embed(new, prompt=prompt)
        return rows


def read_earlier(folder: Path, embedder: EmbedderEntry) -> EarlierIndex:
    """Return what the index in a folder knows; nothing where it is damaged, or made otherwise."""
    try:
        found = open_index(folder)
        if found.index.codes != "flat" or _kind(found.embedder) != _kind(embedder):
            return EarlierIndex()
        ids = {_digest(found.store[id_].embedded): id_ for id_ in range(len(found))}
    except ArtifactError:
        return EarlierIndex()
    return EarlierIndex(found.index, ids)


def _kind(embedder: EmbedderEntry | None) -> tuple[str, str] | None:
    """Return what the vectors of texts depend on."""
    return (embedder.fingerprint, embedder.passage_prompt) if embedder else None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
