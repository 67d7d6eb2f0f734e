"""Plans how one machine serves a model: threads and pinned PUs of each phase.

In: HardwareSpec. Out: ServicePlan. All cores serve both phases here; grouped and cut-down trees
come with the topology search, which returns the same plan.
"""

from __future__ import annotations

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec


def plan_service(hardware: HardwareSpec, threads: int | None = None) -> ServicePlan:
    """Return the plan for `threads` (default: all cores this process may use at full speed).

    Raises SpecError when the machine allows fewer threads than asked for.
    """
    count = hardware.usable_threads if threads is None else threads
    phase = PhasePlan(threads=count, cpus=choose_pus(hardware, count))
    return ServicePlan(prefill=phase, decode=phase)
