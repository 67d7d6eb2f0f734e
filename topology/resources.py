"""The shared resources of a machine, and how fast a configuration is served by them.

In: a HardwareSpec, MachineParameters, configurations. Out: a Profile per configuration: seconds
per byte and per flop of a model cut evenly over its processes, and what its synchronising costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.topology.configuration import Configuration, Process
from dovetail.topology.parameters import MachineParameters
from dovetail.topology.values import HardwareSpec

SMOOTHNESS = 4.0
"""Exponent of the norm that joins resources: one that is half as busy adds 1.5 %."""

LARGEST_CLUSTER = 8
"""Cores of a group that counts as sharing more than a die's fabric."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What of a configuration does not depend on the step.

    l3_groups: the most L3 groups that one process spans (NUMA nodes where no L3 is known).
    preemption: share of barriers at which some thread is found put aside by the system.
    """

    processes: int
    largest_team: int
    l3_groups: int
    seconds_per_byte: float
    seconds_per_flop: float
    preemption: float


@dataclass(frozen=True, slots=True)
class _Shared:
    """One kind of resource: which one each PU uses, bytes/s of each, and what queueing adds."""

    of: Mapping[int, int]
    rate: Mapping[int, float]
    queueing: float

    def seconds(self, resource: int, load: float, cores: float, core_rate: float) -> float:
        """Return seconds for `load` (a share of all bytes) that `cores` cores draw at once."""
        rate = self.rate[resource]
        excess = max(0.0, cores * core_rate / rate - 1)
        return load / rate * (1 + self.queueing * excess)


def join_times(parts: Iterable[float]) -> float:
    """Return a little more than the largest part: others that are nearly as busy add to it."""
    values = [part for part in parts if part > 0]
    top = max(values, default=0.0)
    if not top:
        return 0.0
    return float(top * sum((value / top) ** SMOOTHNESS for value in values) ** (1 / SMOOTHNESS))


class MachineModel:
    """Knows what each PU shares with which others, and what that can serve."""

    def __init__(self, spec: HardwareSpec, parameters: MachineParameters) -> None:
        self._figures = parameters
        self._quota = spec.cpu_quota
        self._allowed = len(spec.allowed_pus)
        self._core = {pu.id: pu.core for pu in spec.pus}
        self._speed = {pu.core: pu.capacity / 1024 for pu in spec.pus}
        self._node_socket = {pu.node: pu.socket for pu in spec.pus}
        self._l3 = self._l3_groups(spec)
        self._latent = self._latent_groups(spec)
        self._nodes = self._memory_nodes(spec)

    def profile(self, configuration: Configuration) -> Profile:
        """Work out the rates of a configuration; its slowest process sets the pace."""
        processes = configuration.processes
        teams = [{self._core[pu] for pu in process.pus} for process in processes]
        threads = sum(len(process.pus) for process in processes)
        throttle = min(1.0, self._quota / threads) if self._quota else 1.0
        rate = min(self._team_speed(processes)) * self._figures.core_flops.value
        return Profile(
            processes=len(processes),
            largest_team=max(len(process.pus) for process in processes),
            l3_groups=max(self._spans(process) for process in processes),
            seconds_per_byte=max(self._memory_times(processes, teams)) / throttle,
            seconds_per_flop=1 / (len(processes) * rate * throttle),
            preemption=self._preemption(threads),
        )

    @property
    def node_rates(self) -> Mapping[int, float]:
        """Bytes/s of each memory node that has PUs."""
        return self._nodes.rate

    def _team_speed(self, processes: Sequence[Process]) -> list[float]:
        """Return the cores' worth of each process: threads on one core share it evenly."""
        threads = Counter(self._core[pu] for process in processes for pu in process.pus)
        return [
            sum(self._speed[self._core[pu]] / threads[self._core[pu]] for pu in process.pus)
            for process in processes
        ]

    def _spans(self, process: Process) -> int:
        if not self._l3.of:
            return len(process.nodes)
        return len({self._l3.of.get(pu, -1) for pu in process.pus})

    def _preemption(self, threads: int) -> float:
        """As long as a PU is idle the system's own threads run there and disturb none of ours."""
        if threads < self._allowed:
            return 0.0
        return float(1 - (1 - self._figures.preemption.value) ** threads)

    def _memory_times(self, processes: Sequence[Process], teams: Sequence[set[int]]) -> list[float]:
        """Return for each process the seconds per byte that the whole model reads."""
        share = 1 / len(processes)
        core_rate = self._figures.core_bandwidth.value
        owners = Counter(core for team in teams for core in team)
        core_load, node_load, node_cores, link_load = (
            defaultdict[int, float](float) for _ in range(4)
        )
        for team in teams:
            for core in team:
                core_load[core] += share / len(team)
        loads = [_team_loads(processes, kind, self._core) for kind in (self._l3, self._latent)]
        for process, team in zip(processes, teams, strict=True):
            spread = len(process.nodes)  # its pages lie on all its nodes evenly
            for node in process.nodes:
                node_load[node] += share / spread
                node_cores[node] += sum(1 / owners[core] for core in team) / spread
                link_load[node] += share * (spread - 1) / spread**2
        times = []
        for process, team in zip(processes, teams, strict=True):
            link = self._link_rate(process)
            parts = [max(core_load[core] for core in team) / core_rate]
            for kind, load in zip((self._l3, self._latent), loads, strict=True):
                # a core draws through one of its PUs, should a file give them different caches
                for resource in {kind.of[pu] for pu in process.pus if pu in kind.of} & load.keys():
                    parts.append(kind.seconds(resource, *load[resource], core_rate))
            for node in process.nodes:
                parts.append(
                    self._nodes.seconds(node, node_load[node], node_cores[node], core_rate)
                )
                parts.append(link_load[node] / link)
            times.append(join_times(parts))
        return times

    def _link_rate(self, process: Process) -> float:
        sockets = {self._node_socket[node] for node in process.nodes}
        figures = self._figures
        return (figures.package_link if len(sockets) > 1 else figures.node_link).value

    def _l3_groups(self, spec: HardwareSpec) -> _Shared:
        of = _number(cache.pus for cache in spec.caches if cache.level == 3)
        port, slices = self._figures.l3_bandwidth.value, self._figures.l3_core_bandwidth.value
        rate = {g: max(port, slices * n) for g, n in _count_cores(of, self._core).items()}
        return _Shared(of, rate, self._figures.node_queueing.value)

    def _latent_groups(self, spec: HardwareSpec) -> _Shared:
        """Clusters that the system shows, else runs of cores where the class has hidden ones."""
        shown = [
            set(group.pus)
            for group in spec.groups
            if 1 < len({self._core[pu] for pu in group.pus}) <= LARGEST_CLUSTER
        ]
        inner = [s for s in shown if not any(other < s for other in shown)]
        of = _number(inner) if inner else self._hidden_groups(spec)
        served = self._figures.latent_cores.value * self._figures.core_bandwidth.value
        rate = dict.fromkeys(of.values(), served)
        return _Shared(of, rate, self._figures.latent_queueing.value)

    def _hidden_groups(self, spec: HardwareSpec) -> dict[int, int]:
        size = int(self._figures.latent_size.value)
        outer = self._l3.of or {pu.id: pu.node for pu in spec.pus}
        if not size or max(_count_cores(outer, self._core).values()) <= LARGEST_CLUSTER:
            return {}
        ranks: dict[int, dict[int, int]] = defaultdict(dict)
        numbers: dict[tuple[int, int], int] = {}
        found = {}
        for pu in spec.pus:
            if pu.id in outer:
                inside = ranks[outer[pu.id]]
                rank = inside.setdefault(pu.core, len(inside))
                found[pu.id] = numbers.setdefault((outer[pu.id], rank // size), len(numbers))
        return found

    def _memory_nodes(self, spec: HardwareSpec) -> _Shared:
        """Nodes share their package's bandwidth; the later half lies farther from its I/O."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for socket, node in sorted({(pu.socket, pu.node) for pu in spec.pus}):
            nodes[socket].append(node)
        rate: dict[int, float] = {}
        for inside in nodes.values():
            for rank, node in enumerate(inside):
                far = len(inside) > 1 and rank >= (len(inside) + 1) // 2
                share = self._figures.far_node_share.value if far else 1.0
                bandwidth = self._figures.package_bandwidth.value / len(inside) * share
                rate[node] = max(rate.get(node, 0.0), bandwidth)
        of = {pu.id: pu.node for pu in spec.pus}
        return _Shared(of, rate, self._figures.node_queueing.value)


def _number(sets: Iterable[Iterable[int]]) -> dict[int, int]:
    return {pu: number for number, pus in enumerate(sets) for pu in pus}


def _count_cores(of: Mapping[int, int], core: Mapping[int, int]) -> dict[int, int]:
    cores: dict[int, set[int]] = defaultdict(set)
    for pu, resource in of.items():
        cores[resource].add(core[pu])
    return {resource: len(members) for resource, members in cores.items()}


def _team_loads(
    processes: Sequence[Process], kind: _Shared, core: Mapping[int, int]
) -> dict[int, tuple[float, int]]:
    """Return resource -> (share of all bytes, cores that draw it); each core draws equally much."""
    share: dict[int, float] = defaultdict(float)
    cores: dict[int, set[int]] = defaultdict(set)
    for process in processes:
        own = 1 / len(processes) / len({core[pu] for pu in process.pus})
        for number, pu in {core[pu]: pu for pu in process.pus}.items():
            if pu in kind.of:
                share[kind.of[pu]] += own
                cores[kind.of[pu]].add(number)
    return {resource: (share[resource], len(cores[resource])) for resource in share}
