"""A request under way as its caller holds it: result, chunks, and waiting for them.

In: tokens, as the engine's thread reports them. Out: a Completion or an error, and Chunks, for
threads (`result`, iteration) and for asyncio (`await`, `async for`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future

from dovetail.runtime.hosting.inbox import waking
from dovetail.runtime.hosting.loop import Listener
from dovetail.runtime.schedule.request import Chunk, Completion
from dovetail.runtime.text.tokenizer import TextStream

_Progress = tuple[int, int, str | None]
"""Tokens, characters, and the reason of the end: one value, so that a reader sees what fits."""


class Job(Listener):
    """One request. What it has generated can be read once, by one reader, as chunks.

    A chunk has all that has come since the last one: a reader that is slow gets fewer of them.
    """

    def __init__(self, text: TextStream | None, *, chunks: bool) -> None:
        """`text` turns tokens into text; `chunks` False leaves only the result."""
        self._text, self._chunks = text, chunks
        self._outcome: Future[Completion] = Future()
        self._outcome.set_running_or_notify_cancel()  # who stops waiting does not cancel it
        self._shown: _Progress = (0, 0, None)  # as far as a reader may see
        self._read: _Progress = (0, 0, None)
        self._wake: Callable[[], object] | None = None
        self._pushed = 0  # tokens that are text

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

    def __await__(self) -> Generator[object, None, Completion]:
        """Wait in an event loop; as `result`."""
        return asyncio.wrap_future(self._outcome).__await__()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come to an event loop; raises as `result`."""
        async for _, chunk in merge([self]):
            yield chunk

    def watch(self, wake: Callable[[], object]) -> None:
        """Have `wake` called, on the engine's thread, now and whenever there is news."""
        assert self._chunks, "made without chunks"
        self._wake = wake
        wake()

    def take(self) -> Chunk | None:
        """Return what has come since the last time, at once; None where there is nothing."""
        (tokens, letters, reason), (from_token, from_letter, _) = self._shown, self._read
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
        """See Listener."""
        request, text = self.request, self._text
        if text is None or request.error is not None or not request.generated:
            return False
        ended = self.done and request.finish_reason == "stop" and not text.keeps_stop
        while self._pushed < request.generated - ended and not text.stopped:  # an end is no text
            text.push(request.tokens[request.prompt_length + self._pushed])
            self._pushed += 1
        if text.stopped:  # one step may have brought more
            del request.tokens[request.prompt_length + self._pushed :]
            del request.logprobs[self._pushed :]
        if text.stopped and self.done:
            request.finish_reason = "stop"
        elif self.done:
            text.close()
        return text.stopped and not self.done

    def show(self) -> None:
        """Let a reader have what has come since the last time; the last piece comes with `end`."""
        self._show(None)
        self._call()

    def end(self) -> None:
        """Give the completion, or the error, to those who wait."""
        request = self.request
        assert request.finish_reason is not None
        if request.error is not None:
            self.fail(request.error)
            return
        self._show(request.finish_reason)
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

    def fail(self, error: Exception) -> None:
        """Raise `error` where somebody waits."""
        self._outcome.set_exception(error)
        self._call()

    def _show(self, reason: str | None) -> None:
        letters = 0 if self._text is None else len(self._text.text)
        self._shown = self.request.generated, letters, reason

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
