"""Records what the engine does, step by step, on a timeline.

In: the engine's spans, batches and ended requests. Out: tracks `engine` (steps and their parts),
`memory` (free KV blocks) and `requests` (their lives, joined to their steps by arrows).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from dovetail.runtime.schedule.kv_pool import KvPool
from dovetail.runtime.schedule.plan import Batch
from dovetail.runtime.schedule.request import Home, Request
from dovetail.runtime.timeline import Timeline

PROCESS = "dovetail"


class StepRecorder:
    """Writes to `timeline`. The engine's thread alone uses it."""

    def __init__(self, timeline: Timeline, pools: Mapping[Home, KvPool]) -> None:
        self._timeline, self._pools = timeline, pools
        self._engine = timeline.track(PROCESS, "engine")
        self._memory = timeline.track(PROCESS, "memory")
        self._requests = timeline.track(PROCESS, "requests")
        self._flows: dict[int, int] = {}

    def measure(self, name: str, **args: int) -> AbstractContextManager[None]:
        """Add the body as a span of the engine."""
        return self._timeline.measure(self._engine, name, **args)

    def beside(
        self, track: str, name: str, times: tuple[float, float] | None = None
    ) -> AbstractContextManager[None]:
        """Add the body, or what had these times, as a span of another part than the engine."""
        where = self._timeline.track(PROCESS, track)
        if times is None:
            return self._timeline.measure(where, name)
        self._timeline.span(where, name, *times)
        return nullcontext()

    def join(self, request: int, flow: int) -> None:
        """Have the arrow `flow`, which others draw too, lead through the steps of a request."""
        self._flows[request] = flow

    def follow(self, batch: Batch, outputs: Iterable[Request]) -> None:
        """Lead arrows through the span under way: prompts on their way, and first tokens."""
        now = self._timeline.clock()
        numbers = {chunk.request for chunk in batch.prefill}
        numbers |= {request.id for request in outputs if request.generated == 1}
        for number in sorted(numbers):
            self._timeline.arrow(self._flows.get(number, number), self._engine, now)
        free = {home.value: p.free_blocks for home, p in self._pools.items() if p.n_blocks}
        self._timeline.count(self._memory, "free KV blocks", now, **free)

    def end(self, requests: Iterable[Request]) -> None:
        """Add the lives of requests up to now."""
        now = self._timeline.clock()
        for request in requests:
            self._flows.pop(request.id, None)
            self._timeline.life(
                self._requests,
                f"request {request.id}",
                request.id,
                request.metrics.arrival,
                now,
                prompt=request.prompt_length,
                generated=request.generated,
                preemptions=request.metrics.preemptions,
                ended=request.finish_reason or "recording",
            )
