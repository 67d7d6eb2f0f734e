"""The endpoint of workflows: runs, at once or with the events of their nodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.ir.errors import CapacityError, LengthError, WorkflowError
from dovetail.runtime.flows import events
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import DONE, JsonReply, encode_written, event, while_connected
from dovetail.runtime.server.errors import ApiError, too_long
from dovetail.runtime.server.generation import new_id
from dovetail.runtime.server.replies import RunReply
from dovetail.runtime.server.schema import RunRequest
from dovetail.runtime.server.served_workflow import ServedWorkflow

KINDS: dict[type[events.Event], str] = {
    events.NodeStarted: "node_started",
    events.NodeText: "node_text",
    events.SubStage: "sub_stage",
    events.Rewritten: "rewritten",
    events.NodeFinished: "node_finished",
}


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
    async with while_connected(request.receive), running(server, served, body.inputs) as job:
        result = await job
    return JsonReply(encode_written(_reply(served, result)))


@contextmanager
def blame_inputs(param: str | None = None) -> Iterator[None]:
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
        raise ApiError(400, str(error), code="request_too_large") from None


@asynccontextmanager
async def running(
    server: ServerContext,
    served: ServedWorkflow,
    inputs: Mapping[str, object],
    param: str | None = None,
) -> AsyncIterator[WorkflowJob]:
    """Yield a run; it ends with the body, and is counted where it has ended well.

    param: the field that the inputs are made of, where they are not a field themselves.
    """
    with blame_inputs(param):
        job = served.start(inputs)
        try:
            yield job
            server.metrics.workflow(served.id, await job)
        finally:
            job.cancel()


async def _events(
    server: ServerContext, served: ServedWorkflow, body: RunRequest
) -> AsyncGenerator[bytes]:
    async with running(server, served, body.inputs) as job:
        async for item in job:
            said = {field.name: getattr(item, field.name) for field in fields(item)}
            yield event(encode_written({"type": KINDS[type(item)], **said}))
        result = await job
    last = {"type": "run_finished", **msgspec.structs.asdict(_reply(served, result))}
    yield event(encode_written(last))
    yield DONE


def _reply(served: ServedWorkflow, result: events.WorkflowResult) -> RunReply:
    return RunReply(
        id=new_id("run"),
        workflow=served.id,
        outputs=dict(result.outputs),
        timeline=list(result.timeline),
        seconds=result.seconds,
        notes=list(result.notes),
        left={name: why.said for name, why in result.left.items()},
    )
