"""A request under way as its caller holds it: result, chunks, and waiting for them.

In: tokens, as the engine's thread reports them. Out: a Completion or an error, and Chunks, for
threads (`result`, iteration) and for asyncio (`await`, `async for`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from dovetail.runtime.request import Chunk, Completion, Request, State
from dovetail.runtime.tokenizer import TextStream


class Job:
    """One request. What it has generated can be read once, by one reader, as chunks."""

    request: Request  # once the engine has it

    def __init__(self, text: TextStream | None, *, chunks: bool) -> None:
        """`text` turns tokens into text; `chunks` False leaves only the result."""
        self._text = text
        self._result: Future[Completion] = Future()
        self._result.set_running_or_notify_cancel()  # who stops waiting does not cancel it
        self._chunks: SimpleQueue[Chunk | None] | None = SimpleQueue() if chunks else None
        self._wake: Callable[[], object] | None = None
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
        assert self._chunks is not None, "made without chunks"
        while (chunk := self._chunks.get()) is not None:
            yield chunk
        self._result.result()

    def __await__(self) -> Generator[object, None, Completion]:
        """Wait in an event loop; as `result`."""
        return asyncio.wrap_future(self._result).__await__()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come to an event loop; raises as `result`."""
        assert self._chunks is not None, "made without chunks"
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            try:
                chunk = self._chunks.get_nowait()
            except Empty:
                await ready.wait()
                ready.clear()
                continue
            if chunk is None:
                break
            yield chunk
        self._result.result()

    # ---- for the engine's thread ----

    def begin(self, request: Request) -> None:
        """Take the request that was made for this job."""
        self.request = request

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.request.state is State.FINISHED

    def extend(self) -> bool:
        """Take the newest token in; return whether the request must end at a stop text now."""
        if self.request.error is not None:
            return False
        stop = self._extend_text()
        if not (stop or self.done):  # the last chunk comes with `end`
            self._pass_on(None)
        return stop

    def _extend_text(self) -> bool:
        request, text = self.request, self._text
        if text is None:
            return False
        text.push(request.tokens[-1])
        if text.stopped and self.done:
            request.finish_reason = "stop"
        elif self.done:
            text.close()
        return text.stopped and not self.done

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
        self._put(None)

    def fail(self, error: Exception) -> None:
        """Raise `error` where somebody waits."""
        self._result.set_exception(error)
        self._put(None)

    def _pass_on(self, reason: str | None) -> None:
        if self._chunks is None:
            return
        text = "" if self._text is None else self._text.text[self._shown :]
        fresh = tuple(self.request.tokens[self.request.prompt_length + self._read :])
        self._shown += len(text)
        self._read += len(fresh)
        self._put(Chunk(text, fresh, reason))

    def _put(self, chunk: Chunk | None) -> None:
        if self._chunks is None:
            return
        self._chunks.put(chunk)
        wake = self._wake
        if wake is not None:
            try:
                wake()
            except RuntimeError:  # its event loop has been closed: nobody reads any more
                self._wake = None
