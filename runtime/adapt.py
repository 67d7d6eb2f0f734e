"""Fits an artifact's plan to the machine as it is at load: CPUs that went away, that are busy.

In: a ServicePlan, the CPUs and quota of this process, how busy each CPU is. Out: the plan to run
with, and a sentence for each thing that is not as planned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.topology.hardware import HardwareSpec

BUSY = 0.5
"""Share of a CPU's time that others use from which it is taken for busy."""
IDLE = 0.2
"""Share below which a CPU may stand in for a busy one."""
WINDOW_SECONDS = 0.05
_NICE, _IDLE_COLUMNS = 1, (3, 4)  # of /proc/stat: work that gives way to us; idle and iowait


def adapt_service(
    service: ServicePlan, hardware: HardwareSpec, busy: Mapping[int, float]
) -> tuple[ServicePlan, tuple[str, ...]]:
    """Return the plan for what this process has now, and what was changed.

    More processes than CPUs, or than the quota keeps running, become one process: it gives the same
    tokens, and none waits for another's turn. A planned CPU that is busy is replaced by an idle one
    that is not planned, where there is one.
    """
    allowed = hardware.allowed_pus
    count = len(allowed) if hardware.cpu_quota is None else max(1, int(hardware.cpu_quota))
    said: list[str] = []
    if service.processes > min(count, len(allowed)):
        said.append(
            f"{service.processes} processes were planned and {min(count, len(allowed))} CPUs are "
            "there: one process runs"
        )
        service = _merge(service)
    phases = {}
    for name in ("prefill", "decode"):
        phase: PhasePlan = getattr(service, name)
        phases[name], words = _move(phase, allowed, busy)
        said += (f"{name}: {text}" for text in words)
    return replace(service, **phases), tuple(said)


def _merge(service: ServicePlan) -> ServicePlan:
    """Return the plan of one process with all the threads."""
    prefill, decode = (
        PhasePlan(threads=phase.threads * service.processes, cpus=phase.cpus)
        for phase in (service.prefill, service.decode)
    )
    return replace(service, processes=1, nodes=(), prefill=prefill, decode=decode)


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
        said.append(f"planned CPUs {_show(gone)} are offline or not allowed to this process")
    if swaps:
        said.append(f"CPUs {_show(swaps)} are busy with other work: {_show(swaps.values())} run it")
    if left := [cpu for cpu in taken if cpu not in swaps]:
        said.append(
            f"CPUs {_show(left)} are busy with other work and no others are idle: steps wait for it"
        )
    return replace(phase, cpus=tuple(swaps.get(cpu, cpu) for cpu in phase.cpus)), said


def _show(cpus: Iterable[int]) -> str:
    return ", ".join(map(str, cpus))


# ---- how busy CPUs are ----


def read_busy(root: Path = Path("/"), seconds: float = WINDOW_SECONDS) -> dict[int, float]:
    """Return CPU -> the share of its time that work of others takes; {} where nothing else runs.

    Costs nothing on a machine where nothing else is ready to run, else `seconds`, in which this
    thread sleeps. Work of lower priority (nice) gives way to ours and does not count.
    """
    if _runnable(root) <= 1:
        return {}
    before = dict(_times(root))
    time.sleep(seconds)
    after = dict(_times(root))
    shares = {}
    for cpu in before.keys() & after.keys():
        spent = [b - a for a, b in zip(before[cpu], after[cpu], strict=True)]
        spare = spent[_NICE] + sum(spent[i] for i in _IDLE_COLUMNS)
        shares[cpu] = 1 - spare / sum(spent) if sum(spent) > 0 else 0.0
    return shares


def busy_seconds(root: Path = Path("/")) -> float:
    """Return the seconds that all CPUs have worked since the system's start, work of `nice` too."""
    ticks = sum(sum(spent) - sum(spent[i] for i in _IDLE_COLUMNS) for _, spent in _times(root))
    return ticks / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int, root: Path = Path("/")) -> float:
    """Return the CPU seconds of a process, all its threads; 0 where it is not there."""
    try:
        text = (root / f"proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _runnable(root: Path) -> int:
    """Return how many tasks run or are ready to, this one included; 0 where it is not known."""
    try:
        return int((root / "proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


def _times(root: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield (CPU, its ticks in each of the first eight states)."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and len(values) >= 8:
            yield int(name[3:]), [int(value) for value in values[:8]]
