"""CPU and memory limits that control groups put on this process, version 1 and 2.

In: `/proc/self/cgroup`, `/proc/self/mountinfo` and the mounted hierarchies, under a root directory.
Out: the tightest limit over our group and its parents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dovetail.topology.textfile import parse_id_list, parse_number, read_text

UNLIMITED_BYTES = 1 << 60  # version 1 writes 2^63 rounded to a page for "no limit"


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """`cpu_quota` in cores, `memory_bytes`, `cpuset` as PU ids; None or () = no limit."""

    cpu_quota: float | None = None
    memory_bytes: int | None = None
    cpuset: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    top: str  # the path inside the hierarchy that is mounted
    point: str


def read_limits(root: Path) -> CgroupLimits:
    """Return the limits found under `root`; no control groups = no limits."""
    mounts = list(_mounts(root))
    groups = dict(_groups(root))
    quotas = map(_quota, _folders(root, mounts, groups, "cpu"))
    limits = map(_memory, _folders(root, mounts, groups, "memory"))
    sets = map(_cpuset, _folders(root, mounts, groups, "cpuset"))
    return CgroupLimits(
        cpu_quota=min(filter(None, quotas), default=None),
        memory_bytes=min(filter(None, limits), default=None),
        cpuset=next(filter(None, sets), ()),  # the innermost group's is a subset of its parents'
    )


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        yield _Mount(version, frozenset(kind[2].split(",")), fields[3], fields[4])


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller, group path); the controller of version 2 is the empty string."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                yield controller, parts[2]


def _folders(
    root: Path, mounts: list[_Mount], groups: dict[str, str], controller: str
) -> Iterator[Path]:
    """Yield the folders of our group and its parents, innermost first."""
    for mount in mounts:
        key = "" if mount.version == 2 else controller
        if key not in groups or (mount.version == 1 and controller not in mount.controllers):
            continue
        base = root / mount.point.lstrip("/")
        group = PurePosixPath(groups[key])
        # inside a container the group's path may start above what is mounted here
        inside = group.relative_to(mount.top) if group.is_relative_to(mount.top) else None
        parts = [p for p in (inside.parts if inside else ()) if p not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    text = read_text(folder / "cpu.max")
    if text is None:
        quota, period = (
            read_text(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        text = f"{quota} {period}"
    values = [parse_number(part) for part in text.split()]
    match values:
        case [int(quota_us), int(period_us)] if quota_us and period_us:
            return quota_us / period_us
    return None  # "max", -1 or absent: no limit


def _memory(folder: Path) -> int | None:
    text = (
        read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes") or ""
    ).strip()
    number = parse_number(text)
    return number if number and number < UNLIMITED_BYTES else None


def _cpuset(folder: Path) -> tuple[int, ...]:
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        text = read_text(folder / name)
        if text and text.strip():
            return parse_id_list(text, folder / name)
    return ()
