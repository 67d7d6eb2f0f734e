"""Watches whether batches still take what their line says, and fits the line anew when not.

In: every batch that has run, and its seconds. Out: depths for the line as it is now, which a
service is given on a thread of its own: neither batches nor callers wait for the fit.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dovetail.runtime.embed.depths import ClassDepth, Depths
from dovetail.runtime.embed.device_queue import QueryBatch
from dovetail.runtime.embed.devices import EmbeddingPlan
from dovetail.runtime.embed.line import Line, Point, fit_line
from dovetail.runtime.embed.service import EmbeddingService

WINDOW = 32
"""Batches of a device that are looked at, the latest."""
LEAST_BATCHES = 12
LIMIT = 0.15
"""Relative departure of the median batch from its line at which the line is fitted anew."""
LEAST_POINTS, LEAST_RANGE = 8, 2.0
"""Batches of one length class, and the range of their sizes, that make a line by themselves."""
SLOPE_CHANGE = 2.0
"""Most that a slope fitted to batches as they came may differ from the median departure."""

log = logging.getLogger("dovetail")


class SeenBatch(NamedTuple):
    """A batch that has run: queries of each class, its seconds, and those it was expected to."""

    counts: tuple[int, ...]
    seconds: float
    expected: float


class DriftWatch:
    """The latest batches of each device and model."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], deque[SeenBatch]] = {}

    def observe(self, batch: QueryBatch, seconds: float) -> bool:
        """Note a batch; return whether the median one takes other than its model's line says."""
        window = self._seen.setdefault((batch.device, batch.model), deque(maxlen=WINDOW))
        window.append(SeenBatch(batch.counts, seconds, batch.expected - batch.started))
        return len(window) >= LEAST_BATCHES and abs(_ratio(window) - 1) > LIMIT

    def refit(self, device: str, depths: Depths, model: str = "") -> Depths:
        """Return depths with the model's lines there as observed; what was observed is forgotten.

        A class whose batches are many and of several sizes gets a line of its own; the others are
        scaled by the median departure. Tested depths follow in proportion. No depth falls to 0: as
        nothing would be embedded there, nobody would see that the device is fast again.
        """
        window = self._seen.pop((device, model))

        def follow(index: int, old: ClassDepth) -> ClassDepth:
            if old.model != model:
                return old
            line, tested = _line(window, index, old.line), None
            predicted = max(min(1, old.predicted), line.depth(depths.slo, depths.arrival))
            if old.tested is not None and old.predicted:
                tested = max(min(1, old.tested), old.tested * predicted // old.predicted)
            fitted = replace(old.fitted, line=line)
            return replace(old, fitted=fitted, predicted=predicted, tested=tested)

        classes = tuple(follow(*each) for each in enumerate(depths.devices[device]))
        return replace(depths, devices={**depths.devices, device: classes})


def _ratio(window: Sequence[SeenBatch]) -> float:
    return statistics.median(each.seconds / max(each.expected, 1e-9) for each in window)


def _line(window: Sequence[SeenBatch], index: int, old: Line) -> Line:
    points = [
        Point(each.counts[index], each.seconds)
        for each in window
        if each.counts[index] and each.counts[index] == sum(each.counts)
    ]
    sizes = [point.concurrency for point in points]
    scaled = old.scaled(_ratio(window))
    if len(points) < LEAST_POINTS or max(sizes) < LEAST_RANGE * min(sizes):
        return scaled
    line = fit_line(points).line
    # A slope from noise alone, near zero say, would open the queue without end
    sound = scaled.alpha / SLOPE_CHANGE <= line.alpha <= scaled.alpha * SLOPE_CHANGE
    return line if sound else scaled


class DriftKeeper:
    """Gives a service new queues when batches take other than their lines say; an `Observer`."""

    def __init__(self) -> None:
        self._lock, self._watch, self._busy = threading.Lock(), DriftWatch(), False
        self._kept: tuple[EmbeddingService, EmbeddingPlan] | None = None
        self.depths: Depths | None = None  # as they are now

    def keep(self, service: EmbeddingService, plan: EmbeddingPlan, depths: Depths) -> None:
        """Begin: from here on batches are compared with the lines of `depths`."""
        with self._lock:
            self._watch, self._kept, self.depths = DriftWatch(), (service, plan), depths

    def __call__(self, batch: QueryBatch, seconds: float) -> None:
        """Note a batch; start a fit when its device has drifted and none runs."""
        with self._lock:
            if self._kept is None or not self._watch.observe(batch, seconds) or self._busy:
                return
            self._busy = True
        args = batch.device, batch.model
        try:
            threading.Thread(target=self._refit, args=args, daemon=True).start()
        except RuntimeError as error:  # a later batch tries again
            log.warning("cannot measure %s again (%s); old queues stay", batch.device, error)
            self._busy = False

    def _refit(self, device: str, model: str) -> None:
        try:
            with self._lock:
                assert self._kept is not None and self.depths is not None
                service, plan = self._kept
                depths = self._watch.refit(device, self.depths, model)
            (spec,) = (s for s in depths.queue_specs(plan) if s.name == device)
            service.set_queue(spec)
            self.depths = depths
            where = f"{device} {model}".rstrip()
            log.warning("embedding on %s changed speed; its queue holds %s", where, spec.depths)
        except Exception:  # batches go on by the old line
            log.exception("cannot measure %s again; old queues stay", device)
        finally:
            with self._lock:
                self._busy = False
