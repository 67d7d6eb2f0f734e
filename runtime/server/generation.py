"""From a request's fields to jobs of an engine, and from their pieces to replies and streams.

In: decoded requests. Out: token ids, sampling options, jobs that end when nobody reads them, usage.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.hosting.generator import Job, merge
from dovetail.runtime.schedule.request import Chunk, Completion
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import DONE, JsonReply, event, while_connected
from dovetail.runtime.server.errors import ApiError, too_long
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import ChatChunk, TextReply, Usage
from dovetail.runtime.server.schema import GenerationRequest, StreamOptions

Prompt = list[int]
StreamForm = tuple[type[ChatChunk | TextReply], Callable[[int, Chunk], Iterable[Any]]]
"""The struct of a stream's chunks, and what makes choices of a piece, one to a chunk."""

TOKEN_LISTS = ("logit_bias", "stop_token_ids", "allowed_token_ids")
"""Fields that name tokens of the model."""
PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens", *TOKEN_LISTS),
)
"""Fields that are options of the engine by the same name."""
_SERVER, _NUMBERS = secrets.token_hex(8), count()


@dataclass(frozen=True)
class Asked:
    """A request that has been read: what to generate, and how to head its replies.

    stream_options: what a stream holds of its usage.
    """

    model: ServedModel
    prompts: Sequence[Prompt]
    options: Mapping[str, Any]
    n: int
    priority: int
    id: str
    stream_options: StreamOptions
    arrival: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def head(self) -> dict[str, Any]:
        """The fields that every reply and chunk shares."""
        return make_head(self.model, self.id, self.model.id, self.created)

    @asynccontextmanager
    async def start(
        self, server: ServerContext, *, chunks: bool = True
    ) -> AsyncIterator[list[Job]]:
        """Yield the jobs, `n` for each prompt; those that have not ended are cancelled after."""
        submitting = time.perf_counter()
        jobs = self.model.app.submit_all(
            self.prompts, chunks=chunks, priority=self.priority, n=self.n, **self.options
        )
        submitted = time.perf_counter()
        try:
            yield jobs
        finally:
            await self.model.app.generator.aabandon(jobs)
            timeline = server.timeline  # it may end on another thread
            for job in jobs:
                server.metrics.finish(self.model, self.id, self.arrival, job)
                if timeline is not None:
                    timeline.join(self.model, self.id, job, submitting, submitted)

    async def respond(
        self,
        server: ServerContext,
        request: Request,
        make: Callable[[Sequence[Completion], Usage], object],
        stream: StreamForm | None,
    ) -> Response:
        """Return a stream of the given form, or else the whole reply that `make` makes of all."""
        if stream is not None:
            return server.stream(self._events(server, *stream))
        async with while_connected(request.receive), self.start(server, chunks=False) as jobs:
            found, usage = [await job for job in jobs], self.usage_of(jobs)
        times = [one.metrics for one in found]
        took = max(((one.last_token or one.arrival) - one.arrival for one in times), default=0.0)
        reply = await server.aside(request, partial(make, found, usage))
        return JsonReply(reply, headers={"openai-processing-ms": f"{took * 1e3:.3f}"})

    async def _events(
        self,
        server: ServerContext,
        kind: type[ChatChunk | TextReply],
        choices: Callable[[int, Chunk], Iterable[Any]],
    ) -> AsyncGenerator[bytes]:
        head = {**self.head, "usage": None} if self.stream_options.include_usage else self.head
        read, written = sum(map(len, self.prompts)), 0
        async with self.start(server) as jobs:
            async for place, piece in self.watch(server, jobs):
                written += len(piece.token_ids)
                if self.stream_options.include_usage and self.stream_options.continuous_usage_stats:
                    head["usage"] = Usage.of(read, written)
                for choice in choices(place, piece):
                    yield event(kind(**head, choices=[choice]))
            if self.stream_options.include_usage:
                yield event(kind(**self.head, choices=[], usage=self.usage_of(jobs)))
        yield DONE

    async def watch(
        self, server: ServerContext, jobs: Sequence[Job]
    ) -> AsyncGenerator[tuple[int, Chunk]]:
        """Yield the pieces of jobs as they come, and count them."""
        async for place, piece in merge(jobs):
            server.metrics.piece(self.model, self.id, place, len(piece.token_ids))
            yield place, piece

    def usage_of(self, jobs: Sequence[Job]) -> Usage:
        """Return the count of tokens of jobs that have ended; each prompt counts once."""
        requests = [job.request for job in jobs]
        read = sum(map(len, self.prompts))
        generated = sum(request.generated for request in requests)
        cached = sum(request.metrics.cached_tokens for request in requests[:: self.n])
        return Usage.of(read, generated, cached)


def make_head(model: ServedModel, id: str, name: str, created: int) -> dict[str, Any]:
    """Return the fields that every reply and chunk of a request shares."""
    return {"id": id, "created": created, "model": name, "system_fingerprint": model.fingerprint}


def new_id(prefix: str) -> str:
    """Return an id that no other reply has."""
    return f"{prefix}-{_SERVER}{next(_NUMBERS):08x}"


def check_scores(body: GenerationRequest, scores: Mapping[str, int | None]) -> None:
    """Raise ApiError where a stream is to have log probabilities of the prompt.

    scores: those that are asked for, by the field that asks.
    """
    for name, wanted in scores.items():
        if wanted is not None and body.stream:
            message = f"`{name}` of the prompt does not come with a stream; leave out `stream`"
            raise ApiError(400, message, param=name)


def read_request(
    body: GenerationRequest,
    model: ServedModel,
    prompts: Sequence[Prompt],
    kind: str,
    *,
    max_tokens: int,
    **own: Any,
) -> Asked:
    """Return what a body asks for: its options, where it names any, over the model's own.

    kind: before its id. own: options beside those of all bodies. Raises ApiError where one names a
    token that the model has not.
    """
    asked = {name: getattr(body, name) for name in PASSED} | own
    named = {name: value for name, value in asked.items() if value is not None}
    for name in TOKEN_LISTS:
        check_tokens(model, name, named.get(name, ()))
    if (body.min_tokens or 0) > max_tokens:
        message = f"`min_tokens` must be at most {max_tokens}, the tokens that the answer may have"
        raise ApiError(400, message, param="min_tokens")
    return Asked(
        model=model,
        prompts=prompts,
        options={
            **model.sampling,
            **named,
            "max_tokens": max_tokens,
            "adapter": model.adapter,
        },
        n=body.n or 1,
        priority=body.priority or 0,
        id=new_id(kind),
        stream_options=read_stream_options(body),
    )


def check_tokens(model: ServedModel, name: str, tokens: Iterable[str | int]) -> None:
    """Raise ApiError where a field names a token that the model has not."""
    assert model.file is not None
    size = model.file.spec.vocab_size
    if wrong := [token for token in tokens if int(token) >= size]:
        message = f"`{name}` names the token {wrong[0]}, but the model has 0 to {size - 1}"
        raise ApiError(400, message, param=name)


def check_context(
    model: ServedModel, prompts: Sequence[Prompt], *, param: str, answer: bool = True
) -> None:
    """Raise ApiError where a prompt is empty, has no token left for an answer, or unknown ones."""
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", param=param)
        if len(prompt) + answer > model.context:
            said = (
                f"the prompt has {len(prompt)} tokens, and this model's context holds "
                f"{model.context}, one of them for the answer; shorten it"
            )
            raise too_long(said, param=param)
        check_tokens(model, param, (max(prompt),))


def read_stream_options(body: GenerationRequest) -> StreamOptions:
    """Return what a stream shall hold beside its pieces; ApiError where no stream is asked for."""
    if body.stream_options and not body.stream:
        raise ApiError(400, "`stream_options` needs `stream: true`", param="stream_options")
    return body.stream_options or StreamOptions()
