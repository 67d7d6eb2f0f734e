"""What the nodes of a workflow call: text generation, search and embedding, behind one interface.

In: a call of a node. Out: its result. Which engine, index and encoder stand behind it is the
caller's choice; a workflow's meaning is `run_in_order` with `perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.workflow import Embedding, Function, Generation, Retrieval
from dovetail.runtime.flows.prompts import naming, read_text
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


def perform(call: Call, services: Services) -> object:
    """Return the result of a call; WorkflowError naming the node where it fails."""
    with naming(call.node):
        return _DO[type(call.node)](call, services)


def _retrieve(call: Call, services: Services) -> object:
    assert isinstance(call.node, Retrieval)
    query = call.state[call.node.query]
    found = query if isinstance(query, np.ndarray) else str(query)
    return list(services.retrieve(found, call.node))


_DO: dict[type, Callable[[Any, Services], object]] = {
    Generation: lambda call, services: services.generate(read_text(call), call.node),
    Retrieval: _retrieve,
    Embedding: lambda call, services: services.embed(read_text(call), call.node),
    Function: lambda call, services: call.node.call(call.state),
}
