"""Requests of an engine as callers hold them: prompts and options in, jobs out.

In: prompts (text or token ids) and options with vLLM's names. Out: `Job`s that the engine's thread
tells of tokens: a Completion or an error, and Chunks, for threads and for asyncio. Knows no caller:
an app and the workflows it runs share one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from collections.abc import Generator as Waiting
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from dovetail.ir.errors import RequestError
from dovetail.runtime.hosting.inbox import waking
from dovetail.runtime.hosting.loop import EngineLoop
from dovetail.runtime.hosting.process import EngineProcess
from dovetail.runtime.hosting.wire import Ask
from dovetail.runtime.schedule.request import (
    Chunk,
    Completion,
    Listener,
    SamplingParams,
    check_priority,
)
from dovetail.runtime.text.chat_template import ChatTemplate, read_template
from dovetail.runtime.text.forms import Forms
from dovetail.runtime.text.tokenizer import TextStream, Tokenizer
from dovetail.runtime.text.tools import ChatStyle

Prompt: TypeAlias = str | Sequence[int]
_Progress = tuple[int, int, str | None]
"""Tokens, characters, and the reason of the end: one value, so that a reader sees what fits."""


class Job(Listener):
    """One request. What it has generated can be read once, by one reader, as chunks.

    A chunk has all that has come since the last one: a reader that is slow gets fewer of them.
    """

    def __init__(self, text: TextStream | None, *, chunks: bool) -> None:
        """`text` turns tokens into text; `chunks` False leaves only the result."""
        self._text, self._chunks = text, chunks
        self._seeks = text is not None and text.seeks
        self._outcome: Future[Completion] = Future()
        self._outcome.set_running_or_notify_cancel()  # who stops waiting does not cancel it
        self._shown: _Progress = (0, 0, None)  # as far as a reader may see
        self._read: _Progress = (0, 0, None)
        self._wake: Callable[[], object] | None = None
        self._wanted: Callable[[], bool] = lambda: True
        self._pushed = 0  # tokens that are text
        self._writing = threading.Lock()  # whoever needs text makes it, unless a stop text may come

    # ---- for the caller ----

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the completion; a cancelled one's reason is `abort`.

        Raises:
            RequestError: the request was poisoned (its logits are not finite), or the app closed.
            DeviceError: a step that it was part of could not be run.
            RankError: a process of the group died, and with it the request's KV.
            TimeoutError: it took longer than `timeout` seconds.
        """
        return self._outcome.result(timeout)

    @property
    def finished(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._outcome.done()

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they come; raises as `result`."""
        ready = threading.Event()
        self.watch(ready.set)
        ended = False
        while not ended:
            ready.wait()
            ready.clear()
            ended = self.finished  # before the last chunk is taken, not after
            if (chunk := self.take()) is not None:
                yield chunk
        self.result()

    def __await__(self) -> Waiting[object, None, Completion]:
        """Wait in an event loop; as `result`."""
        return asyncio.wrap_future(self._outcome).__await__()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come to an event loop; raises as `result`."""
        async for _, chunk in merge([self]):
            yield chunk

    def watch(self, wake: Callable[[], object], wanted: Callable[[], bool] = lambda: True) -> None:
        """Have `wake` called, on the engine's thread, now and whenever there is news.

        The end is news; what comes before is where there are chunks and they are `wanted` then.
        """
        self._wake, self._wanted = wake, wanted
        wake()

    def take(self) -> Chunk | None:
        """Return what has come since the last time, at once; None where there is nothing."""
        with self._writing:
            tokens, letters, reason = self._shown
            if tokens and reason is None and not self._seeks:
                letters = self._write(tokens)
        from_token, from_letter, _ = self._read
        if self._read == (tokens, letters, reason):
            return None
        self._read = tokens, letters, reason
        start = self.request.prompt_length
        return Chunk(
            text="" if self._text is None else self._text.text[from_letter:letters],
            token_ids=tuple(self.request.tokens[start + from_token : start + tokens]),
            finish_reason=reason,
            logprobs=tuple(self.request.logprobs[from_token:tokens]),
        )

    # ---- for the engine's thread ----

    def extend(self) -> bool:
        """See Listener. Only a stop text has to be looked for at each token."""
        request, text = self.request, self._text
        if not self._seeks or text is None or request.error is not None:
            return False
        while self._pushed < self._spoken and not text.stopped:
            self._write(self._pushed + 1)
        if text.stopped:  # one step may have brought more
            del request.tokens[request.prompt_length + self._pushed :]
            del request.logprobs[self._pushed :]
        if text.stopped and self.done:
            request.finish_reason = "stop"
        return text.stopped and not self.done

    @property
    def _spoken(self) -> int:
        """Tokens so far that are text: one that only ends the answer is not."""
        request = self.request
        ends = request.finish_reason == "stop" and not (self._text and self._text.keeps_stop)
        return max(0, request.generated - ends)

    def _write(self, tokens: int) -> int:
        """Make text of the first `tokens` tokens; return how many letters there are."""
        if self._text is None:
            return 0
        start = self.request.prompt_length
        if fresh := self.request.tokens[start + self._pushed : start + tokens]:
            self._text.push(*fresh)
            self._pushed += len(fresh)
        return len(self._text.text)

    def show(self) -> None:
        """Let a reader have what has come since the last time; the last piece comes with `end`."""
        if self._chunks:
            letters = len(self._text.text) if self._text is not None and self._seeks else 0
            self._shown = self.request.generated, letters, None
            if self._wanted():
                self._call()

    def end(self) -> None:
        """Give the completion, or the error, to those who wait."""
        request = self.request
        assert request.finish_reason is not None
        if request.error is not None:
            self.fail(request.error)
            return
        with self._writing:
            self._shown = request.generated, self._write_all(), request.finish_reason
        scored = request.params.prompt_logprobs is not None and request.index == 0
        self._outcome.set_result(
            Completion(
                text=None if self._text is None else self._text.text,
                token_ids=tuple(request.output),
                finish_reason=request.finish_reason,
                logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
                metrics=request.metrics,
                prompt_logprobs=(None, *request.prompt_logprobs) if scored else None,
            )
        )
        self._call()

    def fail(self, error: BaseException) -> None:
        """Raise `error` where somebody waits."""
        self._outcome.set_exception(error)
        self._call()

    def _write_all(self) -> int:
        """Make text of all tokens; return how many letters there are."""
        text = self._text
        if text is None:
            return 0
        if not self._seeks:
            self._write(self._spoken)
        if self.request.finish_reason != "abort" and not text.stopped:
            text.close()
        return len(text.text)

    def _call(self) -> None:
        if self._wake is not None:
            self._wake()


async def merge(jobs: Sequence[Job]) -> AsyncIterator[tuple[int, Chunk]]:
    """Yield (place of the job, chunk) of `jobs` as they come; raises as `Job.result`."""
    ready = asyncio.Event()
    wake = waking(ready.set)
    for job in jobs:
        job.watch(wake)
    left = dict(enumerate(jobs))
    while left:
        await ready.wait()
        ready.clear()
        for place, job in list(left.items()):
            ended = job.finished  # before its last chunk is taken, not after
            if (chunk := job.take()) is not None:
                yield place, chunk
            if ended:
                del left[place]
                job.result()


class Generator:
    """An engine, wherever it runs, and the tokenizer of its model. For any thread."""

    def __init__(
        self,
        host: EngineLoop | EngineProcess,
        tokenizer: Tokenizer | None,
        path: Path,
        context: int,
        folder: Path,
        adapters: Sequence[str] = (),
    ) -> None:
        """`path`: the artifact, for errors. `context`: tokens that a request may have.

        folder: where the model's chat template is. adapters: names that requests may ask for.
        """
        self.host, self.tokenizer, self.context = host, tokenizer, context
        self._folder = folder
        self.adapters = adapters
        self.forms = Forms()
        self._path = path

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None if it has none; ArtifactError if it is damaged."""
        return read_template(self._folder)

    @cached_property
    def style(self) -> ChatStyle:
        """How the model writes calls and reasoning, as its template tells."""
        return ChatStyle.of(self.template.text if self.template else "")

    # ---- reading what is asked for ----

    def read(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, object],
        priority: int = 0,
        *,
        single: bool = False,
        chunks: bool | None = None,
        flow: int | None = None,
    ) -> Ask:
        """Return prompts and options as the engine takes them; RequestError where one is wrong.

        single: there is one completion, whose chunks are wanted where nothing else is said.
        chunks: those of all are. flow: see Ask.
        """
        params = SamplingParams.make(options)
        params = self._read_form(self._read_words(params))
        params.check_adapter(self.adapters)
        if single and params.n != 1:
            raise RequestError(f"a stream or a job has one completion; n must be 1, not {params.n}")
        check_priority(priority)
        read = [self._encode(prompt) for prompt in prompts]
        chunks = single if chunks is None else chunks
        return Ask(read, params, priority, chunks=chunks, flow=flow)

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

    def _read_form(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the grammar of their form, which may have to be tried first."""
        form = params.structured_outputs
        if form is None:
            return params
        if self.tokenizer is None:
            raise RequestError(f"structured output is not available: {self._path} has no tokenizer")
        return replace(params, grammar=self.forms.write(form))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{self._path} has no tokenizer, so prompts must be lists of token ids"
                )
            return self.tokenizer.encode(prompt, most=self.context)
        if _is_listed(prompt):
            if set(map(type, prompt)) == {int}:
                return list(prompt)
            if all(hasattr(t, "__index__") and not isinstance(t, bool) for t in prompt):
                return [int(t) for t in prompt]
        raise RequestError("a prompt must be a text or a list of token ids")

    # ---- messages to the engine ----

    def accept(self, ask: Ask) -> list[Job]:
        """Have the requests of `ask` started, all or none; return at once.

        Raises RequestError or CapacityError, and then nothing was started; what only the engine
        can know by then makes the jobs fail.
        """
        count = len(ask.prompts) * ask.params.n
        jobs = [Job(self._text_stream(ask.params), chunks=ask.chunks) for _ in range(count)]
        try:
            self.host.begin(ask, jobs)
        except KeyboardInterrupt:  # Ctrl-C came before the caller has them to drop
            self.abandon(jobs)
            raise
        return jobs

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(
            self.tokenizer,
            params.stop,
            keeps_stop=params.include_stop_str_in_output,
            least=params.min_tokens,
            special=not params.skip_special_tokens,
        )

    def drop(self, jobs: Sequence[Job]) -> Future[None] | None:
        """Have the unfinished ones of `jobs` ended; None where there are none."""
        with suppress(RequestError):  # closed: they have ended
            if left := [job for job in jobs if not job.finished]:
                return self.host.drop(left)
        return None

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End the unfinished ones of `jobs`; their blocks are free when it returns."""
        future = self.drop(jobs)
        if future is not None:
            future.result()

    def close(self) -> None:
        """Fail what is under way and end threads and processes."""
        self.host.close()
        self.forms.close()
        if template := self.__dict__.get("template"):
            template.close()

    async def aabandon(self, jobs: Sequence[Job]) -> None:
        """As `abandon`, in an event loop."""
        future = self.drop(jobs)
        if future is not None:  # who stops waiting does not cancel it
            await asyncio.shield(asyncio.wrap_future(future))


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
    if _is_listed(prompts):
        listed = list(prompts)
        if listed and all(map(_is_number, listed)):
            return [listed]  # type: ignore[list-item]
        if all(hasattr(item, "__len__") for item in listed):
            return listed  # type: ignore[return-value]
    raise RequestError("prompts must be texts or lists of token ids")


def _is_number(value: object) -> bool:
    """Tell whether `value` is a whole number; an array of some is none."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def _is_listed(value: object) -> bool:
    """Tell whether `value` is a list, tuple or array: ordered, and no text or bytes."""
    return isinstance(value, list) or (
        hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping | Set)
    )
