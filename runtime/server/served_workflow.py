"""Workflows behind the port, each run by the app of a served model.

In: graphs, indexes and the served models. Out: `ServedWorkflow`s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dovetail.ir.errors import SpecError, WorkflowError
from dovetail.ir.workflow import END, Generation, Name, Workflow
from dovetail.runtime.flows.events import WorkflowResult
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.server.edge import encode_written
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.models import Models, ServedModel

log = logging.getLogger("dovetail.server")


@dataclass(frozen=True)
class ServedWorkflow:
    """A workflow under its name, run by the app of `model`."""

    id: str
    model: ServedModel
    workflow: Workflow
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def context(self) -> int:
        """Tokens that a request of its model may have in all."""
        return self.model.context

    @property
    def speakers(self) -> frozenset[Name]:
        """The generations that nothing follows: their text may be shown while it is written."""
        return frozenset(
            name
            for name, node in self.workflow.nodes.items()
            if isinstance(node, Generation)
            and all(edge.target is END for edge in self.workflow.edges[name])
        )

    def start(self, inputs: Mapping[str, object]) -> WorkflowJob:
        """Start a run; ApiError where the inputs are wrong."""
        try:
            return self.model.app.submit_workflow(self.workflow, inputs)
        except WorkflowError as error:
            raise ApiError(400, str(error), param="inputs") from None

    def ask(self, text: str) -> dict[str, object]:
        """Return the inputs of a chat; ApiError where the workflow has not just one."""
        if len(self.workflow.inputs) != 1:
            names = ", ".join(self.workflow.inputs)
            raise ApiError(
                400, f"{self.id!r} has the inputs {names}; use /v1/workflows/{self.id}/runs"
            )
        return {self.workflow.inputs[0]: text}

    def answer(self, result: WorkflowResult) -> str:
        """Return what the last node wrote, as text; WorkflowError where JSON cannot hold it."""
        last = self.workflow.nodes[result.timeline[-1].node]
        found = result.outputs[last.output]
        written = encode_written(found)
        return found if isinstance(found, str) else bytes(written).decode()


def add_workflows(
    models: Models, graphs: Sequence[Workflow], indexes: Sequence[Path], nprobe: int | None
) -> dict[str, ServedWorkflow]:
    """Return the workflows of artifacts, and `graphs`, which the first model that generates runs.

    These search `indexes`, their queries being embedded by its own encoder, else by the first model
    that embeds. A graph stands in for an artifact's of the same name; an artifact's that cannot run
    is left out with a warning. Raises SpecError where no model generates or two ids are the same,
    WorkflowError where a graph lacks its index or a model, and what `App.add_index` and
    `App.workflows` do.
    """
    model = next((model for model in models if "generate" in model.skills), None)
    if model is not None:
        _add_indexes(models, model, indexes, nprobe)
        for graph in graphs:
            model.app.flows.add_workflow(graph, whole=True)
    elif graphs:
        raise SpecError("workflows need a model that generates; none is served")
    if len({graph.name for graph in graphs}) < len(graphs):
        raise SpecError("two workflows have the same id")
    found: dict[str, ServedWorkflow] = {}
    for served in (model for model in models if model.whole):
        for name, workflow in served.app.workflows.items():
            if name in found or any(name == other.id for other in models):
                raise SpecError(f"two models or workflows have the id {name!r}")
            try:
                served.app.flows.check(workflow)
            except WorkflowError as error:
                log.warning("%s; it is not served", error)
                continue
            found[name] = ServedWorkflow(name, served, workflow)
    return found


def _add_indexes(
    models: Models, model: ServedModel, indexes: Sequence[Path], nprobe: int | None
) -> None:
    embedder = model if model.encoder else next((m for m in models if m.encoder), None)
    for path in indexes:
        embed = None
        if embedder is not None and embedder is not model:
            made = read_manifest(path).embedder
            prompt = made.query_prompt if made else ""
            embed = partial(embedder.app.embed, prompt=prompt, wait=True)
        model.app.add_index(path, nprobe=nprobe, embed=embed)
