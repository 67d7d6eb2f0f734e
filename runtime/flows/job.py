"""A workflow under way as its caller holds it: result, events, cancel.

In: events and the end, as the driver's thread reports them. Out: a WorkflowResult or an error, and
events, for threads (`result`, iteration) and for asyncio (`await`, `async for`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from dovetail.ir.live_graph import LiveGraph
from dovetail.ir.workflow import Name, Workflow
from dovetail.runtime.flows.events import Event, NodeFinished, NodeStarted, NodeTime, WorkflowResult
from dovetail.runtime.hosting.inbox import Inbox


class WorkflowJob:
    """One run of a workflow. Its events can be read once, by one reader."""

    number = 0  # of its request to the control plane, once it has begun
    writes = False  # whether one of its generations has begun, or it has none
    read = False  # whether somebody has begun to read its events

    def __init__(
        self, workflow: Workflow, cancel: Callable[[WorkflowJob], None], *, events: bool
    ) -> None:
        """`events` False leaves only the result."""
        self.workflow = workflow
        self.began = time.perf_counter()
        self._cancel = cancel
        self._result: Future[WorkflowResult] = Future()
        self._result.set_running_or_notify_cancel()  # who stops waiting does not cancel it
        self._events: Inbox[Event] | None = Inbox() if events else None
        self._starts: dict[tuple[Name, int], NodeStarted] = {}
        self._timeline: list[NodeTime] = []
        self._notes: dict[str, None] = {}  # each once, in order
        self.sent: dict[tuple[Name, int], str] = {}  # prompts with fewer documents than they had

    # ---- for the caller ----

    def result(self, timeout: float | None = None) -> WorkflowResult:
        """Wait for the end and return the result.

        Raises:
            WorkflowError: a node failed (it is named), or the job was cancelled.
            RequestError: the app was closed.
            TimeoutError: it took longer than `timeout` seconds.
        """
        return self._result.result(timeout)

    @property
    def finished(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._result.done()

    def cancel(self) -> None:
        """End the job soon, and all work for it; nothing happens to one that is over."""
        self._cancel(self)

    def __iter__(self) -> Iterator[Event]:
        """Yield events as they come; raises as `result` at the end."""
        yield from self._inbox()
        self._result.result()

    def __await__(self) -> Generator[object, None, WorkflowResult]:
        """Wait in an event loop; as `result`."""
        return asyncio.wrap_future(self._result).__await__()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events as they come to an event loop; raises as `result` at the end."""
        async for event in self._inbox():
            yield event
        self._result.result()

    def _inbox(self) -> Inbox[Event]:
        assert self._events is not None, "made without events"
        self.read = True
        return self._events

    # ---- for the driver's thread ----

    @property
    def readable(self) -> bool:
        """Whether it has events."""
        return self._events is not None

    @property
    def seconds(self) -> float:
        """Seconds since it was submitted."""
        return time.perf_counter() - self.began

    def start(self, event: NodeStarted) -> None:
        """Tell that a node began."""
        self._starts[event.node, event.round] = event
        self.tell(event)

    def finish(self, event: NodeFinished) -> NodeTime:
        """Tell that a node has ended; return when it ran."""
        start = self._starts.pop(key := (event.node, event.round))
        prompt = self.sent.get(key, start.prompt)
        ran = NodeTime(event.node, event.round, start.kind, start.at, event.at, prompt)
        self._timeline.append(ran)
        self.tell(event)
        return ran

    def note(self, text: str) -> None:
        """Have the result say what went otherwise than was asked."""
        self._notes[text] = None

    def tell(self, event: Event) -> None:
        """Pass an event on."""
        if self._events is not None:
            self._events.put(event)

    def end(self, state: Mapping[str, Any], graph: LiveGraph) -> None:
        """Give the result to those who wait."""
        timeline = tuple(self._timeline)
        notes = tuple(self._notes)
        self._result.set_result(WorkflowResult(state, timeline, self.seconds, graph, notes))
        self._close()

    def fail(self, error: BaseException) -> None:
        """Raise `error` where somebody waits."""
        self._result.set_exception(error)
        self._close()

    def _close(self) -> None:
        if self._events is not None:
            self._events.put(None)
