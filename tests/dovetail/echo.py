"""Services that tell what they were asked: for graphs of other frameworks, run there and here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.workflow import Embedding, Generation, Rerank, Retrieval
from dovetail.runtime.index.documents import Document


class Echo:
    """Replies with the prompt; every document says what was searched for."""

    def generate(self, prompt: str, node: Generation) -> str:
        return f"<{prompt}>"

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> Sequence[Document]:
        return [
            Document(id=i, text=f"{i} of {query}", title=f"t{i}", score=i / 2)
            for i in range(node.topk)
        ]

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        return np.full(2, len(text), np.float32)

    def rerank(self, query: str, documents: Any, node: Rerank) -> Sequence[Document]:
        return list(reversed(documents))[: node.topk]
