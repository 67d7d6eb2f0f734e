"""An accelerator one does not have: memory of its own, a virtual clock, results from the CPU.

In: a machine class, a model's dimensions, the CPU that computes in its place. Out: a `Device` whose
clock moves only by the seconds that cost tables give a step: what it says is always *emulated*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.ir.model import ModelSpec
from dovetail.runtime.cost_tables import TablePredictor
from dovetail.runtime.device import Bytes, Device, Event, Segment
from dovetail.runtime.machines import Machine, assumed_profile
from dovetail.runtime.plan import SchedulerSettings, StepPlan
from dovetail.runtime.request import Request
from dovetail.runtime.simulated_step import Truth


@dataclass(frozen=True, slots=True)
class Emulation:
    """The machine class to emulate, its `gpu_blocks` included, and how its scheduler chooses."""

    machine: Machine
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)


class EmulatedDevice:
    """A device in exact mode (design §7): everything is done, on `host`, when a call returns."""

    name = "emulated"

    def __init__(self, host: Device, machine: Machine, spec: ModelSpec) -> None:
        self._host, self._seconds = host, 0.0
        self.predictor = TablePredictor(assumed_profile(machine, spec))
        self._truth = Truth(self.predictor, spec)

    def alloc(self, nbytes: int) -> Bytes:
        """Return zeroed bytes that stand for the accelerator's memory."""
        return self._host.alloc(nbytes)

    def copy(self, target: Bytes, source: Bytes, stream: int = 0) -> None:
        """Copy at once; the step's time covers it."""
        self._host.copy(target, source, stream)

    def run(self, segment: Segment, stream: int = 0) -> None:
        """Compute `segment` on the host; the step's time covers it."""
        self._host.run(segment, stream)

    def advance(self, plan: StepPlan, requests: Mapping[int, Request]) -> None:
        """Let the time pass that a step takes; `requests` as they are when it was planned."""
        self._seconds += self._truth.step(plan, requests).seconds

    def event(self, stream: int = 0) -> Event:
        """Return an event that has been reached."""
        return Event(stream, self.now())

    def wait(self, event: Event) -> None:
        """Return at once."""

    def now(self) -> float:
        """Return the seconds that all steps so far have taken."""
        return self._seconds

    def close(self) -> None:
        """Close the host."""
        self._host.close()
