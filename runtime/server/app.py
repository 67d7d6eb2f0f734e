"""The ASGI application: the table of endpoints, and the gate that every request goes through.

In: opened models and settings. Out: an application for uvicorn. The gate gives requests an id,
asks for the key, turns errors to replies and writes the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.runtime.server import replies, schema, small_endpoints
from dovetail.runtime.server.chat import chat
from dovetail.runtime.server.completions import completions
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import JsonReply
from dovetail.runtime.server.errors import BLOCK_PATH, ApiError, ClientGone
from dovetail.runtime.server.generation import new_id
from dovetail.runtime.server.items import BlockReply, InputTokens, ResponsesReply
from dovetail.runtime.server.messages import count_tokens, messages
from dovetail.runtime.server.openapi import Endpoint, make_document
from dovetail.runtime.server.responses import responses
from dovetail.runtime.server.small_endpoints import page_routes
from dovetail.runtime.server.vectors import embed, embeddings, info, rerank, rerank_texts
from dovetail.runtime.server.workflow_endpoint import run_workflow

Handler: TypeAlias = Callable[[ServerContext, Request], Awaitable[Response]]

OPEN = ("/health", "/health/live", "/health/ready", "/metrics", "/version")
"""Paths that need no key, and keep no server from being idle; pages are further ones."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
SHOWN = ("openai-processing-ms", "retry-after", "retry-after-ms", "x-request-id", "x-should-retry")
"""Headers that pages of other origins may read: clients there try again as these say."""
CLIENT_GONE = 499
"""The status that a log shows where the client did not wait."""

ENDPOINTS: tuple[tuple[Endpoint, Handler], ...] = (
    (Endpoint("/v1/chat/completions", schema.ChatRequest, replies.ChatReply), chat),
    (Endpoint("/v1/responses", schema.ResponsesRequest, ResponsesReply), responses),
    (Endpoint("/v1/messages", schema.MessagesRequest, BlockReply), messages),
    (Endpoint("/v1/messages/count_tokens", schema.CountRequest, InputTokens), count_tokens),
    (Endpoint("/v1/completions", schema.CompletionRequest, replies.TextReply), completions),
    (Endpoint("/v1/embeddings", schema.EmbeddingRequest, replies.EmbeddingReply), embeddings),
    (Endpoint("/v1/rerank", schema.RerankRequest, replies.RerankReply), rerank),
    (
        Endpoint(
            "/rerank", schema.RerankTextsRequest, replies.RerankReply | list[replies.RankedText]
        ),
        rerank_texts,
    ),
    (Endpoint("/embed", schema.EmbedRequest, list[list[float]]), embed),
    (Endpoint("/info", None, replies.EncoderInfo), info),
    (Endpoint("/v1/workflows/{name}/runs", schema.RunRequest, replies.RunReply), run_workflow),
    (Endpoint("/v1/models", None, replies.ModelList), small_endpoints.models),
    (Endpoint("/v1/models/{model:path}", None, replies.ModelCard), small_endpoints.model),
    (Endpoint("/tokenize", schema.TokenizeRequest, replies.Tokens), small_endpoints.tokenize),
    (Endpoint("/detokenize", schema.DetokenizeRequest, replies.Text), small_endpoints.detokenize),
    (Endpoint("/health", None, replies.Health), small_endpoints.ready),
    (Endpoint("/health/ready", None, replies.Health), small_endpoints.ready),
    (Endpoint("/health/live", None, replies.Health), small_endpoints.live),
    (Endpoint("/version", None, replies.Version), small_endpoints.show_version),
    (Endpoint("/metrics", None, None), small_endpoints.metrics),
    (
        Endpoint(
            "/timeline", None, replies.Trace, query=(("seconds", 0.1, small_endpoints.LONGEST),)
        ),
        small_endpoints.record,
    ),
)

log = logging.getLogger("dovetail.server")


def make_app(server: ServerContext) -> ASGIApp:
    """Return the application of `server`."""
    document = make_document([endpoint for endpoint, _ in ENDPOINTS], server.settings.version)

    async def show_document(_request: Request) -> Response:
        return JsonReply(document)

    routes = [
        Route(endpoint.path, EndpointApp(handler, server), methods=[endpoint.method])
        for endpoint, handler in ENDPOINTS
    ]
    routes.append(Route("/openapi.json", show_document))
    pages = page_routes()
    free = frozenset((*OPEN, *(page.path for page in pages)))
    app: ASGIApp = Gate(Router([*routes, *pages], redirect_slashes=False), server, free)
    origins = server.settings.cors_origins
    if origins:
        app = CORSMiddleware(
            app, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=SHOWN
        )
    return app


class EndpointApp:
    """An endpoint as an application, and no more: what goes wrong is the gate's to tell."""

    def __init__(self, handler: Handler, server: ServerContext) -> None:
        self._handler, self._server = handler, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        response = await self._handler(self._server, Request(scope, receive))
        await response(scope, receive, send)


@dataclass(slots=True)
class _Seen:
    """A request as its log line tells of it."""

    id: str
    started: float
    status: int = 0


class Gate:
    """Every request goes through here; what it raises ends as a reply or in the log."""

    def __init__(self, inner: ASGIApp, server: ServerContext, free: frozenset[str]) -> None:
        """`free`: paths that need no key."""
        self._inner, self._server, self._free = inner, server, free
        self._keys = [_digest(os.fsencode(key)) for key in server.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # so that the router raises what it does not find
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        id = given if REQUEST_ID.fullmatch(given) else new_id("req")
        seen = _Seen(id, time.perf_counter())
        traffic = None if scope["path"] in self._free else self._server.traffic
        number = traffic.begin() if traffic else 0
        try:
            await self._serve(request, seen, send)
        except ClientGone:
            seen.status = CLIENT_GONE
        finally:
            if traffic:
                traffic.end(number)
            self._note(request, seen)

    async def _serve(self, request: Request, seen: _Seen, send: Send) -> None:
        sending = partial(_send_with_id, send, seen)
        try:
            self._check_key(request)
            await self._inner(request.scope, request.receive, sending)
        except ClientGone:
            raise
        except (Exception, asyncio.CancelledError) as error:
            # its traceback holds this frame, and the frames that hold the body
            found = self._server.to_api_error(error).with_traceback(None)
            self._server.metrics.reject(request.scope["path"], found.code)
            if not seen.status:
                blocks = request.scope["path"].startswith(BLOCK_PATH)
                said = found.block_reply if blocks else found.reply
                reply = JsonReply(said, found.status, found.headers)
                await reply(request.scope, request.receive, sending)

    def _check_key(self, request: Request) -> None:
        if not self._keys or request.scope["path"] in self._free:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not given:  # as Anthropic's clients send it
            scheme, given = "bearer", request.headers.get("x-api-key", "")
        sent = _digest(given.encode("latin-1"))  # the bytes that came
        matches = [hmac.compare_digest(sent, key) for key in self._keys]  # equal time
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "no valid API key was given in `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _note(self, request: Request, seen: _Seen) -> None:
        route = getattr(request.scope.get("route"), "path", "")
        self._server.metrics.reply(route, seen.status)
        path = request.scope["raw_path"].decode("latin-1")  # as sent: no line breaks in the log
        if (timeline := self._server.timeline) is not None:  # it may end on another thread
            timeline.serve(path, seen.id, seen.started, seen.status)
        if self._server.settings.log_requests:
            took = (time.perf_counter() - seen.started) * 1e3
            line = (request.method, path, seen.status, took, seen.id)
            log.info("%s %s %d %.1f ms id=%s", *line)


def _digest(key: bytes) -> bytes:
    """Return what stands for a key, as long as that of any other."""
    return hashlib.sha256(key).digest()


async def _send_with_id(send: Send, seen: _Seen, message: Message) -> None:
    if message["type"] == "http.response.start":
        seen.status = message["status"]
        headers: list[Any] = [*message.get("headers", ()), (b"x-request-id", seen.id.encode())]
        message = {**message, "headers": headers}
    await send(message)
