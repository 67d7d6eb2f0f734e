"""Draws workflows on a timeline, beside what the engine draws of its steps.

In: nodes, batches and scans as they end, rewrites. Out: tracks `workflows` (nodes, and marks where
their graphs were rewritten), `encoder`, `retrieval worker` and `hot clusters`, and an arrow for
each workflow through all that was done for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from dovetail.ir.live_graph import Rewrite
from dovetail.runtime.engine.recorder import PROCESS
from dovetail.runtime.flows.control.messages import ScanClusters, Source
from dovetail.runtime.flows.events import NodeTime
from dovetail.runtime.timeline import Timeline

FIRST_FLOW = 1 << 32
"""Arrows of workflows have numbers from here on; those below are of requests to the engine."""


class FlowRecorder:
    """Writes to `timeline`; for several threads. Times given are on `clock` of the driver."""

    def __init__(self, timeline: Timeline, offset: float) -> None:
        """`offset`: what to add to the driver's clock to get the timeline's."""
        self._timeline, self._offset = timeline, offset
        self._lock = Lock()
        self._ends: dict[str, float] = {}

    def encoded(
        self, what: str, sources: Iterable[Source], start: float, end: float, texts: int
    ) -> None:
        """Add a batch of texts, or the documents of a rerank."""
        numbers = {source.request for source in sources}
        self._span("encoder", what, start, end, numbers, texts=texts)

    def scanned(self, order: ScanClusters, start: float, seconds: float) -> None:
        """Add a retrieval sub-stage."""
        clusters = sum(len(part.clusters) for part in order.parts)
        numbers = {source.request for source in order.sources}
        searches = {(source.request, source.node) for source in order.sources}
        args = {"searches": len(searches), "clusters": clusters}
        track = "hot clusters" if order.device == "gpu" else "retrieval worker"
        self._span(track, "scan", start, start + seconds, numbers, **args)

    def rewrote(self, rewrite: Rewrite, at: float) -> None:
        """Mark what a transformation has done to a graph."""
        with self._lock:
            track = self._timeline.track(PROCESS, "workflows")
            place = {"node": rewrite.node, "gain": rewrite.gain}
            self._timeline.mark(track, rewrite.transformation, self._offset + at, **place)

    def ran(self, request: int, workflow: str, node: NodeTime, began: float) -> None:
        """Add a node that has ended; its times are since the workflow `began`."""
        with self._lock:
            track = self._timeline.track(PROCESS, "workflows")
            start, end = (self._offset + began + t for t in (node.start, node.end))
            name = f"{workflow} {request}: {node.node}"
            number = FIRST_FLOW + request
            self._timeline.life(track, name, number, start, end, kind=node.kind, round=node.round)

    def _span(
        self, track: str, name: str, start: float, end: float, numbers: Iterable[int], **args: int
    ) -> None:
        """Add a span; those of one track follow each other, whatever clocks do."""
        with self._lock:
            place = self._timeline.track(PROCESS, track)
            first = max(start + self._offset, self._ends.get(track, 0.0))
            last = max(first, end + self._offset)
            self._ends[track] = last
            self._timeline.span(place, name, first, last, **args)
            for number in sorted(numbers):
                self._timeline.arrow(FIRST_FLOW + number, place, first, "workflow")
