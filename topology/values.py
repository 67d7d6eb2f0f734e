"""The values of HardwareSpec v1: PUs, caches, NUMA nodes and the machine that holds them.

Sizes are bytes, 0 where a source does not say; ids are the operating system's. Fields may be added
with defaults, never changed.
"""

from __future__ import annotations

import msgspec

ASSUMED_CACHE_BYTES = {1: 32 << 10, 2: 256 << 10}
"""Cache sizes assumed where a machine reports none (small enough to be safe for blocking)."""
MOST_CORE_L3_BYTES = 48 << 20
"""The largest last-level cache per core of any processor (AMD's EPYC 9184X: 768 MiB for 16).

A guest is told the size of its host's cache, of which its few cores hold only a share: of 480 MiB,
two cores read the first 64 at a cache's speed, and beyond 192 at memory's."""


class PuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One logical CPU. `core` is dense over the machine; PUs with equal `core` are SMT siblings."""

    id: int
    core: int
    socket: int
    node: int
    online: bool = True
    capacity: int = 1024  # relative speed, 1024 = the fastest kind of core


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One cache. `kind`: `data`, `instruction` or `unified`; `pus` share it; 0 bytes = unknown."""

    level: int
    kind: str
    bytes: int
    line_bytes: int
    pus: tuple[int, ...]


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One NUMA node. No PUs = memory only; `distances` as the spec orders nodes, () = unknown.

    kind: what the source calls it (`GPUMemory`, `MCDRAM`), empty for ordinary memory.
    near: the PUs that a memory-only node is attached to, () = unknown.
    """

    id: int
    pus: tuple[int, ...]
    memory_bytes: int
    distances: tuple[int, ...] = ()
    kind: str = ""
    near: tuple[int, ...] = ()


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """PUs that share something between a core and a package: `die`, `cluster`, `book`, ..."""

    kind: str
    pus: tuple[int, ...]


class AcceleratorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One device that is no CPU. `kind` is torch's name: `cuda`, `xpu`, `npu`.

    near: the PUs on its bus, () = unknown.
    """

    kind: str
    name: str
    model: str = ""
    memory_bytes: int = 0
    near: tuple[int, ...] = ()


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as seen by this process. Caches are sorted by (level, first PU), PUs by id."""

    schema: int = 1
    source: str
    arch: str  # as `uname -m`: x86_64, aarch64
    cpu_vendor: str
    cpu_model: str
    isa_flags: tuple[str, ...]  # the kernel's names, sorted: avx2, fma, avx512f, asimd, ...
    pus: tuple[PuSpec, ...]
    allowed_pus: tuple[int, ...]  # affinity mask and cpuset, online PUs only
    nodes: tuple[NodeSpec, ...]
    caches: tuple[CacheSpec, ...]
    memory_bytes: int
    memory_limit: int | None = None  # cgroup limit in bytes
    cpu_quota: float | None = None  # cgroup CPU time limit, in cores
    groups: tuple[GroupSpec, ...] = ()
    accelerators: tuple[AcceleratorSpec, ...] = ()
    empty_sockets: int = 0  # packages the source lists without a PU

    @property
    def sockets(self) -> int:
        """Number of packages, those without an online PU included where the source lists them."""
        return len({pu.socket for pu in self.pus if pu.online}) + self.empty_sockets

    @property
    def cores(self) -> int:
        """Number of physical cores with an online PU."""
        return len({pu.core for pu in self.pus if pu.online})

    @property
    def usable_threads(self) -> int:
        """Threads that run at full speed: allowed cores (not SMT siblings), cut to the quota."""
        allowed = set(self.allowed_pus)
        cores = len({pu.core for pu in self.pus if pu.id in allowed})
        return cores if self.cpu_quota is None else max(1, min(cores, int(self.cpu_quota)))

    @property
    def usable_memory(self) -> int:
        """Bytes of memory this process may hope for: the machine's, cut to the cgroup's limit."""
        return min(self.memory_bytes, self.memory_limit or self.memory_bytes)

    @property
    def memory_only_nodes(self) -> tuple[NodeSpec, ...]:
        """NUMA nodes without PUs of their own: device memory, HBM, or all their PUs are away."""
        return tuple(node for node in self.nodes if not node.pus)

    def caches_of(self, level: int) -> tuple[CacheSpec, ...]:
        """Return the data and unified caches of `level` that an allowed PU uses."""
        allowed = set(self.allowed_pus)
        return tuple(
            c
            for c in self.caches
            if c.level == level and c.kind != "instruction" and allowed & set(c.pus)
        )

    def cache_bytes(self, level: int) -> int:
        """Return the smallest data cache of `level` in bytes; assumed, or 0, where unknown."""
        sizes = [cache.bytes for cache in self.caches_of(level) if cache.bytes]
        return min(sizes) if sizes else ASSUMED_CACHE_BYTES.get(level, 0)

    @property
    def l3_shares(self) -> tuple[int, ...]:
        """Bytes of each last-level cache that the cores at it here may hold; 0 = unknown."""
        core_of = {pu.id: pu.core for pu in self.pus if pu.online}
        return tuple(
            min(c.bytes, MOST_CORE_L3_BYTES * len({core_of[pu] for pu in c.pus if pu in core_of}))
            for c in self.caches_of(3)
        )

    @property
    def l3_bytes(self) -> int:
        """Bytes of last-level cache to count on: the smallest known share, 0 without one."""
        return min(filter(None, self.l3_shares), default=0)
