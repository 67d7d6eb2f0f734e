"""Devices: where buffers live and tape segments run. This is the CPU's.

In: a kernel library and a plan of threads. Out: memory, runs in order, and a clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dovetail.ir.artifact import PhasePlan
from dovetail.runtime.library import KernelLibrary
from dovetail.runtime.memory import allocate
from dovetail.runtime.tape import BoundTape

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a tape with its arguments; `span` None = all of it.

    `plan` says which threads, `most` how many of these at most: none of the others is woken.
    """

    tape: BoundTape
    plan: PhasePlan
    args: Mapping[str, int] = field(default_factory=dict)
    span: range | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A point in a stream; `seconds` is when it was reached on the device's clock."""

    stream: int
    seconds: float


class Device(Protocol):
    """An accelerator or the CPU. Work of one stream runs in the order it was given."""

    name: str

    def alloc(self, nbytes: int) -> Bytes:
        """Return `nbytes` zeroed bytes of this device's memory."""

    def copy(self, target: Bytes, source: Bytes, stream: int = 0) -> None:
        """Copy bytes between arrays of equal length."""

    def run(self, segment: Segment, stream: int = 0) -> None:
        """Run a tape segment."""

    def event(self, stream: int = 0) -> Event:
        """Mark the point that `stream` has come to."""

    def wait(self, event: Event) -> None:
        """Return when `event` has been reached."""

    def now(self) -> float:
        """Return seconds on the device's clock."""

    def close(self) -> None:
        """Give back threads and memory; safe to call twice."""


class CpuDevice:
    """The CPU: everything is done when the call returns, so events have always been reached."""

    name = "cpu"

    def __init__(self, library: KernelLibrary, threads: int, spin: int) -> None:
        """Start the thread team; CapacityError when it cannot be had."""
        self._team = library.make_team(threads, spin)

    def alloc(self, nbytes: int) -> Bytes:
        """Return zeroed, page-aligned bytes."""
        return allocate(nbytes)

    def copy(self, target: Bytes, source: Bytes, stream: int = 0) -> None:
        """Copy at once."""
        np.copyto(target, source)

    def run(self, segment: Segment, stream: int = 0) -> None:
        """Run `segment` on the threads of its plan."""
        self._team.set_active(segment.plan)
        segment.tape.run(self._team, segment.args, segment.span, segment.most)

    def event(self, stream: int = 0) -> Event:
        """Return an event that has been reached."""
        return Event(stream, self.now())

    def wait(self, event: Event) -> None:
        """Return at once."""

    def now(self) -> float:
        """Return monotonic wall time in seconds."""
        return time.perf_counter()

    def close(self) -> None:
        """End the thread team."""
        self._team.close()
