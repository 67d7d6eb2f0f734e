"""Reads a HardwareSpec from `/sys` and `/proc` of a Linux machine, or from a snapshot of them.

In: a root directory. Out: the spec, unchecked. What a container hides is left unknown, not guessed.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from dovetail.ir.cpu import usable_flags
from dovetail.ir.errors import SpecError
from dovetail.topology.builder import MAX_PUS, scale_capacity
from dovetail.topology.cgroup import CgroupLimits, read_limits
from dovetail.topology.devices import read_accelerators
from dovetail.topology.textfile import (
    parse_id_list,
    parse_number,
    parse_size,
    read_id_list,
    read_integer,
    read_text,
)
from dovetail.topology.values import CacheSpec, GroupSpec, HardwareSpec, NodeSpec, PuSpec

CPUINFO_BYTES = 32 << 20

_CACHE_KINDS = ("data", "instruction", "unified")
_ARM_VENDORS = {"0x41": "ARM", "0x61": "Apple", "0xc0": "Ampere", "0x48": "HiSilicon"}


def read_sysfs(root: Path) -> HardwareSpec:
    """Return the machine whose `/sys` and `/proc` lie under `root`; SpecError on nonsense."""
    listed, names = _read_cpuinfo(root)
    limits = read_limits(root)
    online = _online_pus(root, listed)
    nodes = _read_nodes(root, online)
    pus = _read_pus(root, online, nodes)
    allowed = _allowed_pus(root, online, limits)
    memory = meminfo_bytes(root / "proc/meminfo", "MemTotal")
    if memory is None:
        raise SpecError(f"{root / 'proc/meminfo'} gives no MemTotal: is /proc mounted?")
    return HardwareSpec(
        source="sysfs",
        **names,
        pus=pus,
        allowed_pus=allowed,
        nodes=nodes or (NodeSpec(id=0, pus=online, memory_bytes=memory),),
        caches=_read_caches(root, online),
        memory_bytes=memory,
        memory_limit=limits.memory_bytes,
        cpu_quota=limits.cpu_quota,
        groups=_read_groups(root, online),
        accelerators=read_accelerators(root, online),
    )


def _read_cpuinfo(root: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the processors that are listed, and how a HardwareSpec calls their kind."""
    text = read_text(root / "proc/cpuinfo", limit=CPUINFO_BYTES)
    if text is None:
        raise SpecError(f"cannot read {root / 'proc/cpuinfo'}: is /proc mounted?")
    first: dict[str, str] = {}
    processors: list[int] = []
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        key, value = key.strip(), value.strip()
        number = parse_number(value)
        if key == "processor" and separator and number is not None:
            processors.append(number)
        elif separator:
            first.setdefault(key, value)
    arm = "Features" in first
    part = f"{first.get('CPU implementer', '')} part {first.get('CPU part', '?')}"
    flags = set(first.get("flags", first.get("Features", "")).split())
    vendor = first.get("vendor_id") or _ARM_VENDORS.get(first.get("CPU implementer", ""), "unknown")
    return tuple(sorted(set(processors))), {
        "arch": "aarch64" if arm else "x86_64" if "flags" in first else platform.machine(),
        "cpu_vendor": vendor,
        "cpu_model": first.get("model name") or (part if arm else "unknown"),
        "isa_flags": tuple(sorted(usable_flags(flags) if root == Path("/") else flags)),
    }


def _online_pus(root: Path, listed: tuple[int, ...]) -> tuple[int, ...]:
    path = root / "sys/devices/system/cpu/online"
    text = read_text(path)
    ids = parse_id_list(text, path) if text else listed
    if not ids:
        raise SpecError(f"neither {path} nor {root / 'proc/cpuinfo'} lists a processor")
    if len(ids) > MAX_PUS:
        raise SpecError(f"{path} lists {len(ids)} processors; at most {MAX_PUS} are supported")
    return ids


def _allowed_pus(root: Path, online: tuple[int, ...], limits: CgroupLimits) -> tuple[int, ...]:
    allowed = set(online)
    path = root / "proc/self/status"
    for line in (read_text(path) or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            allowed &= set(parse_id_list(line.partition(":")[2], path))
    if limits.cpuset:
        allowed &= set(limits.cpuset)
    if not allowed:
        raise SpecError("the affinity mask and cpuset of this process leave no online PU")
    return tuple(sorted(allowed))


def _read_pus(
    root: Path, online: tuple[int, ...], nodes: tuple[NodeSpec, ...]
) -> tuple[PuSpec, ...]:
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    fallback = nodes[0].id if nodes else 0
    present = read_id_list(root / "sys/devices/system/cpu/present")
    cores: dict[int, int] = {}
    kinds = _core_kinds(root, online)
    pus = []
    for pu in sorted(set(online) | set(present))[:MAX_PUS]:
        folder = root / f"sys/devices/system/cpu/cpu{pu}"
        siblings = read_id_list(folder / "topology/thread_siblings_list") or (pu,)
        # core_id is unique only inside a package, the first sibling everywhere
        core = cores.setdefault(min(siblings, default=pu), len(cores))
        socket = read_integer(folder / "topology/physical_package_id", default=0)
        pus.append(
            PuSpec(
                id=pu,
                core=core,
                socket=max(socket, 0),  # -1 on ARM machines that do not say
                node=node_of.get(pu, fallback),
                online=pu in online,
                capacity=read_integer(folder / "cpu_capacity", default=kinds.get(pu, 1024)),
            )
        )
    return tuple(pus)


def _core_kinds(root: Path, online: tuple[int, ...]) -> dict[int, int]:
    """Return PU -> capacity on hybrid x86, whose kernel lists the PUs of each kind of core."""
    devices = root / "sys/devices"
    if read_text(devices / "cpu_atom/cpus") is None:
        return {}
    clocks = {
        pu: read_integer(devices / f"system/cpu/cpu{pu}/cpufreq/cpuinfo_max_freq", default=0)
        for pu in online
    }
    return scale_capacity({pu: float(clock) for pu, clock in clocks.items() if clock > 0})


def _read_groups(root: Path, online: tuple[int, ...]) -> tuple[GroupSpec, ...]:
    """Return dies and clusters that are larger than a core and smaller than a package."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    for pu in online:
        folder = root / f"sys/devices/system/cpu/cpu{pu}/topology"
        bounds = [
            set(read_id_list(folder / name)) & set(online)
            for name in ("thread_siblings_list", "package_cpus_list")
        ]
        for kind in ("die", "cluster"):
            pus = set(read_id_list(folder / f"{kind}_cpus_list")) & set(online)
            if bounds[0] < pus < bounds[1]:
                found.add((kind, tuple(sorted(pus))))
    return tuple(GroupSpec(kind=kind, pus=pus) for kind, pus in sorted(found))


def _read_nodes(root: Path, online: tuple[int, ...]) -> tuple[NodeSpec, ...]:
    folder = root / "sys/devices/system/node"
    nodes = []
    ids = read_id_list(folder / "online")
    for node in ids:
        base = folder / f"node{node}"
        pus = read_id_list(base / "cpulist")
        read = map(parse_number, (read_text(base / "distance") or "").split())
        distances = tuple(d for d in read if d is not None)
        nodes.append(
            NodeSpec(
                id=node,
                pus=tuple(sorted(set(pus) & set(online))),
                memory_bytes=meminfo_bytes(base / "meminfo", "MemTotal") or 0,
                distances=distances if len(distances) == len(ids) else (),
            )
        )
    return tuple(nodes)


def _read_caches(root: Path, online: tuple[int, ...]) -> tuple[CacheSpec, ...]:
    found: dict[tuple[int, str, tuple[int, ...]], CacheSpec] = {}
    for pu in online:
        for index in range(8):
            folder = root / f"sys/devices/system/cpu/cpu{pu}/cache/index{index}"
            cache = _read_cache(folder, online)
            if cache is None:
                break
            found.setdefault((cache.level, cache.kind, cache.pus), cache)
    return tuple(sorted(found.values(), key=lambda c: (c.level, c.kind, c.pus)))


def _read_cache(folder: Path, online: tuple[int, ...]) -> CacheSpec | None:
    kind = (read_text(folder / "type") or "").strip().lower()
    size = read_text(folder / "size")
    if kind not in _CACHE_KINDS or not size:
        return None
    pus = set(read_id_list(folder / "shared_cpu_list")) & set(online)
    return CacheSpec(
        level=read_integer(folder / "level", default=0),
        kind=kind,
        bytes=parse_size(size, folder / "size"),
        line_bytes=read_integer(folder / "coherency_line_size", default=64),
        pus=tuple(sorted(pus)),
    )


def meminfo_bytes(path: Path, key: str) -> int | None:
    """Return the value of a line `Key:  123 kB` in bytes; None where there is none."""
    for line in (read_text(path) or "").splitlines():
        name, _, rest = line.partition(":")
        if name.split()[-1:] == [key]:
            kilobytes = parse_number(rest.removesuffix("kB").strip())
            return None if kilobytes is None else kilobytes << 10
    return None
