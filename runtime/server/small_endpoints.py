"""The small endpoints: models, tokens, health, version, metrics, a timeline of the next seconds."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.conversation import show_chat
from dovetail.runtime.server.edge import JsonReply
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.generation import check_tokens
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import Health, ModelCard, ModelList, Text, Tokens, Version
from dovetail.runtime.server.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from dovetail.runtime.server.served_workflow import ServedWorkflow
from dovetail.runtime.server.timeline import ServerTimeline, recorded_model

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHOWN = (
    *("messages", "add_generation_prompt", "continue_final_message"),
    *("tools", "chat_template_kwargs"),
)
"""Fields of a chat that its prompt is made of."""
SECONDS, LONGEST = 3.0, 10.0
"""Of a timeline: what is recorded unless the request says, and at most."""
MOST_EVENTS = 50_000
"""Of a timeline: about 8 MB of JSON; a step is some six events."""


async def models(server: ServerContext, _request: Request) -> Response:
    """List what is served."""
    cards = map(_card, (*server.models, *server.workflows.values()))
    return JsonReply(ModelList(data=list(cards)))


async def model(server: ServerContext, request: Request) -> Response:
    """Show one model."""
    name = request.path_params["model"]
    return JsonReply(_card(server.workflows.get(name) or server.find(name)))


async def tokenize(server: ServerContext, request: Request) -> Response:
    """Turn a text or a conversation to token ids."""
    body = await server.read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either `prompt` or `messages`", param="prompt")
    served = server.find(body.model, "generate")
    if body.messages is None:
        encode = partial(served.encode, body.prompt or "", special=body.add_special_tokens)
    else:
        chat = {name: getattr(body, name) for name in SHOWN}
        text, _ = await show_chat(served, ChatRequest(**chat))
        encode = partial(served.encode, text, param="messages", special=False)
    ids = await server.aside(request, encode)
    return JsonReply(Tokens(tokens=ids, count=len(ids), max_model_len=served.context))


async def detokenize(server: ServerContext, request: Request) -> Response:
    """Turn token ids to text."""
    body = await server.read(request, DetokenizeRequest)
    served = server.find(body.model, "generate")
    check_tokens(served, "tokens", body.tokens)
    text = await server.aside(request, partial(served.tokenizer.decode, body.tokens))
    return JsonReply(Text(prompt=text))


async def live(_server: ServerContext, _request: Request) -> Response:
    """Say that the process answers."""
    return JsonReply(Health(status="ok"))


async def ready(server: ServerContext, _request: Request) -> Response:
    """Say whether new requests are taken."""
    if server.draining:
        return JsonReply(Health(status="draining"), 503)
    down = [model for model in server.models if not model.app.ready]
    if down:
        reason = next(filter(None, (model.app.failure for model in down)), None)
        return JsonReply(Health(status="restarting", reason=reason), 503)
    return JsonReply(Health(status="ok"))


async def show_version(server: ServerContext, _request: Request) -> Response:
    """Tell the version."""
    return JsonReply(Version(version=server.settings.version))


async def metrics(server: ServerContext, _request: Request) -> Response:
    """Show all figures for Prometheus."""
    return Response(server.metrics.render(), media_type=METRICS_TYPE)


async def record(server: ServerContext, request: Request) -> Response:
    """Record the next seconds of the first model that generates, as `serve --timeline` does."""
    seconds = _read_seconds(request.query_params.get("seconds"))
    model = recorded_model(server.models)
    trace = await asyncio.to_thread(_record, server, model, seconds)
    return Response(trace, media_type=JsonReply.media_type)


def _card(served: ServedModel | ServedWorkflow) -> ModelCard:
    shared: dict[str, Any] = {
        "id": served.id,
        "created": served.created,
        "max_model_len": served.context,
    }
    if isinstance(served, ServedModel):
        shared["parent"] = served.parent or msgspec.UNSET
        return ModelCard(owned_by="dovetail", capabilities=served.capabilities, **shared)
    return ModelCard(
        owned_by="workflow",
        capabilities=["workflow"],
        inputs=list(served.workflow.inputs),
        answers=sorted(map(str, served.speakers)),
        **shared,
    )


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


# ---- pages for browsers ----


FOLDER = resources.files("dovetail.runtime.server") / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMED = {"/": "index.html", "/docs": "docs.html"}
"""Pages with an address of their own; they refer to `ui/...`, so that a path may stand before."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def show_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers with a file and its headers; a browser that has it is told so."""
    body = (FOLDER / name).read_bytes()
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=TYPES[PurePosixPath(name).suffix])

    return show


def page_routes() -> list[Route]:
    """Return the routes of all pages and their files."""
    files = sorted(path.name for path in FOLDER.iterdir())
    shown = NAMED | {f"/ui/{name}": name for name in files if name not in NAMED.values()}
    return [Route(path, show_file(name)) for path, name in shown.items()]
