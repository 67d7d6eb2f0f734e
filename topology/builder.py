"""Puts a HardwareSpec together from what a topology file says of each PU.

In: PUs with the source's own names of their core and package, NUMA nodes, caches, groups.
Out: a HardwareSpec with dense core and socket numbers; PUs without memory get the nearest node.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

import msgspec

from dovetail.ir.errors import SpecError
from dovetail.topology.values import (
    AcceleratorSpec,
    CacheSpec,
    GroupSpec,
    HardwareSpec,
    NodeSpec,
    PuSpec,
)

MAX_PUS, MAX_GROUPS = 8192, 4096
CACHE_KINDS = {"": "unified", "d": "data", "i": "instruction"}
"""What a letter behind a cache's level says of it: `l1d`."""
UNKNOWN = "unknown"

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PuRow:
    """One PU; `core` and `socket` are any names that tell cores and packages apart."""

    id: int
    core: Hashable
    socket: Hashable
    node: int | None = None
    online: bool = True
    capacity: int = 1024


def build_hardware(
    source: str,
    rows: Sequence[PuRow],
    nodes: Iterable[NodeSpec] = (),
    *,
    caches: Iterable[CacheSpec] = (),
    groups: Iterable[GroupSpec] = (),
    accelerators: tuple[AcceleratorSpec, ...] = (),
    allowed: Collection[int] | None = None,
    domains: Sequence[frozenset[int]] = (),
    arch: str = UNKNOWN,
    vendor: str = UNKNOWN,
    model: str = UNKNOWN,
    flags: tuple[str, ...] = (),
    empty_sockets: int = 0,
) -> HardwareSpec:
    """Return the spec of what a source says, unchecked.

    domains: sets of PUs, innermost first, that lie close. Raises SpecError on too many PUs, or a PU
    listed twice.
    """
    rows = sorted(rows, key=lambda row: row.id)
    if not 1 <= len(rows) <= MAX_PUS:
        raise SpecError(f"{source} lists {len(rows)} PUs, expected 1 to {MAX_PUS}")
    if len({row.id for row in rows}) < len(rows):
        raise SpecError(f"{source} lists a PU twice")
    nodes = tuple(sorted(nodes, key=lambda node: node.id))
    rows = _place(rows, nodes, domains)
    cores: dict[Hashable, int] = {}
    sockets: dict[Hashable, int] = {}
    pus = tuple(
        PuSpec(
            id=row.id,
            core=cores.setdefault(row.core, len(cores)),
            socket=sockets.setdefault(row.socket, len(sockets)),
            node=row.node or 0,
            online=row.online,
            capacity=row.capacity,
        )
        for row in rows
    )
    online = {pu.id for pu in pus if pu.online}
    unique = {(cache.level, cache.kind, cache.pus): cache for cache in caches}
    return HardwareSpec(
        source=source,
        arch=arch,
        cpu_vendor=vendor,
        cpu_model=model,
        isa_flags=flags,
        pus=pus,
        allowed_pus=tuple(sorted(online if allowed is None else online & set(allowed))),
        nodes=nodes,
        caches=tuple(cache for _, cache in sorted(unique.items())),
        memory_bytes=sum(node.memory_bytes for node in nodes),
        groups=tuple(sorted(set(groups), key=lambda g: (g.kind, g.pus))),
        accelerators=accelerators,
        empty_sockets=empty_sockets,
    )


def add_distances(
    nodes: Sequence[NodeSpec], order: Sequence[int], matrix: Sequence[Sequence[int]]
) -> tuple[NodeSpec, ...]:
    """Return `nodes` sorted by id, with the rows of `matrix` (its rows and columns as `order`)."""
    place = {node: i for i, node in enumerate(order)}
    ranked = sorted(nodes, key=lambda node: node.id)
    return tuple(
        msgspec.structs.replace(
            node, distances=tuple(matrix[place[node.id]][place[other.id]] for other in ranked)
        )
        for node in ranked
    )


def make_cache(name: re.Match[str], pus: Iterable[int], size: int = 0) -> CacheSpec:
    """Return the cache whose level and letter a pattern found, as in `l1d`; `size` in bytes."""
    kind, shared = CACHE_KINDS[name[2]], tuple(sorted(pus))
    return CacheSpec(level=int(name[1]), kind=kind, bytes=size, line_bytes=64, pus=shared)


def scale_capacity(rates: Mapping[K, float]) -> dict[K, int]:
    """Return PU -> capacity (1024 = fastest) from the highest clock of each PU, any unit.

    Clocks within a tenth of the fastest count as equal: one kind of core has favoured ones.
    """
    top = max((rate for rate in rates.values() if rate < inf), default=0.0)
    return {pu: max(1, round(1024 * rate / top)) for pu, rate in rates.items() if rate < 0.9 * top}


def _place(
    rows: Sequence[PuRow], nodes: Sequence[NodeSpec], domains: Sequence[frozenset[int]]
) -> list[PuRow]:
    """Give PUs on no NUMA node the node in the smallest domain around them, evenly by PUs."""
    # where nodes are nested (memory of a package beside that of its dies) the smallest is home
    ranked = sorted(nodes, key=lambda node: len(node.pus), reverse=True)
    homes = {pu: node.id for node in ranked for pu in node.pus}
    load = {node.id: len(node.pus) for node in nodes if node.pus}
    placed: list[PuRow] = []
    chosen: dict[frozenset[int], int] = {}
    around = sorted(domains, key=len)
    for row in rows:
        node = homes.get(row.id, row.node)
        if node is None and load:
            domain = next((d for d in around if row.id in d and not d <= homes.keys()), None)
            inside = domain or frozenset((row.id,))
            if inside not in chosen:
                chosen[inside] = min(_reachable(inside, around, homes, load), key=load.__getitem__)
            node = chosen[inside]
            load[node] += 1
        placed.append(replace(row, node=node))
    return placed


def _reachable(
    inside: frozenset[int],
    around: Sequence[frozenset[int]],
    homes: dict[int, int],
    load: dict[int, int],
) -> Sequence[int]:
    for domain in around:
        found = sorted({homes[pu] for pu in domain if pu in homes}) if inside <= domain else []
        if found:
            return found
    return sorted(load)
