"""Two pools on the wall clock: the accelerator only takes its time, the CPU really attends.

In: what `PipelinedEngine` takes. Out: made-up tokens at the times that a step takes: the tables'
seconds on the accelerator, and decode attention by the generated kernels beside it (NEO §3.1).
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from dovetail.ir.errors import SpecError
from dovetail.ir.model import ModelSpec
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.device import Event
from dovetail.runtime.emulated import EmulatedDevice, Emulation
from dovetail.runtime.pair import Lane
from dovetail.runtime.pipelined import PipelinedEngine
from dovetail.runtime.plan import StepPlan
from dovetail.runtime.request import Home
from dovetail.runtime.sim.simulated_step import Stage, StepTime
from dovetail.runtime.step import PAGE, StepBuffers, StepShape
from dovetail.topology.hardware import HardwareSpec

COMPUTE, OUT, IN = range(3)
"""Streams: kernels, and the two ways of the link."""
TRACKS = ("accelerator", "link out", "link in")
"""Rows of a recording, by stream."""
CPU_TRACK = "CPU attention"
PR_SET_TIMERSLACK = 29
"""Of `prctl`: how late the system may end a thread's sleeps, in nanoseconds."""
_punctual = threading.local()

Span = tuple[float, float]
"""Start and end in seconds of the device's clock."""


class TimedDevice(EmulatedDevice):
    """A device in timed mode (design §7): queued work takes its seconds on the wall clock.

    As with an asynchronous device, the host queues work and goes on: work starts when it has been
    queued and what is before it in its stream is done.
    """

    def __init__(self, *values: Any) -> None:
        """See EmulatedDevice."""
        super().__init__(*values)
        self._ends = dict.fromkeys((COMPUTE, OUT, IN), 0.0)

    def queue(self, seconds: float, stream: int = COMPUTE) -> Span:
        """Queue work of that many seconds; return when it runs."""
        start = max(self.now(), self._ends[stream])
        end = self._ends[stream] = start + seconds
        return start, end

    def event(self, stream: int = 0) -> Event:
        """Return the end of what has been queued."""
        return Event(stream, self._ends[stream])

    def wait(self, event: Event) -> None:
        """Sleep until `event` is reached; the system's clock wakes us, nothing spins."""
        _wake_punctually()
        while (left := event.seconds - self.now()) > 0:
            time.sleep(left)

    def now(self) -> float:
        """Return monotonic wall time in seconds."""
        return self._host.now()


@functools.cache
def _find_prctl() -> Callable[..., int] | None:
    found = getattr(ctypes.CDLL(None), "prctl", None)
    return cast("Callable[..., int] | None", found)


def _wake_punctually() -> None:
    """Let this thread sleep to the nanosecond: the system may else wake it 50 us late (Linux)."""
    prctl = _find_prctl()
    if prctl is not None and not getattr(_punctual, "set", False):
        prctl(PR_SET_TIMERSLACK, 1)
        _punctual.set = True


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, what the tables say of it, and what it was: `seconds` of the wall clock.

    measured: as `told`, with the seconds that the CPU's attention of a layer took on average.
    attending: seconds in which this thread ran that attention.
    """

    plan: StepPlan
    told: StepTime
    measured: StepTime
    attending: float = 0.0

    @property
    def seconds(self) -> float:
        """What the step took, scheduling left out."""
        return self.measured.seconds


@dataclass(slots=True)
class _Attended:
    """Seconds of attention for each batch, and those of them in which the thread was running."""

    seconds: list[float]
    running: float = 0.0


class TimedEngine(PipelinedEngine):
    """Takes the time of an accelerator and a CPU together; `last_step` is what was run last.

    The CPU's KV pool has the loaded model's size; its kernels read it, and new keys and values of
    decodes are stored in it. Prompts, products and moves are time only. As queued work goes on by
    itself, one thread queues what comes next and then attends.
    """

    device_type: ClassVar[type[EmulatedDevice]] = TimedDevice
    accelerator: TimedDevice

    def __init__(
        self,
        emulation: Emulation,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        **options: Any,
    ) -> None:
        """As PipelinedEngine; SpecError for several processes."""
        if (options.get("plan") or artifact.service).processes > 1:
            raise SpecError("an accelerator in timed mode works beside one process")
        super().__init__(emulation, artifact, part, hardware, **options)
        self._script = emulation.script
        self._share = _share_before_attention(emulation.emulated_model(self.spec))
        self.last_step: TimedStep | None = None
        for pool in (self.model.kv.k, self.model.kv.v):
            pool[::PAGE] = 0  # untouched memory is one page of zeros, read from a cache

    def _compute(self, plan: StepPlan, lanes: list[Lane]) -> None:
        device = self.accelerator
        told = device.truth.step(plan, self.scheduler.requests)
        start = device.now()
        for stream, seconds in ((OUT, told.link_out), (IN, told.link_in)):
            self._queue("KV", seconds, stream)
        attended = self._run_rounds(plan, lanes, told)
        for stream in (COMPUTE, OUT, IN):
            device.wait(device.event(stream))
        # The CPU attends for batch 1 in the first stage of a layer, for batch 0 in the second
        cpu = [seconds / told.layers for seconds in attended.seconds]
        first, second = told.stages
        stages = Stage(first.gpu, cpu[1]), Stage(second.gpu, cpu[0])
        measured = replace(told, seconds=device.now() - start, stages=stages)
        self.last_step = TimedStep(plan, told, measured, attended.running)
        self.note_attention(sum(cpu))
        self.note_time(measured)

    def _run_rounds(self, plan: StepPlan, lanes: list[Lane], told: StepTime) -> _Attended:
        """Queue the layers of both batches in turns, each behind its attention on the CPU.

        The attention of a batch begins when both what makes its queries has been queued, and the
        other batch's work, so that the accelerator goes on meanwhile.
        """
        attended, pending = _Attended([0.0, 0.0]), deque[tuple[int, int, Event]]()
        for layer, index, seconds in _plan_rounds(told, self._share):
            while any(task[0] == index for task in pending):
                self._attend(lanes, *pending.popleft(), attended)
            self._queue(_NAMES[index], seconds, COMPUTE)
            if layer < told.layers and index < len(lanes) and plan.batches[index].cpu_decode:
                pending.append((index, layer, self.accelerator.event(COMPUTE)))
        return attended

    def _attend(
        self, lanes: list[Lane], index: int, layer: int, ready: Event, attended: _Attended
    ) -> None:
        """Attend on the CPU once the accelerator has made queries, keys and values."""
        device, lane = self.accelerator, lanes[index]
        device.wait(ready)
        start, running = device.now(), time.thread_time()
        lane.append(layer)
        lane.attend_on(Home.CPU, layer)
        attended.running += time.thread_time() - running
        span = start, device.now()
        attended.seconds[index] += span[1] - span[0]
        self._draw(CPU_TRACK, f"attention of batch {index}", span)

    def _queue(self, name: str, seconds: float, stream: int) -> None:
        if seconds > 0:
            self._draw(TRACKS[stream], name, self.accelerator.queue(seconds, stream))

    def _draw(self, track: str, name: str, span: Span) -> None:
        if self.recorder:
            self.recorder.draw(track, name, *span)

    def _sample(self, shape: StepShape, buffers: StepBuffers) -> None:
        self._score(shape, buffers)  # made up, too
        now = self.device.now()
        for request in shape.outputs:
            token = self._script[request.generated % len(self._script)]
            self.scheduler.append(request, token, now)


_NAMES = ("products of batch 0", "products of batch 1, attention of batch 0")


def _plan_rounds(told: StepTime, share: float) -> Iterator[tuple[int, int, float]]:
    """Yield (layer, batch, seconds on the accelerator) in order; one round more than layers.

    Between two attentions lie the rest of one layer's products and the first `share` of the next
    one's: so the first round has only the latter, the last one only the former.
    """
    for layer in range(told.layers + 1):
        part = share * (layer < told.layers) + (1 - share) * (layer > 0)
        for index, (stage, products) in enumerate(zip(told.stages, told.products, strict=True)):
            attention = stage.gpu - products if layer < told.layers else 0.0
            yield layer, index, products * part + attention


def _share_before_attention(spec: ModelSpec) -> float:
    """Return the part of a layer's products that makes queries, keys and values."""
    before = spec.qkv_size
    after = spec.n_heads * spec.head_dim + 3 * spec.intermediate_size
    return before / (before + after)
