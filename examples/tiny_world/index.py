"""A passage index: passages and what embeds them go in, the nearest passages of a query come out.

Search is exact: the inner product with every passage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Embeds(Protocol):
    """What turns texts into vectors of unit length: a loaded artifact, or the torch encoder."""

    def embed(self, texts: list[str], /) -> npt.NDArray[np.float32]:
        """Return float32 [len(texts), d]."""


class PassageIndex:
    """Texts and their vectors."""

    def __init__(self, encoder: Embeds, texts: Sequence[str]) -> None:
        self._encoder, self.texts = encoder, tuple(texts)
        self._vectors = encoder.embed(list(texts))

    def find(self, queries: Sequence[str], topk: int) -> npt.NDArray[np.int64]:
        """Return the indices of the nearest texts, int64 [len(queries), topk], best first."""
        scores = self._encoder.embed(list(queries)) @ self._vectors.T
        return np.argsort(-scores, axis=1, kind="stable")[:, :topk].astype(np.int64)

    def search(self, query: str, topk: int) -> list[str]:
        """Return the nearest texts, best first."""
        return [self.texts[i] for i in self.find([query], topk)[0]]
