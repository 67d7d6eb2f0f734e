"""A request under way as its caller holds it: result, chunks, and waiting for them.

In: tokens, as the engine's thread reports them. Out: a Completion or an error, and Chunks, for
threads (`result`, iteration) and for asyncio (`await`, `async for`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import reduce
from operator import add

from dovetail.runtime.mailbox import Mailbox
from dovetail.runtime.request import Chunk, Completion, Request, State
from dovetail.runtime.tokenizer import TextStream


class Job:
    """One request. What it has generated can be read once, by one reader, as chunks."""

    request: Request  # once it has begun

    def __init__(self, text: TextStream | None, *, chunks: bool) -> None:
        """`text` turns tokens into text; `chunks` False leaves only the result."""
        self._text, self.begun = text, False
        self._result: Future[Completion] = Future()
        self._result.set_running_or_notify_cancel()  # who stops waiting does not cancel it
        self._chunks: Mailbox[Chunk] | None = Mailbox() if chunks else None
        self._read, self._shown = 0, 0  # tokens and characters that lie in chunks already

    # ---- for the caller ----

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the completion; a cancelled one's reason is `abort`.

        Raises:
            RequestError: the request was poisoned (its logits are not finite), or the app closed.
            DeviceError: a step that it was part of could not be run.
            RankError: a process of the group died, and with it the request's KV.
            TimeoutError: it took longer than `timeout` seconds.
        """
        return self._result.result(timeout)

    @property
    def finished(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._result.done()

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they come; raises as `result`."""
        yield from self.chunks
        self._result.result()

    def __await__(self) -> Generator[object, None, Completion]:
        """Wait in an event loop; as `result`."""
        return asyncio.wrap_future(self._result).__await__()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come to an event loop; raises as `result`."""
        async for chunk in self.chunks:
            yield chunk
        self._result.result()

    @property
    def chunks(self) -> Mailbox[Chunk]:
        """The chunks alone; closed when the result is there, whatever it is."""
        assert self._chunks is not None, "made without chunks"
        return self._chunks

    # ---- for the engine's thread ----

    def begin(self, request: Request) -> None:
        """Take the request that was made for this job."""
        self.request, self.begun = request, True

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.request.state is State.FINISHED

    def extend(self) -> bool:
        """Take the newest token in; return whether the request must end at a stop text now."""
        request, text = self.request, self._text
        if text is None or request.error is not None:
            return False
        if self.done and request.finish_reason == "stop" and not text.keeps_stop:
            text.close()  # an end token is no text
            return False
        text.push(request.tokens[-1])
        if text.stopped and self.done:
            request.finish_reason = "stop"
        elif self.done:
            text.close()
        return text.stopped and not self.done

    def show(self) -> None:
        """Pass on what has come since the last time; the last piece comes with `end`."""
        self._pass_on(None)

    def end(self) -> None:
        """Give the completion, or the error, to those who wait."""
        request = self.request
        assert request.finish_reason is not None
        if request.error is not None:
            self.fail(request.error)
            return
        self._pass_on(request.finish_reason)
        self._result.set_result(
            Completion(
                text=None if self._text is None else self._text.text,
                token_ids=tuple(request.output),
                finish_reason=request.finish_reason,
                logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
                metrics=request.metrics,
            )
        )
        if self._chunks is not None:
            self._chunks.close()

    def fail(self, error: Exception) -> None:
        """Raise `error` where somebody waits."""
        self._result.set_exception(error)
        if self._chunks is not None:
            self._chunks.close()

    def _pass_on(self, reason: str | None) -> None:
        if self._chunks is None:
            return
        text = "" if self._text is None else self._text.text[self._shown :]
        fresh = tuple(self.request.tokens[self.request.prompt_length + self._read :])
        logprobs = tuple(self.request.logprobs[self._read :])
        self._shown += len(text)
        self._read += len(fresh)
        self._chunks.put(Chunk(text, fresh, reason, logprobs))


async def merge(jobs: Sequence[Job]) -> AsyncIterator[tuple[int, Chunk]]:
    """Yield (place of the job, chunk) of `jobs` as they come; raises as `Job.result`.

    What a job has gathered meanwhile comes as one chunk: a reader that is slow gets fewer of them.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    for job in jobs:
        job.chunks.watch(lambda: loop.call_soon_threadsafe(ready.set))
    left = dict(enumerate(jobs))
    while left:
        await ready.wait()
        ready.clear()
        for place, job in list(left.items()):
            ended = job.finished  # before its chunks are taken: then these are all
            chunks = job.chunks.take()
            if chunks:
                yield place, reduce(add, chunks)
            if ended:
                del left[place]
                job.result()
