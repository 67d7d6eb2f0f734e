"""Does offloading pay here? When the known queue ends with and without the CPU, by tables alone.

In: the queue, capacities, a predictor. Out: the gain, and how many requests the CPU should hold.
A step's own rate cannot tell: a prompt computed for the CPU is paid now and returns later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.runtime.outlook import SPARE, Course, Demand, Outlook
from dovetail.runtime.pipeline import NO_TIME, LayerTimes
from dovetail.runtime.plan import Limits, SchedulerSettings
from dovetail.runtime.predictor import Predictor

COUNTS = 5
"""Numbers of CPU requests that are tried, each half of the one before."""
NEAR = 1.03
"""Ends of the queue that differ less count as equal."""
ROUGH = 1.04
"""By what part steady service, once begun, ends later than played.

It keeps both devices about equally busy, so that noise of either makes steps longer.
"""


@dataclass(frozen=True, slots=True)
class OffloadVerdict:
    """`gain`: how much sooner the known requests end than without the CPU (inf: they never do).

    It takes so many `cpu_requests`. `at_once`: all of them should start and decode in every step;
    `cpu_only`: on the CPU, which has time to spare where the accelerator has none.
    """

    gain: float
    cpu_requests: int
    at_once: bool = False
    cpu_only: bool = False


NEVER = OffloadVerdict(1.0, 0)


def weigh_offload(
    demand: Demand,
    limits: Limits,
    predictor: Predictor,
    settings: SchedulerSettings,
    late: float = 0.0,
) -> OffloadVerdict:
    """Return how much sooner the requests end with decodes on the CPU.

    late: seconds of `Lateness`.
    """
    size = demand.prompt + demand.answer / 2 + SPARE
    fit = int(demand.gpu_tokens / size)
    most = min(demand.requests, limits.max_step_sequences, int(demand.cpu_tokens / size))
    if most < 1 or demand.requests <= max(fit, len(demand.on_gpu)):
        return NEVER
    outlook = Outlook(demand, limits, settings, LayerTimes(predictor, late))
    alone = outlook.finish(Course(demand.gpu_tokens, 0)) if fit else math.inf
    beside = max(1, min(most, demand.requests - fit))
    end, count = _find_steady(outlook, beside)
    steady = end if demand.on_cpu else end * ROUGH  # what has been begun goes on
    if not demand.growing:  # else it does not end when those known now have ended
        mixed = outlook.finish(Course(demand.gpu_tokens, beside, at_once=True))
        pure = outlook.finish(Course(0, most, at_once=True))
        whole = min(mixed, pure)
        if (whole * ROUGH if demand.on_cpu else whole) < min(steady, alone):
            gain = alone / max(whole, NO_TIME)
            return OffloadVerdict(gain, beside, at_once=True, cpu_only=pure < mixed * NEAR)
    return OffloadVerdict(alone / max(steady, NO_TIME), count) if steady < alone else NEVER


def _find_steady(outlook: Outlook, most: int) -> tuple[float, int]:
    """Return an early end with up to `most` requests on the CPU, and how many these are.

    Of ends that are near the earliest, the one with the fewest: prompts are computed for them now.
    """
    counts = sorted({max(1, most >> i) for i in range(COUNTS)})
    ends = [outlook.finish(Course(outlook.demand.gpu_tokens, count)) for count in counts]
    return next(plan for plan in zip(ends, counts, strict=True) if plan[0] <= min(ends) * NEAR)
