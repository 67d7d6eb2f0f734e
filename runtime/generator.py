"""Requests on their way to the engine's thread: prompts and options in, jobs out.

In: prompts (text or token ids) and options with vLLM's names. Out: `Job`s that the engine's thread
tells of tokens. Knows no caller: an app and the workflows it runs share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from dovetail.ir.errors import DovetailError, RequestError
from dovetail.runtime.engine import Engine
from dovetail.runtime.job import Job
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.queues import check_priority
from dovetail.runtime.request import Request, SamplingParams
from dovetail.runtime.tokenizer import TextStream, Tokenizer

Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """A call that has been read: prompts as token ids, and their options."""

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    chunks: bool = False
    flow: int | None = None  # the arrow on a timeline that its requests are part of


class Generator:
    """An engine, the thread that steps it, and the tokenizer of its model. For any thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, path: Path) -> None:
        """`path`: the artifact, for errors."""
        self.engine, self.tokenizer, self._path = engine, tokenizer, path
        self.loop = EngineLoop(engine)

    # ---- reading what is asked for ----

    def read(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, object],
        priority: int = 0,
        *,
        single: bool = False,
        chunks: bool = False,
        flow: int | None = None,
    ) -> Ask:
        """Return prompts and options as the engine takes them; RequestError where one is wrong.

        single: there is one completion, whose chunks are wanted. chunks: those of all are. flow:
        see Ask.
        """
        params = SamplingParams.make(options)
        params = self._read_words(params)
        if single and params.n != 1:
            raise RequestError(f"a stream has one completion: n must be 1, not {params.n}")
        check_priority(priority)
        read = [self._encode(prompt) for prompt in prompts]
        return Ask(read, params, priority, chunks=single or chunks, flow=flow)

    def _read_words(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the ids of their bad words; RequestError without a tokenizer."""
        if not (params.stop or params.bad_words):
            return params
        if self.tokenizer is None:
            raise RequestError(
                f"{self._path} has no tokenizer, so `stop` and `bad_words` cannot be used"
            )
        ids = [found for word in params.bad_words for found in _spellings(self.tokenizer, word)]
        return replace(params, bad_word_ids=tuple(ids))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{self._path} has no tokenizer, so prompts must be lists of token ids"
                )
            return self.tokenizer.encode(prompt)
        if not _is_listed(prompt) or any(
            isinstance(t, bool) or not hasattr(t, "__index__") for t in prompt
        ):
            raise RequestError("a prompt must be a text or a list of token ids")
        return [int(t) for t in prompt]

    # ---- messages to the engine's thread ----

    def accept(self, ask: Ask) -> list[Job]:
        """Have the requests of `ask` started, all or none; return at once.

        What the engine's thread changes meanwhile matters for `max_waiting` alone: then the jobs
        fail. Raises RequestError or CapacityError, and then nothing was started.
        """
        for prompt in ask.prompts:
            self.engine.scheduler.check(prompt, ask.params)
        count = len(ask.prompts) * ask.params.n
        jobs = [Job(self._text_stream(ask.params), chunks=ask.chunks) for _ in range(count)]
        arrival = self.engine.device.now()  # a step may be under way
        try:
            self.loop.call(lambda: self._start(ask, arrival, jobs))
        except KeyboardInterrupt:  # Ctrl-C came before the caller has them to drop
            self.abandon(jobs)
            raise
        return jobs

    def _start(self, ask: Ask, arrival: float, jobs: Sequence[Job]) -> None:
        """Queue the requests of `ask`. On the engine's thread."""
        requests: list[Request] = []
        try:
            for prompt in ask.prompts:
                requests += self.engine.submit(prompt, ask.params, ask.priority)
        except DovetailError as error:
            for request in requests:  # all or none: those before it in the call
                self.engine.finish(request, "abort")
            for job in jobs:
                job.fail(error)
            return
        for job, request in zip(jobs, requests, strict=True):
            request.metrics.arrival = arrival
            job.begin(request)
            if ask.flow is not None and self.engine.recorder is not None:
                self.engine.recorder.join(request.id, ask.flow)
        self.loop.watch(jobs)

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(
            self.tokenizer,
            params.stop,
            keeps_stop=params.include_stop_str_in_output,
            least=params.min_tokens,
        )

    def drop(self, jobs: Sequence[Job]) -> Future[None] | None:
        """Have the unfinished ones of `jobs` ended; None where there are none."""
        left = [job for job in jobs if not job.finished]
        if not left:
            return None
        with suppress(RequestError):  # closed: they have ended
            return self.loop.call(lambda: self.loop.drop(left))
        return None

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End the unfinished ones of `jobs`; their blocks are free when it returns."""
        future = self.drop(jobs)
        if future is not None:
            future.result()

    async def aabandon(self, jobs: Sequence[Job]) -> None:
        """As `abandon`, in an event loop."""
        future = self.drop(jobs)
        if future is not None:
            await asyncio.wrap_future(future)


def _spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Return the ids of a word at the start of a text, and after a space where it has others.

    Those after a space count where they begin otherwise and are as many, as vLLM has it.
    """
    first, inside = (
        tuple(tokenizer.encode(space + word.lstrip(), special=False)) for space in ("", " ")
    )
    differs = len(inside) == len(first) > 0 and inside[0] != first[0]
    return [ids for ids in ((first, inside) if differs else (first,)) if ids]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list of them; RequestError where they are neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_listed(prompts):
        raise RequestError("prompts must be texts or lists of token ids")
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") for item in listed):
        return [listed]  # type: ignore[list-item]
    if not all(isinstance(item, str | Sequence) or hasattr(item, "__len__") for item in listed):
        raise RequestError("prompts must be texts or lists of token ids")
    return listed  # type: ignore[return-value]


def _is_listed(value: object) -> bool:
    """Tell whether `value` is a list, tuple or array: ordered, and no text or bytes."""
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping | Set)
