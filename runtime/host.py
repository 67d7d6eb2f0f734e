"""Where an engine runs: on a thread of this process (`loop.py`), or in a process (`apart/`).

In: requests as token ids. Out: `Job`s that are told of tokens and of their end, and how busy the
engine is. Callers know no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dovetail.ir.artifact import ServicePlan
from dovetail.runtime.engine import STEP_TOKENS, DeviceWaits
from dovetail.runtime.job import Job
from dovetail.runtime.request import SamplingParams
from dovetail.runtime.tally import Histogram, Tally
from dovetail.runtime.timeline import Timeline

NO_STEPS = Tally(STEP_TOKENS).read()


@dataclass(frozen=True, slots=True)
class Ask:
    """A call that has been read: prompts as token ids, and their options."""

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    chunks: bool = False
    flow: int | None = None  # the arrow on a timeline that its requests are part of


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests that are being computed, those that wait, and the part of KV blocks in use, 0..1.

    pools: the same of each device's pool, `gpu` (what computes beside the CPU) and `cpu`. Since the
    engine was opened: waits of CPU and accelerator for each other, steps by the tokens that they
    computed, swaps, requests whose KV went to the device of that name.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    waits: DeviceWaits = DeviceWaits()
    steps: Histogram = NO_STEPS
    pools: dict[str, float] = {}
    swaps: dict[str, int] = {}


class EngineHost(Protocol):
    """An engine and what steps it. For any thread."""

    @property
    def ready(self) -> bool:
        """Whether requests are served now; those that come meanwhile wait."""

    @property
    def ailment(self) -> str:
        """Why it is not ready, in words; "" where it is, or nobody knows."""

    @property
    def service(self) -> ServicePlan:
        """The processes, threads and CPUs that the engine runs with."""

    @property
    def load(self) -> EngineLoad:
        """How busy the engine was after its last step."""

    def now(self) -> float:
        """Return seconds on the clock of all times that requests tell."""

    def begin(self, ask: Ask, jobs: Sequence[Job]) -> None:
        """Have the requests of `ask` started, all or none; `jobs` are told what comes of them.

        Raises RequestError or CapacityError where it is known at once that none can be; else the
        jobs fail with it.
        """

    def drop(self, jobs: Sequence[Job]) -> Future[None]:
        """Have the unfinished ones of `jobs` ended; the future is done once their blocks are free.

        Raises RequestError where this is closed: they have ended then.
        """

    def start_recording(self, timeline: Timeline) -> None:
        """Draw the steps from now on; RequestError while another timeline is drawn on."""

    def stop_recording(self) -> None:
        """Draw no longer; all that was done by now is on the timeline."""

    def close(self) -> None:
        """Fail what is under way and end the engine. Safe to call twice."""
