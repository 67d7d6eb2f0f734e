"""Fits an artifact's plan to the machine as it is at load: CPUs that went away, that are busy.

In: a ServicePlan, the CPUs and quota of this process, how busy each CPU is. Out: the plan to run
with, and a sentence for each thing that is not as planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec.structs import replace

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.textfile import show_ids

BUSY = 0.5
"""Share of a CPU's time that others use from which it is taken for busy."""
IDLE = 0.2
"""Share below which a CPU may stand in for a busy one."""


def adapt_service(
    service: ServicePlan, hardware: HardwareSpec, busy: Mapping[int, float]
) -> tuple[ServicePlan, tuple[str, ...]]:
    """Return the plan for what this process has now, and what was changed.

    More processes than CPUs, or than the quota keeps running, become one process: it gives the same
    tokens, and none waits for another's turn. A planned CPU that is busy is replaced by an idle one
    that is not planned, where there is one.
    """
    allowed = hardware.allowed_pus
    count = min(len(allowed), max(1, int(hardware.cpu_quota or len(allowed))))
    said: list[str] = []
    if service.most_processes > count:
        said.append(
            f"{service.most_processes} processes were planned, but only {count} CPUs are "
            "available: running one process"
        )
        service = _merge(service)
    phases = {}
    for name in ("prefill", "decode"):
        phase: PhasePlan = getattr(service, name)
        phases[name], words = _move(phase, allowed, busy)
        said += words
    return replace(service, **phases), tuple(dict.fromkeys(said))


def fit_plans(
    plan: PhasePlan, processes: int, threads: int | None, allowed: Sequence[int]
) -> tuple[PhasePlan, ...]:
    """Return the plan of each process: `plan` cut to `threads` and to the CPUs we may use.

    Threads count for each process; CPUs of the plan that are not allowed are replaced by others.
    Unpinned are plans without CPUs, and processes for which there are too few.
    """
    count = max(1, min(threads or plan.threads, len(allowed) // processes))
    if not plan.cpus or len(allowed) < processes:
        return (PhasePlan(threads=count, cpus=()),) * processes
    spare = [c for c in allowed if c not in plan.cpus]
    own = [
        [c for c in plan.cpus[i * plan.threads : (i + 1) * plan.threads] if c in allowed]
        for i in range(processes)
    ]
    spare = [c for cpus in own for c in cpus[count:]] + spare
    filled = []
    for cpus in own:
        missing = max(0, count - len(cpus))
        filled.append(tuple(cpus[:count] + spare[:missing]))
        del spare[:missing]
    return tuple(PhasePlan(threads=count, cpus=cpus) for cpus in filled)


@lru_cache
def deal_cpus(
    own: tuple[tuple[int, ...], ...], usable: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return which of the CPUs that a group has now each of its ranks has.

    Those of its plan among them, and who has none of these gets one that nobody has or that the
    rank with most can spare; of fewer CPUs than ranks, some have the same one.
    """
    found = [[cpu for cpu in cpus if cpu in usable] for cpus in own]
    spare = [cpu for cpu in usable if not any(cpu in cpus for cpus in own)]
    for rank, cpus in enumerate(found):
        if not cpus:
            most = max(found, key=len)
            left = spare or (most if len(most) > 1 else [])
            cpus.append(left.pop() if left else usable[rank % len(usable)])
    return tuple(map(tuple, found))


def _merge(service: ServicePlan) -> ServicePlan:
    """Return the plan of one process with all the threads."""
    prefill, decode = (
        PhasePlan(threads=phase.threads * service.processes_of(name), cpus=phase.cpus)
        for name, phase in (("prefill", service.prefill), ("decode", service.decode))
    )
    alone = {"processes": 1, "prefill_processes": 0, "nodes": ()}
    return replace(service, **alone, prefill=prefill, decode=decode)


def _move(
    phase: PhasePlan, allowed: Sequence[int], busy: Mapping[int, float]
) -> tuple[PhasePlan, list[str]]:
    """Return a phase off its busy CPUs where idle ones are left, and the sentences."""
    gone = [cpu for cpu in phase.cpus if cpu not in allowed]
    taken = [cpu for cpu in phase.cpus if busy.get(cpu, 0.0) >= BUSY and cpu not in gone]
    idle = [c for c in allowed if c not in phase.cpus and busy.get(c, 0.0) < IDLE]
    swaps = dict(zip(taken, idle[: max(0, len(idle) - len(gone))], strict=False))
    said = []
    if gone:
        said.append(f"planned for {_show(gone)}, offline or not allowed to this process")
    if swaps:
        said.append(f"{_show_busy(swaps)}; using {_show(swaps.values())} instead")
    if left := [cpu for cpu in taken if cpu not in swaps]:
        said.append(f"{_show_busy(left)} and none is idle; expect slower generation")
    return replace(phase, cpus=tuple(swaps.get(cpu, cpu) for cpu in phase.cpus)), said


def _show_busy(cpus: Collection[int]) -> str:
    return f"{_show(cpus)} {'is' if len(cpus) == 1 else 'are'} busy with other processes"


def _show(cpus: Iterable[int]) -> str:
    """Return words such as `CPUs 0-2, 5`."""
    numbers = set(cpus)
    return f"CPU{'s' * (len(numbers) > 1)} {show_ids(numbers).replace(',', ', ')}"
