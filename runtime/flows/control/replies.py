"""Generations under way, and the sub-stages that they are cut into.

In: replies to write, reports of the engine. Out: orders to generate; each reply back when a
sub-stage or the whole of it is over.
"""

from __future__ import annotations

from functools import partial
from math import dist

from dovetail.ir.errors import DovetailError
from dovetail.ir.live_graph import LiveNode
from dovetail.ir.transform import split_reply
from dovetail.runtime.flows.control.front import Callbacks, Front, Waiter
from dovetail.runtime.flows.control.messages import Embed, Finished, Generate, Progressed
from dovetail.runtime.flows.control.work import Reply


class Replies:
    """Generations of all requests."""

    def __init__(self, front: Front, callbacks: Callbacks[Reply]) -> None:
        self._front, self._callbacks = front, callbacks

    def begin(self, reply: Reply) -> None:
        """Have the engine write a reply."""
        reply.began, provisional = self._front.now, reply.call is None
        order = reply.source, reply.spec, reply.prompt, reply.steps, provisional
        reply.job = self._front.post(
            lambda job: Generate(job, *order),
            Waiter(
                reply.source.request,
                partial(self._told, reply),
                partial(self._failed, reply),
            ),
        )
        reply.graph.begin(reply.node)

    def read(self, node: LiveNode) -> None:
        """Have what is written of a reply turned into a vector."""
        reply: Reply = node.work
        assert reply.ahead is not None, "nobody would search with it"
        source, text, index = reply.source, reply.text, reply.ahead.index

        def embedded(report: Finished) -> None:
            if reply.vector is not None:
                reply.drift = dist(reply.vector, report.value)
            reply.vector, reply.read = report.value, None
            reply.graph.remove(node)

        reply.graph.begin(node)
        reply.reads = self._front.post(
            lambda job: Embed(job, source, text, query=True, index=index, provisional=True),
            Waiter(source.request, embedded, lambda error: None),  # and no scout is sent
        )

    def drop(self, reply: Reply) -> None:
        """Forget a reply."""
        self._end(reply)
        self._front.cancel(reply.job)

    def drop_request(self, request: int) -> None:
        """Forget all replies to a request."""
        for reply in [r for r in self._front.replies if r.source.request == request]:
            self.drop(reply)

    def _end(self, reply: Reply) -> None:
        """Take that a reply is over, and that nobody will look at what was written on the way."""
        reply.over = True
        self._front.replies.pop(reply, None)
        self._front.cancel(reply.reads)
        if reply.read is not None:
            reply.graph.remove(reply.read)

    def _told(self, reply: Reply, report: Progressed | Finished) -> None:
        if isinstance(report, Progressed):
            if (steps := report.tokens - reply.tokens) > 0:
                reply.text, reply.tokens, reply.ended = report.text, report.tokens, reply.node
                reply.node = split_reply(reply.graph, reply.node, steps)
                self._callbacks.changed(reply)
            return
        self._end(reply)
        reply.graph.finish(reply.node)
        self._front.costs.replied(reply.spec.name, self._front.now - reply.began)
        reply.text = report.value
        self._callbacks.ended(reply)

    def _failed(self, reply: Reply, error: DovetailError) -> None:
        self._end(reply)
        self._callbacks.failed(reply, error)
