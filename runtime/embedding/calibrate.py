"""Sizes the queues of a running service, and keeps them sized: profile, stress test, drift.

In: an idle service, queries of given lengths. Out: lines and depths, the manager that has them, and
rows for the model's profile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dovetail.ir.profile import LatencyRow
from dovetail.runtime.embedding.depths import ClassDepth, Depths, decide_depths, make_manager
from dovetail.runtime.embedding.detector import EmbeddingPlan
from dovetail.runtime.embedding.drift import DriftWatch
from dovetail.runtime.embedding.instance import Ids
from dovetail.runtime.embedding.line import Arrival, FittedLine, Line, Point
from dovetail.runtime.embedding.profiling import Stress, profile_lines, stress_depths
from dovetail.runtime.embedding.query import Batch
from dovetail.runtime.embedding.queues import QueueManager
from dovetail.runtime.embedding.service import EmbeddingService

Sample = Callable[[int, int], Sequence[Ids]]
"""(queries, tokens of each) -> that many queries of this length."""

log = logging.getLogger("dovetail")


def fixed_manager(
    plan: EmbeddingPlan, length: int, counts: Mapping[str, int], model: str = ""
) -> QueueManager:
    """Return queues of exactly these depths, for queries to one model that all come together."""
    line = Line(0.0, 0.0)
    devices = {
        device.name: (ClassDepth(length, line, counts.get(device.name, 0), model=model),)
        for device in plan.devices
    }
    return make_manager(plan, Depths(1.0, "closed", devices, heterogeneous=True))


class Calibrator:
    """Measures the devices of an idle service by giving it queues of the sizes to be measured."""

    def __init__(
        self, service: EmbeddingService, plan: EmbeddingPlan, sample: Sample, model: str = ""
    ) -> None:
        """Take what is measured: `model` of the service, by queries of `sample`."""
        self._service, self._plan = service, plan
        self._sample, self._model = sample, model

    def run(self, counts: Mapping[str, int], length: int) -> dict[str, float]:
        """Return the seconds of each device's slowest query when these come all at once."""
        self._service.use(fixed_manager(self._plan, length, counts, self._model))
        queries = self._sample(sum(counts.values()), length)
        job = self._service.submit(queries, model=self._model)
        job.result()
        taken = dict.fromkeys(counts, 0.0)
        for query, seconds in zip(job.queries, job.seconds, strict=True):
            taken[query.device] = max(taken[query.device], float(seconds))
        return taken

    def profile(self, classes: Sequence[int], slo: float) -> dict[str, dict[int, FittedLine]]:
        """Return the line of each device, for queries of the greatest length of a class."""
        names = [device.name for device in self._plan.devices]
        found: dict[str, dict[int, FittedLine]] = {name: {} for name in names}
        for length in classes:
            lines = profile_lines(partial(self.run, length=length), names, slo)
            for name, line in lines.items():
                found[name][length] = line
        return found

    def stress(self, depths: Depths, length: int, *, repeats: int = 1) -> Stress:
        """Return the depths at which all devices together meet the SLO for one length class.

        Queries come together, so this refines depths of closed arrivals.
        """
        found = {
            name: each
            for name, classes in depths.devices.items()
            for each in classes
            if each.length == length
        }
        return stress_depths(
            {name: each.depth for name, each in found.items()},
            {name: each.line for name, each in found.items()},
            depths.slo,
            lambda counts: self.run(counts, length),
            repeats=repeats,
        )

    def size_queues(
        self,
        classes: Sequence[int],
        slo: float,
        arrival: Arrival = "open",
        *,
        stress: bool = True,
        lines: Mapping[str, Mapping[int, FittedLine]] | None = None,
    ) -> tuple[Depths, dict[str, dict[int, FittedLine]]]:
        """Profile, decide, refine, and give the service its queues; return depths and lines.

        Args:
            classes: the most tokens of each query-length class.
            slo: seconds that a query may take.
            arrival: closed depths are refined by a stress test; for open arrivals the tested part
                of the closed depth is taken of the predicted one.
            stress: whether to test.
            lines: those of the model's profile, instead of new ones.
        """
        fitted = {name: dict(each) for name, each in (lines or self.profile(classes, slo)).items()}
        depths = decide_depths(self._plan, fitted, slo, arrival, self._model)
        if stress:
            closed = decide_depths(self._plan, fitted, slo, "closed", self._model)
            for length in classes:
                tested = self.stress(closed, length).depths
                depths = depths.with_tested(length, _in_proportion(depths, closed, length, tested))
        self._service.use(make_manager(self._plan, depths))
        return depths, fitted


def _in_proportion(
    depths: Depths, closed: Depths, length: int, tested: Mapping[str, int]
) -> dict[str, int]:
    """Return tested depths for `depths`, from those tested with closed arrivals."""
    found = {}
    for name, classes in depths.devices.items():
        for each, together in zip(classes, closed.devices[name], strict=True):
            if each.length == length and together.predicted and each.predicted:
                share = each.predicted * tested[name] / together.predicted
                found[name] = max(1, int(share)) if tested[name] else 0
    return found


class DriftKeeper:
    """Gives a service new queues when batches take other than their lines say; an `Observer`.

    The fit runs on a thread of its own: neither batches nor callers wait for it.
    """

    def __init__(self) -> None:
        self._watch, self._lock = DriftWatch(), threading.Lock()
        self._kept: tuple[EmbeddingService, EmbeddingPlan] | None = None
        self._depths: Depths | None = None
        self._busy = False
        self.refits = 0

    @property
    def depths(self) -> Depths | None:
        """The depths as they are now."""
        return self._depths

    def keep(self, service: EmbeddingService, plan: EmbeddingPlan, depths: Depths) -> None:
        """Begin: from here on batches are compared with the lines of `depths`."""
        with self._lock:
            self._watch, self._kept, self._depths = DriftWatch(), (service, plan), depths

    def __call__(self, batch: Batch, seconds: float) -> None:
        """Note a batch; start a fit when its device has drifted and none runs."""
        with self._lock:
            if self._kept is None or not self._watch.observe(batch, seconds) or self._busy:
                return
            self._busy = True
        where = (batch.device, batch.model)
        threading.Thread(target=self._refit, args=where, daemon=True).start()

    def _refit(self, device: str, model: str) -> None:
        with self._lock:
            assert self._kept is not None and self._depths is not None
            service, plan = self._kept
            self._depths = self._watch.refit(device, self._depths, model)
            specs = {spec.name: spec for spec in self._depths.queue_specs(plan)}
        service.change(lambda manager: manager.set_queue(specs[device]))
        left = f"{device} {model}".rstrip()
        log.warning("%s: batches left their line; depths are now %s", left, specs[device].depths)
        with self._lock:
            self.refits, self._busy = self.refits + 1, False


# ---- the model's profile ----


def profile_rows(
    depths: Depths, lines: Mapping[str, Mapping[int, FittedLine]]
) -> tuple[LatencyRow, ...]:
    """Return what a profile keeps of the queues."""
    return tuple(
        LatencyRow(
            device=name,
            length=each.length,
            alpha=each.line.alpha,
            beta=each.line.beta,
            origin="measured",
            error=lines[name][each.length].error,
            points=tuple((p.concurrency, p.seconds) for p in lines[name][each.length].points),
            slo=depths.slo,
            arrival=depths.arrival,
            predicted=each.predicted,
            tested=each.tested,
        )
        for name, classes in depths.devices.items()
        for each in classes
    )


def lines_of(rows: Sequence[LatencyRow]) -> dict[str, dict[int, FittedLine]]:
    """Return the lines that a profile keeps, by device and length class."""
    lines: dict[str, dict[int, FittedLine]] = {}
    for row in rows:
        points = tuple(Point(concurrency, seconds) for concurrency, seconds in row.points)
        fitted = FittedLine(Line(row.alpha, row.beta), points, error=row.error)
        lines.setdefault(row.device, {})[row.length] = fitted
    return lines


def depths_of(
    plan: EmbeddingPlan, rows: Sequence[LatencyRow], slo: float, model: str = ""
) -> Depths:
    """Return the depths that a profile's rows give for `slo`; tested ones where that was it."""
    arrival = rows[0].arrival if rows else "open"
    depths = decide_depths(plan, lines_of(rows), slo, arrival, model)
    tested = {
        (row.device, row.length): row.tested
        for row in rows
        if row.slo == slo and row.tested is not None
    }
    for length in {row.length for row in rows}:
        found = {name: depth for (name, each), depth in tested.items() if each == length}
        depths = depths.with_tested(length, found)
    return depths
