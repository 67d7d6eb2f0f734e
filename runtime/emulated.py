"""An accelerator one does not have: memory of its own, a virtual clock, results from the CPU.

In: a machine class, a model's dimensions, the CPU that computes in its place. Out: a `Device` whose
clock moves only by the seconds that cost tables give a step (`timed.py` has the one on the wall
clock): what it says is always *emulated*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.ir.errors import SpecError
from dovetail.ir.model import ModelSpec
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.cost_tables import TablePredictor, with_tables
from dovetail.runtime.device import Bytes, Device, Event, Segment
from dovetail.runtime.plan import SchedulerSettings, StepPlan
from dovetail.runtime.request import Request
from dovetail.runtime.sim.machines import Machine, assumed_profile
from dovetail.runtime.sim.simulated_step import StepTime, Truth

CPU_TABLES = ("cpu_decode", "launch")
"""Tables of a machine class that measured ones may stand for: they are about the CPU."""
SHARED_DIMENSIONS = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "kv_dtype")
"""What a model that is emulated has in common with the one that is loaded: its KV."""


@dataclass(frozen=True, slots=True)
class Emulation:
    """The machine class to emulate, its `gpu_blocks` included, and how its scheduler chooses.

    measured: a profile of this CPU, whose tables about the CPU stand for the machine's.
    model: dimensions for the accelerator's tables, those of the loaded model by default.
    timed: steps take their time on the wall clock (`timed.py`); nothing but the CPU's part of
    attention is computed, over made-up values, and the tokens of every answer are `script`, again
    and again.
    """

    machine: Machine
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    measured: ProfileFile | None = None
    model: ModelSpec | None = None
    timed: bool = False
    script: tuple[int, ...] = (1,)

    def emulated_model(self, loaded: ModelSpec) -> ModelSpec:
        """Return the model the tables are about; SpecError where its KV is not that of `loaded`."""
        model = loaded if self.model is None else self.model
        wrong = [n for n in SHARED_DIMENSIONS if getattr(model, n) != getattr(loaded, n)]
        if wrong:
            raise SpecError(
                f"the model to emulate differs from the loaded one in {', '.join(wrong)}; "
                "their KV must be alike"
            )
        return model

    def tables(self, loaded: ModelSpec) -> TablePredictor:
        """Return the cost tables of the machine for the model to emulate."""
        profile = assumed_profile(self.machine, self.emulated_model(loaded))
        if self.measured is not None:
            profile = with_tables(profile, self.measured, CPU_TABLES)
        return TablePredictor(profile)


class EmulatedDevice:
    """A device in exact mode (design §7): everything is done, on `host`, when a call returns."""

    name = "emulated"

    def __init__(self, host: Device, emulation: Emulation, spec: ModelSpec) -> None:
        """`spec`: the loaded model; SpecError where it has not the KV of the one to emulate."""
        self._host, self._seconds = host, 0.0
        self.predictor = emulation.tables(spec)
        self.truth = Truth(self.predictor, emulation.emulated_model(spec), launch=True)

    def alloc(self, nbytes: int) -> Bytes:
        """Return zeroed bytes that stand for the accelerator's memory."""
        return self._host.alloc(nbytes)

    def copy(self, target: Bytes, source: Bytes, stream: int = 0) -> None:
        """Copy at once; the step's time covers it."""
        self._host.copy(target, source, stream)

    def run(self, segment: Segment, stream: int = 0) -> None:
        """Compute `segment` on the host; the step's time covers it."""
        self._host.run(segment, stream)

    def advance(self, plan: StepPlan, requests: Mapping[int, Request]) -> StepTime:
        """Let the time pass that a step takes, and return it; `requests` are as it was planned."""
        time = self.truth.step(plan, requests)
        self._seconds += time.seconds
        return time

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
