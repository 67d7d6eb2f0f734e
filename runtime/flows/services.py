"""What the nodes of a workflow call: text generation, search and embedding, behind one interface.

In: a call of a node. Out: its result. Which engine, index and encoder stand behind it is the
caller's choice; a workflow's meaning is `run_in_order` with `perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import DovetailError, WorkflowError
from dovetail.ir.workflow import Embedding, Function, Generation, Node, Retrieval, State
from dovetail.runtime.flows.prompts import FilledPrompt
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
    with _naming(call.node):
        return _DO[type(call.node)](call, services)


def text_of(call: Call) -> str:
    """Return the prompt, the query or the text of a call's node.

    Raises WorkflowError where a value of the state cannot be turned into text.
    """
    with _naming(call.node):
        return _text(call)


def _text(call: Call) -> str:
    return _TEXTS[type(call.node)](call.node, call.state)


@contextmanager
def _naming(node: Node) -> Iterator[None]:
    """Raise a WorkflowError that names the node for whatever goes wrong."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, DovetailError)
        what = str(error) if ours else f"{type(error).__name__}: {error}"
        raise WorkflowError(f"node {node.name!r} failed: {what}") from error


def _retrieve(call: Call, services: Services) -> object:
    assert isinstance(call.node, Retrieval)
    query = call.state[call.node.query]
    found = query if isinstance(query, np.ndarray) else str(query)
    return list(services.retrieve(found, call.node))


_TEXTS: dict[type, Callable[[Any, State], str]] = {
    Generation: lambda node, state: FilledPrompt.of(node.prompt, state),
    Retrieval: lambda node, state: str(state[node.query]),
    Embedding: lambda node, state: str(state[node.text]),
}
_DO: dict[type, Callable[[Any, Services], object]] = {
    Generation: lambda call, services: services.generate(_text(call), call.node),
    Retrieval: _retrieve,
    Embedding: lambda call, services: services.embed(_text(call), call.node),
    Function: lambda call, services: call.node.function(call.state),
}
