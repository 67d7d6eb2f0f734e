"""Device detector: which devices embed, with how many instances on which CPUs (WindVE §IV-C, D).

In: a HardwareSpec, which device is asked for, the CPUs a service configuration gives. Out: an
`EmbeddingPlan`: devices in order of preference, heterogeneous mode, and a note for each decision.
An accelerator is any device of torch's; `torch:cpu`, torch on CPUs of its own, where it is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.machine.devices import AUTO, CPU, TORCH_CPU, parse_device
from dovetail.topology.binding import choose_pus
from dovetail.topology.values import AcceleratorSpec, HardwareSpec

ARM = ("aarch64", "arm64")
HOST_PART = 4
"""On ARM one core in so many, those with low indices, stays with the host side (WindVE §V-A5)."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A device that embeds.

    kind: `cpu`, or torch's name of an accelerator. pus: of each instance (its host side, for an
    accelerator), () where they are not bound.
    """

    name: str
    kind: str
    instances: int = 1
    pus: tuple[tuple[int, ...], ...] = ()

    @property
    def accelerator(self) -> bool:
        """Whether it is preferred to the CPU."""
        return self.kind != CPU


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """Devices that get a queue, accelerators first; whether the CPU takes the overflow."""

    devices: tuple[DevicePlan, ...]
    heterogeneous: bool
    notes: tuple[str, ...] = ()


def choose_accelerators(
    hardware: HardwareSpec, device: str, threads: int | None = None
) -> HardwareSpec:
    """Return the machine with the accelerators that `device` asks for.

    device: `auto` for all that are here, `cpu` for none, else the name of one: `cuda:1`, or
    `torch:cpu`, which is near the CPUs that torch keeps for itself. threads: of our kernels beside
    `torch:cpu`, whose CPUs it leaves; default half of them.

    Raises DeviceError where there is no such device, RequestError for what names none.
    """
    if device == AUTO:
        return hardware
    chosen: tuple[AcceleratorSpec, ...] = ()
    if device == TORCH_CPU:
        pus = host_pus(hardware)
        own = max(1, len(pus) - min(threads or len(pus) // 2, len(pus)))
        model = hardware.cpu_model
        chosen = (AcceleratorSpec(kind=TORCH_CPU, name=TORCH_CPU, model=model, near=pus[:own]),)
    elif device != CPU:
        known = dict(zip(torch_names(hardware), hardware.accelerators, strict=True))
        name = parse_device(device).name
        if name not in known:
            there = ", ".join(known) or "none"
            raise DeviceError(f"there is no device {name} here (found: {there}); use cpu")
        chosen = (known[name],)
    return replace(hardware, accelerators=chosen)


def torch_names(hardware: HardwareSpec) -> list[str]:
    """Return what torch calls the accelerators of a machine: each kind is counted from 0."""
    kinds = [device.kind for device in hardware.accelerators]
    return [
        kind if kind == TORCH_CPU else f"{kind}:{kinds[:place].count(kind)}"
        for place, kind in enumerate(kinds)
    ]


def detect_devices(
    hardware: HardwareSpec,
    *,
    heterogeneous: bool = True,
    cpu_instances: int = 1,
    service: ServicePlan | None = None,
) -> EmbeddingPlan:
    """Return the devices of a machine that embed, an instance on each accelerator.

    One kind of device: one kind of queue, heterogeneous mode off. Both kinds without
    `heterogeneous`: accelerators only (WindVE §IV-C). `cpu_instances` get the prefill CPUs of a
    service configuration; one is best for latency.

    Raises SpecError where they are not positive, or more than the CPUs they are to run on.
    """
    if cpu_instances < 1:
        raise SpecError("the CPU needs at least one instance")
    accelerators = tuple(DevicePlan(a.name, a.kind, 1, (a.near,)) for a in hardware.accelerators)
    cpus = tuple(dict.fromkeys(service.prefill.cpus)) if service else host_pus(hardware)
    if taken := {pu for a in hardware.accelerators if a.kind == TORCH_CPU for pu in a.near}:
        cpus = tuple(pu for pu in host_pus(hardware) if pu not in taken)
        if not cpus:
            all_taken = "torch has all CPUs: our kernels have none"
            return EmbeddingPlan(accelerators, False, (all_taken,))
    groups = _divide(cpus, cpu_instances, hardware)
    if accelerators and not heterogeneous:
        alone = "heterogeneous mode is not asked for: the CPU does not embed"
        return EmbeddingPlan(accelerators, False, (alone,))
    spread = sum(len(_by_node(hardware, group)) > 1 for group in groups)
    said = {
        f"{cpu_instances} CPU instances: one per machine has the lowest latency": cpu_instances > 1,
        f"{spread} CPU instances have CPUs of several NUMA nodes": spread,
        "only the CPU embeds: heterogeneous mode is off": heterogeneous and not accelerators,
    }
    notes = tuple(note for note, holds in said.items() if holds)
    cpu = DevicePlan(CPU, CPU, cpu_instances, groups)
    return EmbeddingPlan((*accelerators, cpu), bool(accelerators), notes)


def host_pus(hardware: HardwareSpec) -> tuple[int, ...]:
    """Return the CPUs a CPU instance runs on, best ones first.

    ARM: high indices first, the lowest quarter of the cores is left to the host side, and whole
    NUMA nodes come one after the other (WindVE §IV-D, §V-A5). Others: one CPU per core.
    """
    if hardware.arch not in ARM:
        return choose_pus(hardware, hardware.usable_threads)
    pus = sorted((pu for pu in hardware.pus if pu.id in hardware.allowed_pus), key=lambda pu: pu.id)
    cores = list(dict.fromkeys(pu.core for pu in pus))
    left = [pu for pu in pus if pu.core in cores[len(cores) // HOST_PART :]]
    most = hardware.usable_threads if hardware.cpu_quota is not None else len(left)
    highest = {pu.node: pu.id for pu in left}  # ids rise
    left.sort(key=lambda pu: (-highest[pu.node], -pu.id))
    first = {pu.core: pu.id for pu in reversed(left)}  # one of each core, the first
    return tuple(pu.id for pu in left if first[pu.core] == pu.id)[:most]


def _divide(
    pus: Sequence[int], instances: int, hardware: HardwareSpec
) -> tuple[tuple[int, ...], ...]:
    """Deal CPUs to instances in equal parts; a little smaller where none crosses nodes then."""
    if not pus:
        return ((),) * instances
    if instances > len(pus):
        raise SpecError(f"{instances} CPU instances need as many CPUs; there are {len(pus)}")
    size, nodes = len(pus) // instances, _by_node(hardware, pus)
    for least in range(size, (size - 1) // 2, -1):
        whole = [
            tuple(node[i : i + least])
            for node in nodes
            for i in range(0, len(node) - least + 1, least)
        ]
        if len(whole) >= instances:
            return tuple(whole[:instances])
    return tuple(tuple(pus[i * size : (i + 1) * size]) for i in range(instances))


def _by_node(hardware: HardwareSpec, pus: Sequence[int]) -> list[list[int]]:
    """Return the CPUs of each NUMA node, in the order that they come in."""
    node_of = {pu.id: pu.node for pu in hardware.pus}
    nodes: dict[int, list[int]] = {}
    for pu in pus:
        nodes.setdefault(node_of.get(pu, 0), []).append(pu)
    return list(nodes.values())
