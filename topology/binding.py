"""Which PUs a team of threads is pinned to.

In: a HardwareSpec and a number of threads. Out: PU ids, one per thread. And whether a plan of PUs
that was made for another machine leaves many of this one's idle.
"""

from __future__ import annotations

from collections import Counter

from dovetail.ir.errors import SpecError
from dovetail.topology.values import HardwareSpec


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
    allowed = set(spec.allowed_pus)
    last_level = max((cache.level for cache in spec.caches), default=0)
    group = {pu: cache.pus for cache in spec.caches_of(last_level) for pu in cache.pus}
    seen: Counter[int] = Counter()  # PUs of each core, so that siblings come in later turns
    ranked = []
    for pu in sorted((p for p in spec.pus if p.id in allowed), key=lambda p: p.id):
        cache = group.get(pu.id, ())
        turn = seen[pu.core]
        ranked.append((turn, -pu.capacity, pu.socket, pu.node, cache, pu.core, pu.id))
        seen[pu.core] += 1
    return tuple(pu for *_, pu in sorted(ranked)[:threads])


def describe_idle(planned: HardwareSpec | None, hardware: HardwareSpec) -> str | None:
    """Return a sentence where a plan for the machine `planned` leaves cores idle on a larger one.

    None where it does not, or the machine is not known.
    """
    if planned is None or planned.usable_threads >= hardware.usable_threads:
        return None
    cores = "1 core" if planned.usable_threads == 1 else f"{planned.usable_threads} cores"
    return (
        f"the artifact was planned for {cores}, and this process may use "
        f"{hardware.usable_threads}: compile it again here, or say how many threads to use"
    )
