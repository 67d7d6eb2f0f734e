"""What the nodes of a workflow call: text generation, search and embedding, behind one interface.

In: a call of a node. Out: its result. Which engine, index and encoder stand behind it is the
caller's choice; a workflow's meaning is `run_in_order` with `perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import DovetailError, WorkflowError
from dovetail.ir.workflow import Embedding, Function, Generation, Retrieval, State, render
from dovetail.runtime.workflow_run import Call


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One passage of an index. score: distance or inner product, as the index has it."""

    id: int
    text: str
    title: str = ""
    score: float = 0.0
    metadata: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.title}: {self.text}" if self.title else self.text


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
    try:
        return _DO[type(call.node)](call.node, call.state, services)
    except Exception as error:
        what = (
            str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
        )
        raise WorkflowError(f"node {call.node.name!r} failed: {what}") from error


def _generate(node: Generation, state: State, services: Services) -> object:
    return services.generate(render(node.prompt, state), node)


def _retrieve(node: Retrieval, state: State, services: Services) -> object:
    query = state[node.query]
    return list(services.retrieve(query if isinstance(query, np.ndarray) else str(query), node))


def _embed(node: Embedding, state: State, services: Services) -> object:
    return services.embed(str(state[node.text]), node)


def _call(node: Function, state: State, services: Services) -> object:
    return node.function(state)


_DO: dict[type, Callable[[Any, State, Services], object]] = {
    Generation: _generate,
    Retrieval: _retrieve,
    Embedding: _embed,
    Function: _call,
}
