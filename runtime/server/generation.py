"""From a request's fields to jobs of an engine, and from their pieces to replies and streams.

In: decoded requests. Out: token ids, sampling options, jobs that end when nobody reads them, usage.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from dovetail.runtime.job import Job, merge
from dovetail.runtime.request import Chunk, Completion
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.errors import FINAL, ApiError, too_long
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import CachedTokens, Usage
from dovetail.runtime.server.schema import NEUTRAL, GenerationRequest

Prompt = list[int]

TOKEN_LISTS = ("logit_bias", "stop_token_ids", "allowed_token_ids")
"""Fields that name tokens of the model."""
PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words"),
    *("include_stop_str_in_output", *TOKEN_LISTS),
)
"""Fields that are options of the engine by the same name."""
_SERVER, _NUMBERS = secrets.token_hex(8), count()


@dataclass(frozen=True)
class Asked:
    """A request that has been read: what to generate, and how to head its replies."""

    model: ServedModel
    prompts: Sequence[Prompt]
    options: Mapping[str, Any]
    n: int
    priority: int
    id: str
    arrival: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def head(self) -> dict[str, Any]:
        """The fields that every reply and chunk shares."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model.id,
            "system_fingerprint": self.model.fingerprint,
        }

    @asynccontextmanager
    async def start(self, server: ServerContext) -> AsyncIterator[list[Job]]:
        """Yield the jobs, `n` for each prompt; those that have not ended are cancelled after."""
        submitting = time.perf_counter()
        jobs = self.model.app.submit_all(
            self.prompts, priority=self.priority, n=self.n, **self.options
        )
        submitted = time.perf_counter()
        try:
            yield jobs
        finally:
            await self.model.app.generator.aabandon(jobs)
            for job in jobs:
                server.metrics.finish(self, job)
                if server.timeline is not None:
                    server.timeline.join(self, job, submitting, submitted)

    async def complete(self, server: ServerContext) -> tuple[list[Completion], Usage]:
        """Return all completions, and the count of their tokens."""
        async with self.start(server) as jobs:
            return [await job for job in jobs], self.usage_of(jobs)

    async def stream(
        self, server: ServerContext, jobs: Sequence[Job]
    ) -> AsyncIterator[tuple[int, Chunk]]:
        """Yield the pieces of all jobs as they come."""
        async for place, chunk in merge(jobs):
            server.metrics.piece(self, place, len(chunk.token_ids))
            yield place, chunk

    def usage_of(self, jobs: Sequence[Job]) -> Usage:
        """Return the count of tokens of jobs that have ended; each prompt counts once."""
        requests = [job.request for job in jobs]
        read = sum(map(len, self.prompts))
        generated = sum(request.generated for request in requests)
        cached = sum(request.metrics.cached_tokens for request in requests[:: self.n])
        return Usage(
            prompt_tokens=read,
            completion_tokens=generated,
            total_tokens=read + generated,
            prompt_tokens_details=CachedTokens(cached_tokens=cached),
        )


def processing_headers(found: Sequence[Completion]) -> dict[str, str]:
    """Return the header that tells the engine's own milliseconds, from arrival to last token."""
    ends = [one.metrics.last_token - one.metrics.arrival for one in found if one.metrics.last_token]
    return {"openai-processing-ms": f"{max(ends, default=0.0) * 1e3:.3f}"}


def new_id(prefix: str) -> str:
    """Return an id that no other reply has."""
    return f"{prefix}-{_SERVER}{next(_NUMBERS):08x}"


def refuse_unknown_wishes(body: GenerationRequest) -> None:
    """Raise ApiError where a field asks for what is not there, rather than ignore it."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            raise ApiError(
                400,
                f"`{name}` is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
                headers=FINAL,
            )


def refuse_streamed_scores(body: GenerationRequest, asked: int | None, *, param: str) -> None:
    """Raise ApiError where a stream should have `asked` log probabilities of its prompt."""
    if asked is not None and body.stream:
        message = f"`{param}` of the prompt does not come with a stream; leave out `stream`"
        raise ApiError(400, message, param=param, headers=FINAL)


def read_options(
    body: GenerationRequest,
    model: ServedModel,
    most: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> dict[str, Any]:
    """Return the engine's options: the request's, where it names any, over the model's own.

    Raises ApiError where one names a token that the model has not.
    """
    asked = {name: getattr(body, name) for name in PASSED}
    asked |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    named = {name: value for name, value in asked.items() if value is not None}
    for name in TOKEN_LISTS:
        _check_tokens(model, name, named.get(name, ()))
    if (body.min_tokens or 0) > most:
        message = f"`min_tokens` must be at most {most}, the tokens that the answer may have"
        raise ApiError(400, message, param="min_tokens")
    return {**model.sampling, **named, "max_tokens": most}


def _check_tokens(model: ServedModel, name: str, tokens: Iterable[str | int]) -> None:
    assert model.file is not None
    size = model.file.spec.vocab_size
    if wrong := [token for token in tokens if int(token) >= size]:
        message = f"`{name}` names the token {wrong[0]}, but the model has 0 to {size - 1}"
        raise ApiError(400, message, param=name, headers=FINAL)


def check_context(
    model: ServedModel, prompts: Sequence[Prompt], *, param: str, answer: bool = True
) -> None:
    """Raise ApiError where a prompt is empty or leaves no token for an answer, if there is one."""
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", param=param)
        if len(prompt) + answer > model.context:
            said = (
                f"the prompt has {len(prompt)} tokens, and this model's context holds "
                f"{model.context}, one of them for the answer; shorten it"
            )
            raise too_long(said, param=param)


def include_usage(body: GenerationRequest) -> bool:
    """Tell whether a stream ends with its usage; ApiError where the wish goes without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError(400, "`stream_options` needs `stream: true`", param="stream_options")
    return body.stream_options.include_usage
