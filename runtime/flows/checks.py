"""What is checked of a workflow before anything is started: that each of its nodes can run.

In: a workflow, and what there is. Out: nothing, or a WorkflowError that names the node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from dovetail.ir.errors import DovetailError, WorkflowError
from dovetail.ir.workflow import Embedding, Generation, Retrieval, Workflow
from dovetail.runtime.schedule.request import SamplingParams


def check_workflow(
    workflow: Workflow,
    models: Collection[str],
    *,
    adapters: Collection[str] | None,
    find_index: Callable[[str | None], object],
    prepare: Callable[[Generation], None] = lambda node: None,
) -> None:
    """Raise a WorkflowError that names the first node which cannot run.

    Args:
        workflow: a checked one.
        models: what nodes may ask for by name.
        adapters: those of the model that generates; None where none does.
        find_index: raises a DovetailError for an index that is not there.
        prepare: has ready what a generation needs, or raises a DovetailError.
    """
    for node in workflow.nodes.values():
        try:
            if isinstance(node, Retrieval):
                find_index(node.index)
                _check_filters(node.filters)
            elif isinstance(node, Generation | Embedding):
                _check_model(node, models, adapters)
                if isinstance(node, Generation):
                    prepare(node)
        except DovetailError as error:
            where = f"workflow {workflow.name!r}: node {node.name!r}"
            raise WorkflowError(f"{where}: {error}") from None


def _check_filters(filters: Mapping[str, object]) -> None:
    """Raise a WorkflowError for what cannot be sent to the process that searches."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(dict(filters)), type=dict[str, Any])
    except (TypeError, ValueError, OverflowError, msgspec.ValidationError) as error:
        raise WorkflowError(f"filters must be plain values by names of fields: {error}") from None


def _check_model(
    node: Generation | Embedding, models: Collection[str], adapters: Collection[str] | None
) -> None:
    if node.model is not None and node.model not in models:
        known = ", ".join(map(repr, models)) or "none"
        raise WorkflowError(f"there is no model {node.model!r}; there are: {known}")
    if isinstance(node, Embedding):
        return
    if adapters is None:
        raise WorkflowError("the app has no model that generates")
    params = SamplingParams.make(node.options)
    params.check_adapter(adapters)
    if params.n != 1:
        raise WorkflowError("a generation node writes one text; n must be 1")
