"""What the nodes of a workflow call: generation, search and encoders, behind one interface.

In: a call of a node. Out: its result. Which engine, index and encoder stand behind it is the
caller's choice; a workflow's meaning is `run_in_order` with `perform`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.workflow import Embedding, Generation, Rerank, Retrieval
from dovetail.runtime.flows.prompts import naming, read_text, read_vector
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.documents import Document


class Services(Protocol):
    """Engine, index and encoder as a workflow needs them. May be called from several threads."""

    def generate(self, prompt: str, node: Generation) -> str:
        """Return the reply to a prompt under the node's options."""
        ...

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> Sequence[Document]:
        """Return the node's `topk` documents nearest to `query`, the nearest first."""
        ...

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        """Return the vector of `text`, shape [d]."""
        ...

    def rerank(self, query: str, documents: Sequence[object], node: Rerank) -> Sequence[Document]:
        """Return the node's `topk` of `documents` that fit `query` best, the best first."""
        ...


def perform(call: Call, services: Services) -> object:
    """Return the result of a call; WorkflowError naming the node where it fails."""
    with naming(call.node):
        match call.node:
            case Generation() as node:
                return services.generate(read_text(call), node)
            case Embedding() as node:
                return services.embed(read_text(call), node)
            case Rerank() as node:
                return list(services.rerank(read_text(call), call.state[node.documents], node))
            case Retrieval() as node:
                vector = read_vector(call.state[node.query])
                asked = read_text(call) if vector is None else vector
                return list(services.retrieve(asked, node.filled(call.state)))
            case node:
                return node.call(call.state)
