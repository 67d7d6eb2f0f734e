"""Queue depths of all devices from their latency lines, and the decision what the CPU may do.

In: a line per device and query-length class, the SLO. Out: `QueueSpec`s, what was decided and why:
a device whose single query misses the SLO gets depth 0 (WindVE Eq. 11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.ir.errors import SpecError
from dovetail.runtime.embedding.detector import DevicePlan, EmbeddingPlan
from dovetail.runtime.embedding.line import Arrival, FittedLine, Line
from dovetail.runtime.embedding.query import QueryClass, QueueSpec
from dovetail.runtime.embedding.queues import QueueManager


@dataclass(frozen=True, slots=True)
class ClassDepth:
    """The depth of a device for queries of up to `length` tokens to `model`.

    predicted: by the line. tested: found by a stress test beside the other devices, if there was
    one, which then counts. margin: part by which batches may be slower than the line.
    """

    length: int
    line: Line
    predicted: int
    tested: int | None = None
    model: str = ""
    margin: float = 0.0

    @property
    def depth(self) -> int:
        """Return the depth that is used."""
        return self.predicted if self.tested is None else self.tested

    @property
    def error(self) -> float | None:
        """Return how far the prediction was off, relative to the tested depth."""
        if self.tested is None:
            return None
        return abs(self.predicted - self.tested) / max(self.tested, 1)


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
        return tuple(_queue_spec(each, self.devices[each.name]) for each in plan.devices)

    def with_tested(self, length: int, tested: Mapping[str, int]) -> Depths:
        """Return the depths with those of class `length` replaced by tested ones."""
        return replace(
            self,
            devices={
                name: tuple(
                    replace(each, tested=tested[name])
                    if each.length == length and name in tested
                    else each
                    for each in classes
                )
                for name, classes in self.devices.items()
            },
        )


def _queue_spec(plan: DevicePlan, classes: Sequence[ClassDepth]) -> QueueSpec:
    return QueueSpec(
        name=plan.name,
        accelerator=plan.accelerator,
        depths=tuple(each.depth for each in classes),
        lines=tuple(each.line for each in classes),
        instances=plan.instances,
        token_budget=plan.token_budget,
        pads=plan.pads,
        margin=max((each.margin for each in classes), default=0.0),
    )


def decide_depths(
    plan: EmbeddingPlan,
    lines: Mapping[str, Mapping[int, FittedLine]],
    slo: float,
    arrival: Arrival = "open",
    model: str = "",
) -> Depths:
    """Return the depths that meet `slo` seconds; heterogeneous mode ends without a fit CPU.

    Args:
        plan: the devices.
        lines: of each device, by length class: the most tokens of its queries.
        slo: seconds that a query may take.
        arrival: whether queries come together (`closed`) or at any time (`open`).
        model: whose lines and depths these are.

    Raises:
        SpecError: a device has no lines, or other classes than the others; the SLO is no time.
    """
    if slo <= 0:
        raise SpecError(f"an SLO of {slo:g} s cannot be met; give a positive time")
    classes = [sorted(lines.get(device.name, {})) for device in plan.devices]
    if not classes[0] or any(each != classes[0] for each in classes):
        raise SpecError("every device needs a latency line for the same length classes")
    devices, notes = {}, list(plan.notes)
    for device in plan.devices:
        fitted = lines[device.name]
        devices[device.name] = tuple(
            ClassDepth(
                length=n,
                line=fitted[n].line,
                predicted=fitted[n].line.depth(slo, arrival),
                model=model,
                margin=fitted[n].margin,
            )
            for n in classes[0]
        )
        notes += _slow_notes(device.name, devices[device.name], slo)
    helping = [d.name for d in plan.devices if not d.accelerator]
    heterogeneous = plan.heterogeneous and any(
        each.depth for name in helping for each in devices[name]
    )
    if plan.heterogeneous and not heterogeneous:
        notes.append("heterogeneous mode is off: no query is short enough for the CPU")
    return Depths(slo, arrival, devices, heterogeneous, tuple(notes))


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


def _slow_notes(name: str, classes: Sequence[ClassDepth], slo: float) -> list[str]:
    return [
        f"{name} takes {each.line.seconds(1):.3g} s for one query of up to {each.length} tokens, "
        f"more than the SLO of {slo:g} s: depth 0 (Eq. 11)"
        for each in classes
        if not each.depth
    ]


def make_manager(plan: EmbeddingPlan, depths: Depths) -> QueueManager:
    """Return the queues of a plan with these depths."""
    classes = [QueryClass(c.length, c.model) for c in next(iter(depths.devices.values()))]
    return QueueManager(
        depths.queue_specs(plan),
        classes,
        heterogeneous=depths.heterogeneous,
        arrival=depths.arrival,
    )


def cost_saving(accelerators: int, cpu: int) -> float:
    """Return the part of the deployment cost that the CPU saves at peaks (WindVE §III-B)."""
    return cpu / (cpu + accelerators) if cpu else 0.0
