"""`GET /timeline`: what the server does in the next seconds, for the dashboard and ui.perfetto.dev.

In: a request with `seconds`. Out: a trace as `dovetail serve --timeline` writes one. Nothing is
recorded unless somebody asks.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import JsonReply
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.timeline import ServerTimeline, recorded_model

SECONDS, LONGEST = 3.0, 10.0
MOST_EVENTS = 50_000
"""About 8 MB of JSON; a step is some six events."""


async def record(server: ServerContext, request: Request) -> Response:
    """Record the next seconds of the first model that generates."""
    seconds = _read_seconds(request.query_params.get("seconds"))
    model = recorded_model(server.models)
    trace = await asyncio.to_thread(_record, server, model, seconds)
    return Response(trace, media_type=JsonReply.media_type)


def _read_seconds(text: str | None) -> float:
    try:
        seconds = SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST:
        message = f"`seconds` must be a number above 0, at most {LONGEST:g}"
        raise ApiError(400, message, param="seconds")
    return seconds


def _record(server: ServerContext, model: ServedModel, seconds: float) -> bytes:
    """Return the trace as JSON; RequestError while another one is recorded. On a thread."""
    with model.app.record(max_events=MOST_EVENTS) as timeline:
        server.timeline = ServerTimeline(timeline, model)
        try:
            time.sleep(seconds)
        finally:
            server.timeline = None
    return msgspec.json.encode(timeline.trace())
