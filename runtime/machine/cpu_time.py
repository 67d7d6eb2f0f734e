"""How busy CPUs and processes are, as the kernel counts it.

In: /proc under some root. Out: shares, cores and seconds of CPU time. What cannot be read is 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

QUIET_CORES = 1 / 3
"""Cores of other work up to which a machine is quiet: beside more, times say little of ours."""
WINDOW_SECONDS, LOOK_SECONDS = 0.05, 0.3
_NICE, _IDLE_COLUMNS = 1, (3, 4)  # of /proc/stat: work that gives way to us; idle and iowait


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


def busy_seconds(cpus: Collection[int] | None = None) -> float:
    """Return the seconds that these CPUs, or all, have worked since the start, `nice` work too."""
    some = (spent for cpu, spent in _times(Path("/")) if cpus is None or cpu in cpus)
    ticks = sum(sum(spent) - sum(spent[i] for i in _IDLE_COLUMNS) for spent in some)
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_cores(cpus: Collection[int]) -> float:
    """Return how many of these CPUs' worth of time was used while this thread slept a moment."""
    before, start = busy_seconds(cpus), time.monotonic()
    time.sleep(LOOK_SECONDS)
    return (busy_seconds(cpus) - before) / (time.monotonic() - start)


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, all its threads; 0 where it is not there."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()  # names may hold spaces
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def family_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all that it started and that run still."""
    try:
        files = [*Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it ends just now, or no file may be opened any more
        files = []
    children = [int(child) for file in files for child in _read(file).split()]
    return process_seconds(pid) + sum(map(family_seconds, children))


def _runnable(root: Path) -> int:
    """Return how many tasks run or are ready to, this one included; 0 where it is not known."""
    fields = _read(root / "proc/loadavg").split()
    return int(fields[3].partition("/")[0]) if len(fields) > 3 else 0


def _read(file: Path) -> str:
    """Return the text of a file, "" where it is not there: a process or a thread has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _times(root: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield (CPU, its ticks in each of the first eight states)."""
    for line in _read(root / "proc/stat").splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and len(values) >= 8:
            yield int(name[3:]), [int(value) for value in values[:8]]
