"""Queue depths of all devices from their latency lines, and the decision what the CPU may do.

In: a line per device and query-length class, or the rows of a profile; the SLO. Out: queues, what
was decided and why: a device whose single query misses the SLO gets depth 0 (WindVE Eq. 11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.ir.errors import SpecError
from dovetail.ir.profile import LatencyRow
from dovetail.runtime.embed.device_queue import QueryClass, QueueSpec
from dovetail.runtime.embed.devices import EmbeddingPlan
from dovetail.runtime.embed.line import Arrival, FittedLine, Line, Point, find_margin
from dovetail.runtime.embed.queue import QueueManager


@dataclass(frozen=True, slots=True)
class ClassDepth:
    """The depth of a device for queries of up to `length` tokens to `model`.

    predicted: by the line. tested: found by a stress test beside the other devices, if there was
    one, which then counts.
    """

    length: int
    fitted: FittedLine
    predicted: int
    tested: int | None = None
    model: str = ""

    @property
    def line(self) -> Line:
        """Return the device's line for such queries."""
        return self.fitted.line

    @property
    def depth(self) -> int:
        """Return the depth that is used."""
        return self.predicted if self.tested is None else self.tested


@dataclass(frozen=True, slots=True)
class Depths:
    """What the queues are sized by: classes of each device in the order of the plan, and notes."""

    slo: float
    arrival: Arrival
    devices: Mapping[str, tuple[ClassDepth, ...]]
    heterogeneous: bool
    notes: tuple[str, ...] = ()

    def queue_specs(self, plan: EmbeddingPlan) -> tuple[QueueSpec, ...]:
        """Return the queues of all devices of `plan`."""
        return tuple(
            QueueSpec(
                name=device.name,
                accelerator=device.accelerator,
                depths=tuple(each.depth for each in classes),
                lines=tuple(each.line for each in classes),
                instances=device.instances,
                margin=max((each.fitted.margin for each in classes), default=0.0),
            )
            for device in plan.devices
            for classes in [self.devices[device.name]]
        )


def decide_depths(
    plan: EmbeddingPlan,
    lines: Mapping[str, Mapping[int, FittedLine]],
    slo: float,
    arrival: Arrival = "open",
    model: str = "",
    tested: Mapping[tuple[str, int], int | None] | None = None,
) -> Depths:
    """Return the depths that meet `slo` seconds; heterogeneous mode ends without a fit CPU.

    lines: of each device, for the same length classes: the most tokens of a query to `model`.
    arrival: whether queries come together (`closed`) or at any time (`open`). tested: depths that a
    stress test found, by device and length class. Raises SpecError for an SLO that is no time.
    """
    if slo <= 0:
        raise SpecError(f"an SLO of {slo:g} s cannot be met; give a positive time")
    names = [device.name for device in plan.devices]
    lengths, found = sorted(lines[names[0]]), tested or {}
    devices = {
        name: tuple(
            ClassDepth(n, fit, fit.line.depth(slo, arrival), found.get((name, n)), model)
            for n in lengths
            for fit in [lines[name][n]]
        )
        for name in names
    }
    notes = [
        *plan.notes,
        *(
            f"{name} takes {each.line.seconds(1):.3g} s for one query of up to "
            f"{each.length} tokens, more than the SLO of {slo:g} s: depth 0 (Eq. 11)"
            for name, classes in devices.items()
            for each in classes
            if not each.predicted
        ),
    ]
    helping = any(c.predicted for d in plan.devices if not d.accelerator for c in devices[d.name])
    if plan.heterogeneous and not helping:
        notes.append("heterogeneous mode is off: no query is short enough for the CPU")
    return Depths(slo, arrival, devices, plan.heterogeneous and helping, tuple(notes))


def join_depths(found: Sequence[Depths]) -> Depths:
    """Return the depths of several models that share the same devices, SLO and arrivals.

    A device counts them together: a query fills 1/depth of it, whatever model it is for.
    """
    first = found[0]
    return replace(
        first,
        devices={name: tuple(c for d in found for c in d.devices[name]) for name in first.devices},
        heterogeneous=any(each.heterogeneous for each in found),
        notes=tuple(dict.fromkeys(note for each in found for note in each.notes)),
    )


def make_manager(plan: EmbeddingPlan, depths: Depths) -> QueueManager:
    """Return the queues of a plan with these depths."""
    classes = [QueryClass(c.length, c.model) for c in next(iter(depths.devices.values()))]
    queues, both = depths.queue_specs(plan), depths.heterogeneous
    return QueueManager(queues, classes, heterogeneous=both, arrival=depths.arrival)


def fixed_manager(
    plan: EmbeddingPlan, length: int, counts: Mapping[str, int], model: str = ""
) -> QueueManager:
    """Return queues of exactly these depths, for queries to one model that all come together."""
    no_time = (Line(0.0, 0.0),)
    queues = [
        QueueSpec(d.name, d.accelerator, (counts.get(d.name, 0),), no_time, d.instances)
        for d in plan.devices
    ]
    return QueueManager(queues, [QueryClass(length, model)], arrival="closed")


# ---- the model's profile ----


def profile_rows(depths: Depths) -> tuple[LatencyRow, ...]:
    """Return what a profile keeps of the queues."""
    return tuple(
        LatencyRow(
            device=name,
            length=each.length,
            alpha=each.line.alpha,
            beta=each.line.beta,
            origin="measured",
            error=each.fitted.error,
            points=each.fitted.points,
            slo=depths.slo,
            arrival=depths.arrival,
            predicted=each.predicted,
            tested=each.tested,
        )
        for name, classes in depths.devices.items()
        for each in classes
    )


def depths_of(
    plan: EmbeddingPlan, rows: Sequence[LatencyRow], slo: float, model: str = ""
) -> Depths:
    """Return the depths that a profile's rows give for `slo`; tested ones where that was it."""
    lines: dict[str, dict[int, FittedLine]] = {}
    for row in rows:
        points, line = tuple(Point(*each) for each in row.points), Line(row.alpha, row.beta)
        fitted = FittedLine(line, points, error=row.error, margin=find_margin(line, points))
        lines.setdefault(row.device, {})[row.length] = fitted
    tested = {(row.device, row.length): row.tested for row in rows if row.slo == slo}
    return decide_depths(plan, lines, slo, rows[0].arrival if rows else "open", model, tested)
