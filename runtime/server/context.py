"""What all endpoints of one server share: its models, settings, metrics and state.

In: requests. Out: their decoded bodies, and responses that stream while the client stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Condition
from typing import TypeVar

from starlette.requests import Request

from dovetail.runtime.server.edge import (
    EventStream,
    UnknownFields,
    body_length,
    last_event,
    read_json,
)
from dovetail.runtime.server.errors import ApiError, to_api_error
from dovetail.runtime.server.metrics import ServerMetrics
from dovetail.runtime.server.models import Models, ServedModel, Skill
from dovetail.runtime.server.served_workflow import ServedWorkflow
from dovetail.runtime.server.timeline import ServerTimeline


class Traffic:
    """Requests under way, by number. For any thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._numbers = count()
        self._under_way: set[int] = set()
        self._busy: Callable[[], None] = lambda: None
        self._idle: Callable[[], None] = lambda: None

    def watch(self, busy: Callable[[], None], idle: Callable[[], None]) -> None:
        """Have `busy` called when the first request comes, `idle` when none is left."""
        with self._changed:
            self._busy, self._idle = busy, idle
            (busy if self._under_way else idle)()

    def begin(self) -> int:
        """Note that a request has come; return its number, for `end`."""
        with self._changed:
            number = next(self._numbers)
            self._under_way.add(number)
            if len(self._under_way) == 1:
                self._busy()
            return number

    def end(self, number: int) -> None:
        """Note that a request has ended, well or not."""
        with self._changed:
            self._under_way.remove(number)
            self._changed.notify_all()
            if not self._under_way:
                self._idle()

    def under_way(self) -> frozenset[int]:
        """Return the numbers of the requests that have not ended."""
        with self._changed:
            return frozenset(self._under_way)

    def wait_for(self, requests: Set[int]) -> None:
        """Return once all of these requests have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way.isdisjoint(requests))


T = TypeVar("T")
INLINE_BYTES = 1 << 14
"""Bodies up to this size are rendered and tokenised at once: it takes less than a step."""


@dataclass
class ServerContext:
    """One server. `draining` once it has been told to stop."""

    models: Models
    settings: ServeSettings
    workflows: Mapping[str, ServedWorkflow] = field(default_factory=dict)
    timeline: ServerTimeline | None = None
    draining: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    unknown: UnknownFields = field(default_factory=UnknownFields)
    metrics: ServerMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.models, self.settings.metrics_prefix)

    def find(self, name: str | None, skill: Skill | None = None) -> ServedModel:
        """Return the model of that id; ApiError where there is none, or it lacks the `skill`."""
        return self.models.find(name, skill, beside=self.workflows)

    async def read(self, request: Request, kind: type[T]) -> T:
        """Return the body of `request` as `kind`; ApiError where it is none."""
        settings = self.settings
        return await read_json(
            request,
            kind,
            most=settings.max_body_bytes,
            seconds=settings.body_seconds,
            unknown=self.unknown,
        )

    async def aside(self, request: Request, work: Callable[[], T]) -> T:
        """Return the result of `work` on a body: on another thread where that may be long."""
        length = body_length(request)
        if length is not None and length <= INLINE_BYTES:
            return work()
        return await asyncio.to_thread(work)

    def to_api_error(self, error: BaseException) -> ApiError:
        """Return what a client is told of `error`; see `errors.to_api_error`."""
        return to_api_error(error, draining=self.draining)

    def stream(
        self, events: AsyncGenerator[bytes], fail: Callable[[ApiError], bytes] = last_event
    ) -> EventStream:
        """Return the response that sends `events`; `fail` writes an error that ends them."""
        return EventStream(
            events, self.settings.ping_seconds, lambda error: fail(self.to_api_error(error))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a server listens and what it lets in.

    api_keys: a request must carry one of them; none lets everybody in. cors_origins: whose pages
    may read replies. max_body_bytes, body_seconds: of a request's body. head_seconds: a TLS
    handshake and a request's headers must come within this each. send_seconds: a client that takes
    nothing of its reply for so long has gone. ping_seconds: silence in a stream before a comment.
    drain_seconds: what runs may take this long to end when the server stops. metrics_prefix: of all
    names in `/metrics`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0
    head_seconds: float = 15.0
    send_seconds: float = 60.0
    ping_seconds: float = 15.0
    drain_seconds: int = 30
    metrics_prefix: str = "dovetail"
    version: str = "unknown"
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    timeline: Path | None = None
    log_requests: bool = True
