"""Which PUs a team of threads is pinned to.

In: a HardwareSpec and a number of threads. Out: PU ids, one per thread.
"""

from __future__ import annotations

from dovetail.ir.errors import SpecError
from dovetail.topology.values import HardwareSpec, PuSpec


def choose_pus(spec: HardwareSpec, threads: int) -> tuple[int, ...]:
    """Return `threads` different allowed PUs: one per core first, then SMT siblings.

    Faster kinds of core come first; among equals PUs of one socket, NUMA node and last-level
    cache stay together, so that a small team shares a cache and a memory node.

    Raises:
        SpecError: `threads` is not between 1 and the number of allowed PUs.
    """
    if not 1 <= threads <= len(spec.allowed_pus):
        raise SpecError(
            f"cannot bind {threads} threads: this machine allows 1 to {len(spec.allowed_pus)}"
        )
    return tuple(pu.id for pu in _ranked(spec)[:threads])


def _ranked(spec: HardwareSpec) -> list[PuSpec]:
    allowed = set(spec.allowed_pus)
    last_level = max((cache.level for cache in spec.caches), default=0)
    group = {pu: cache.pus for cache in spec.caches_of(last_level) for pu in cache.pus}
    seen: dict[int, int] = {}
    ranked = []
    for pu in sorted((p for p in spec.pus if p.id in allowed), key=lambda p: p.id):
        turn = seen.setdefault(pu.core, 0)  # 0 for the first PU of a core, 1 for its sibling
        seen[pu.core] += 1
        cache = group.get(pu.id, ())
        ranked.append(((turn, -pu.capacity, pu.socket, pu.node, cache, pu.core, pu.id), pu))
    return [pu for _, pu in sorted(ranked, key=lambda item: item[0])]
