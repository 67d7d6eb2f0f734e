"""Workflows before they run: those of an artifact are opened, and each node must be able to run.

In: a template of data, and the Python file that made it where it has code; a workflow, and what
there is. Out: the workflow, or a WorkflowError that names the node. The file is code of the
artifact, as its kernels are: it is listed with its sha256 and runs where the artifact is loaded.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

import msgspec

from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import ArtifactError, DovetailError, WorkflowError, describe_error
from dovetail.ir.graph import EMBEDDING, GENERATION, RERANK
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.template import raise_file
from dovetail.ir.workflow import Embedding, Generation, Rerank, Retrieval, Workflow
from dovetail.ir.workflow_file import make_graph
from dovetail.runtime.artifact import StoredWorkflow
from dovetail.runtime.schedule.request import SamplingParams

INSTRUCTED = "rerank by instruction"
"""Beside the kinds of nodes: for reranks that have one."""
CROSS_ENCODER = "compile one beside the model: `dovetail compile ... --model reranker=DIRECTORY`"


def models_by_kind(
    generating: Iterable[str], encoders: Mapping[str, EncoderSpec]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the models that nodes of each kind, and INSTRUCTED, may ask for."""
    embed = (name for name, spec in encoders.items() if not spec.labels)
    rank = tuple(name for name, spec in encoders.items() if spec.labels == 1)
    told = tuple(name for name in rank if encoders[name].template)
    kinds = {GENERATION: tuple(generating), EMBEDDING: tuple(embed), RERANK: rank}
    return {**kinds, INSTRUCTED: told}


def run_file(source: bytes, path: str) -> dict[str, Workflow]:
    """Run a Python file and return the workflows of all graphs that its names stand for.

    Raises WorkflowError where it cannot be run, or a graph is wrong.
    """
    name = "dovetail_workflow_" + hashlib.sha256(source).hexdigest()[:16]
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where dataclasses look up the types of their fields
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise WorkflowError(
            f"{path} cannot be run ({describe_error(error)}); a workflow's file may need installed "
            "packages and nothing else"
        ) from error
    graphs = {id(value): value for value in vars(module).values() if isinstance(value, RAGraph)}
    found: dict[str, Workflow] = {}
    for graph in graphs.values():
        if graph.name in found:
            raise WorkflowError(f"{path} has two graphs called {graph.name!r}")
        found[graph.name] = graph.workflow()
    return found


def open_workflow(stored: StoredWorkflow) -> Workflow:
    """Return a workflow of an artifact; its file runs here, where it has one.

    Raises WorkflowError where the file cannot be run, ArtifactError where it makes something else
    than it did for the compile.
    """
    if stored.source is None:
        return make_graph(raise_file(stored.template)).workflow()
    found = run_file(stored.source.read_bytes(), str(stored.source)).get(stored.name)
    if found is None or found.template != stored.template:
        raise ArtifactError(
            f"{stored.source} makes another workflow {stored.name!r} than when it was compiled; "
            "compile the artifact again"
        )
    return found


def check_workflow(
    workflow: Workflow,
    models: Mapping[str, Collection[str]],
    *,
    adapters: Collection[str] | None,
    find_index: Callable[[str | None], object],
    prepare: Callable[[Generation], None] = lambda node: None,
) -> None:
    """Raise a WorkflowError that names the first node which cannot run.

    Args:
        workflow: a checked one.
        models: what nodes may ask for by name, as `models_by_kind`.
        adapters: those of the model that generates; None where none does.
        find_index: raises a DovetailError for an index that is not there.
        prepare: has ready what a generation needs, or raises a DovetailError.
    """
    for node in workflow.nodes.values():
        try:
            if isinstance(node, Retrieval):
                find_index(node.index)
                _check_filters(node.filters)
            elif isinstance(node, Generation | Embedding | Rerank):
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
    node: Generation | Embedding | Rerank,
    models: Mapping[str, Collection[str]],
    adapters: Collection[str] | None,
) -> None:
    able = models[node.kind]
    if node.model is not None and node.model not in able:
        known = ", ".join(map(repr, able)) or "none"
        raise WorkflowError(f"no model {node.model!r} for {node.kind}; there are: {known}")
    if isinstance(node, Rerank):
        if not able:
            raise WorkflowError(f"there is no cross-encoder; {CROSS_ENCODER}")
        chosen = node.model or next(iter(able))
        if node.instruction is not None and chosen not in models[INSTRUCTED]:
            raise WorkflowError(f"the cross-encoder {chosen!r} takes no instruction; omit it")
    if not isinstance(node, Generation):
        return
    if adapters is None:
        raise WorkflowError("the app has no model that generates")
    params = SamplingParams.make(node.options)
    params.check_adapter(adapters)
    if params.n != 1:
        raise WorkflowError("a generation node writes one text; n must be 1")
