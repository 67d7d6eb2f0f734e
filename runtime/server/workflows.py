"""Workflows behind the port: runs with the events of their nodes, and as models of chats.

In: graphs, indexes and the served models. Out: `ServedWorkflow`s, and the endpoint of their runs. A
chat with a workflow gives its one input the user's last message, and answers what it wrote last.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from dovetail.ir.errors import CapacityError, LengthError, SpecError, WorkflowError
from dovetail.ir.workflow import END, Generation, Name, Workflow
from dovetail.runtime.app import App
from dovetail.runtime.encoder import Rows
from dovetail.runtime.flows.events import (
    Event,
    NodeFinished,
    NodeStarted,
    NodeText,
    SubStage,
    WorkflowResult,
)
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.retrieval.manifest import read_manifest
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import DONE, JsonReply, present
from dovetail.runtime.server.errors import FINAL, ApiError, too_long
from dovetail.runtime.server.generation import new_id
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.replies import RunNode, RunReply
from dovetail.runtime.server.schema import RunRequest

KINDS: dict[type[Event], str] = {
    NodeStarted: "node_started",
    NodeText: "node_text",
    SubStage: "sub_stage",
    NodeFinished: "node_finished",
}


@dataclass(frozen=True)
class ServedWorkflow:
    """A workflow under its name, run by the app of `model`."""

    id: str
    model: ServedModel
    workflow: Workflow
    created: int = field(default_factory=lambda: int(time.time()))

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
        """Return what the last node wrote, as text."""
        last = self.workflow.nodes[result.timeline[-1].node]
        return _text(result.outputs[last.output])


def add_workflows(
    models: Models, graphs: Sequence[Workflow], indexes: Sequence[Path], nprobe: int | None
) -> dict[str, ServedWorkflow]:
    """Return the workflows of artifacts, and `graphs`, which the first model that generates runs.

    These search `indexes`, their queries being embedded by its own encoder, else by the first model
    that embeds. A graph stands in for an artifact's of the same name. Raises SpecError where no
    model generates or two ids are the same, WorkflowError where a graph lacks its index or a model,
    and what `App.add_index` and `App.workflows` do.
    """
    model = next((model for model in models if "generate" in model.skills), None)
    if model is not None:
        _add_indexes(models, model, indexes, nprobe)
        for graph in graphs:
            model.app.flows.check(graph)
            model.app.add_workflow(graph)
    elif graphs:
        raise SpecError("workflows need a model that generates; none is served")
    if len({graph.name for graph in graphs}) < len(graphs):
        raise SpecError("two workflows have the same id")
    found: dict[str, ServedWorkflow] = {}
    for served in models:
        for name, workflow in served.app.workflows.items():
            if name in found or any(name == other.id for other in models):
                raise SpecError(f"two models or workflows have the id {name!r}")
            found[name] = ServedWorkflow(name, served, workflow)
    return found


def _add_indexes(
    models: Models, model: ServedModel, indexes: Sequence[Path], nprobe: int | None
) -> None:
    embedder = model if model.encoder else next((m for m in models if m.encoder), None)
    for path in indexes:
        embed = None
        if embedder is not None and embedder is not model:
            embed = partial(_embed, embedder.app, _query_prompt(path))
        model.app.add_index(path, nprobe=nprobe, embed=embed)


def _embed(app: App, prompt: str, texts: list[str]) -> Rows:
    return app.embed(texts, prompt=prompt, wait=True)


def _query_prompt(index: Path) -> str:
    """Return what goes before queries of an index."""
    embedder = read_manifest(index).embedder
    return embedder.query_prompt if embedder else ""


# ---- the endpoint ----


async def run_workflow(server: ServerContext, request: Request) -> Response:
    """Run a workflow, at once or with its events."""
    body = await server.read(request, RunRequest)
    name = request.path_params["name"]
    served = server.workflows.get(name)
    if served is None:
        known = ", ".join(map(repr, server.workflows)) or "none"
        message = f"the workflow {name[:200]!r} does not exist; this server has {known}"
        raise ApiError(404, message, param="name", code="workflow_not_found")
    if body.stream:
        return server.stream(_events(server, served, body))
    async with present(request.receive):
        result = await finish(server, served, body.inputs)
    return JsonReply(msgspec.Raw(_encode(_reply(served, result))))


@contextmanager
def blaming(param: str | None = None) -> Iterator[None]:
    """Make texts that are too long for a run the fault of the request, and of its field `param`.

    None: the input, where it is known which, or all inputs.
    """
    try:
        yield
    except (LengthError, WorkflowError) as error:
        _blame(error, param)
        raise


def _blame(error: LengthError | WorkflowError, param: str | None) -> None:
    """Raise an ApiError where a request is at fault.

    Apart from who catches the error: a name for it there would be a circle, which holds the inputs
    until Python looks for circles.
    """
    cause = error.__cause__ if isinstance(error, WorkflowError) else error
    if isinstance(cause, LengthError):
        raise too_long(str(error), param=param or cause.field or "inputs") from None
    if isinstance(cause, CapacityError) and cause.retry_after is None:
        raise ApiError(400, str(error), code="request_too_large", headers=FINAL) from None


async def finish(
    server: ServerContext,
    served: ServedWorkflow,
    inputs: Mapping[str, object],
    param: str | None = None,
) -> WorkflowResult:
    """Return the result of a run, and count it; the run ends where nobody waits any more.

    param: the field that the inputs are made of, where they are not a field themselves.
    """
    with blaming(param):
        job = served.start(inputs)
        try:
            result = await job
        finally:
            job.cancel()
    server.metrics.workflow(served.id, result)
    return result


async def _events(
    server: ServerContext, served: ServedWorkflow, body: RunRequest
) -> AsyncGenerator[bytes]:
    with blaming():
        job = served.start(body.inputs)
        try:
            async for told in job:
                yield _event({"type": KINDS[type(told)], **_fields(told)})
            result = await job
        finally:
            job.cancel()
    server.metrics.workflow(served.id, result)
    reply: dict[str, Any] = msgspec.to_builtins(_reply(served, result), enc_hook=_plain)
    yield _event({"type": "run_finished", **reply})
    yield DONE


def _reply(served: ServedWorkflow, result: WorkflowResult) -> RunReply:
    nodes = [
        RunNode(node=ran.node, round=ran.round, kind=ran.kind, start=ran.start, end=ran.end)
        for ran in result.timeline
    ]
    return RunReply(
        id=new_id("run"),
        workflow=served.id,
        outputs=dict(result.outputs),
        timeline=nodes,
        seconds=result.seconds,
        notes=list(result.notes),
    )


def _fields(told: Event) -> dict[str, Any]:
    return {name: getattr(told, name) for name in told.__dataclass_fields__}


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % _encode(value)


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: object) -> object:
    """Return what JSON can hold of what a node may write."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else _encode(value).decode()
