"""Plans how one machine serves a model: threads and pinned PUs of each phase.

In: HardwareSpec, WorkloadSpec. Out: ServicePlan (all cores serve both phases in it), and the trace
that the topology search scores its plans on.
"""

from __future__ import annotations

from dovetail.compiler.workload import WorkloadSpec
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.replay import Trace


def plan_service(hardware: HardwareSpec, threads: int | None = None) -> ServicePlan:
    """Return the plan for `threads` (default: all cores this process may use at full speed).

    Raises SpecError when the machine allows fewer threads than asked for.
    """
    count = hardware.usable_threads if threads is None else threads
    phase = PhasePlan(threads=count, cpus=choose_pus(hardware, count))
    return ServicePlan(prefill=phase, decode=phase)


def sample_trace(workload: WorkloadSpec, batch: int = 1) -> Trace:
    """Return the requests of a workload for the topology search, `batch` decoded together."""
    requests = tuple(zip(workload.prompt_lengths, workload.output_lengths, strict=True))
    return Trace(workload.source, requests, batch).sample()
