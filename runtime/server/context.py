"""What all endpoints of one server share: its models, settings, metrics and state.

In: requests. Out: their decoded bodies, and responses that stream while the client stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from dovetail.runtime.server.edge import (
    EventStream,
    StrangeFields,
    body_length,
    last_event,
    read_json,
)
from dovetail.runtime.server.errors import ApiError, to_api_error
from dovetail.runtime.server.metrics import ServerMetrics
from dovetail.runtime.server.models import Models, ServedModel, Skill
from dovetail.runtime.server.served_workflow import ServedWorkflow
from dovetail.runtime.server.settings import ServeSettings
from dovetail.runtime.server.timeline import ServerTimeline
from dovetail.runtime.server.traffic import Traffic

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
    strange: StrangeFields = field(default_factory=StrangeFields)
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
            strange=self.strange,
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
