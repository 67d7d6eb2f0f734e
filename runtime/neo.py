"""Decides what a step computes on an accelerator and the CPU together (NEO §3.2).

In: requests, two KV pools, predicted times. Out: a frozen StepPlan of one or two sub-batches.
"""

from __future__ import annotations

from collections.abc import Callable

from dovetail.runtime.kv_pool import KvPool
from dovetail.runtime.plan import Limits, SchedulerSettings, StepPlan
from dovetail.runtime.predictor import Predictor
from dovetail.runtime.request import Home
from dovetail.runtime.scheduler import Scheduler


class NeoScheduler(Scheduler):
    """Requests live wholly on the GPU or wholly on the CPU."""

    def __init__(
        self,
        limits: Limits,
        gpu: KvPool,
        cpu: KvPool,
        predictor: Predictor,
        clock: Callable[[], float],
        settings: SchedulerSettings | None = None,
    ) -> None:
        settings = settings or SchedulerSettings()
        super().__init__(limits, gpu, predictor, clock, home=Home.GPU, settings=settings)
        self.pools[Home.CPU] = cpu

    def plan(self) -> StepPlan:
        """Return the next step."""
        return self.plan_alone(Home.GPU)
