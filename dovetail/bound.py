"""Nodes of ours as plain callables, for graphs that are built with LangGraph.

In: what `RAGraph.add_...` takes, and services. Out: a callable from a state to what it writes
there; LangGraph runs it as it is, and `from_langgraph` finds the node in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

from dovetail.ir.errors import WorkflowError
from dovetail.ir.options import SamplingOptions
from dovetail.ir.ragraph import make_generation
from dovetail.ir.workflow import (
    Embedding,
    Function,
    Node,
    PromptMessage,
    Rerank,
    Retrieval,
    State,
)
from dovetail.runtime.flows.services import Services, perform
from dovetail.runtime.flows.workflow_run import Call


@dataclass(frozen=True, slots=True)
class Bound:
    """A node and the services that it calls where another framework runs it."""

    node: Node
    services: Services | None = None

    def __call__(self, state: State) -> dict[str, object]:
        """Return what the node writes, by name.

        Raises WorkflowError where it fails, or where it has no services and needs them.
        """
        if self.services is None:
            if not isinstance(self.node, Function):
                raise WorkflowError(
                    f"node {self.node.output!r} calls a model or an index; pass "
                    "`services` that do so, or import the whole graph or pipeline"
                )
            return {self.node.output: self.node.call(state)}
        return {self.node.output: perform(Call(self.node, 0, state, {}), self.services)}


def generation(
    *,
    prompt: str | Sequence[PromptMessage | Mapping[str, str]],
    output: str = "answer",
    services: Services | None = None,
    model: str | None = None,
    **options: Unpack[SamplingOptions],
) -> Bound:
    """Bind a generation; see `RAGraph.add_generation`."""
    return Bound(make_generation(output, prompt, output, model, options), services)


def retrieval(
    *,
    query: str,
    output: str,
    topk: int = 5,
    filters: Mapping[str, object] | None = None,
    index: str | None = None,
    services: Services | None = None,
) -> Bound:
    """Bind a retrieval; see `RAGraph.add_retrieval`."""
    return Bound(Retrieval(output, query, output, topk, dict(filters or {}), index), services)


def embedding(
    *, text: str, output: str, model: str | None = None, services: Services | None = None
) -> Bound:
    """Bind an embedding; see `RAGraph.add_embedding`."""
    return Bound(Embedding(output, text, output, model), services)


def rerank(
    *,
    query: str,
    documents: str,
    output: str,
    topk: int = 5,
    model: str | None = None,
    instruction: str | None = None,
    services: Services | None = None,
) -> Bound:
    """Bind a rerank; see `RAGraph.add_rerank`."""
    return Bound(Rerank(output, query, documents, output, topk, model, instruction), services)


def function(call: Callable[[State], object], output: str) -> Bound:
    """Bind a function of the state: it returns the value, not a mapping to be merged."""
    return Bound(Function(output, call, output))
