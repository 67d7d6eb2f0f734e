"""Device detector: which devices embed, with how many instances on which CPUs (WindVE §IV-C, D).

In: a HardwareSpec, which device is asked for, the CPUs a service configuration gives. Out: an
`EmbeddingPlan`: devices in order of preference, heterogeneous mode, and a note for each decision.
An accelerator is any device of torch's; `torch:cpu`, torch on CPUs of its own, where it is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.devices import AUTO, CPU, TORCH_CPU, parse_device
from dovetail.topology.binding import choose_pus
from dovetail.topology.values import AcceleratorSpec, HardwareSpec, PuSpec

ARM = ("aarch64", "arm64")
HOST_PART = 4
"""On ARM one core in so many, those with low indices, stays with the host side (WindVE §V-A5)."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A device that embeds.

    kind: `cpu`, `emulated`, or torch's name of an accelerator. pus: of each instance (its host
    side, for an accelerator), () where they are not bound.
    token_budget: most tokens of a batch. pads: whether sequences of a batch are padded to the
    longest.
    """

    name: str
    kind: str
    instances: int = 1
    pus: tuple[tuple[int, ...], ...] = ()
    token_budget: int = 1 << 30
    pads: bool = False

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

    Args:
        hardware: the machine.
        device: `auto` for all that are here, `cpu` for none, else the name of one: `cuda:1`, or
            `torch:cpu`, which is near the CPUs that torch keeps for itself.
        threads: of our kernels beside `torch:cpu`, whose CPUs it leaves; default half of them.

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
            raise DeviceError(f"there is no device {name} here (there is {there}); give cpu")
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
    emulated: Sequence[DevicePlan] = (),
    cpu_instances: int = 1,
    accelerator_instances: int = 1,
    service: ServicePlan | None = None,
    token_budget: int = 1 << 30,
) -> EmbeddingPlan:
    """Return the devices of a machine that embed.

    One kind of device: one kind of queue, heterogeneous mode off. Both kinds without
    `heterogeneous`: accelerators only (WindVE §IV-C).

    Args:
        hardware: the machine.
        heterogeneous: whether the CPU takes the accelerators' overflow.
        emulated: accelerators that are not there.
        cpu_instances: processes of the CPU, each with a model; one is best for latency.
        accelerator_instances: of each accelerator, each with a model.
        service: a service configuration, whose prefill CPUs the CPU instances get.
        token_budget: most tokens of the CPU's batches.

    Raises:
        SpecError: instances are not positive, or more than the CPUs they are to run on.
    """
    if min(cpu_instances, accelerator_instances) < 1:
        raise SpecError("a device needs one instance at least")
    accelerators = (
        *(
            DevicePlan(a.name, a.kind, accelerator_instances, (a.near,) * accelerator_instances)
            for a in hardware.accelerators
        ),
        *emulated,
    )
    notes: list[str] = []
    cpus = service_pus(service) if service else host_pus(hardware)
    if taken := {pu for a in hardware.accelerators if a.kind == TORCH_CPU for pu in a.near}:
        cpus = tuple(pu for pu in host_pus(hardware) if pu not in taken)
        if not cpus:
            return EmbeddingPlan(
                accelerators, False, ("torch has all CPUs: our kernels have none",)
            )
    groups = _divide(cpus, cpu_instances, hardware)
    cpu = DevicePlan(CPU, CPU, cpu_instances, groups, token_budget)
    if cpu_instances > 1:
        notes.append(f"{cpu_instances} CPU instances: one per machine has the lowest latency")
    spread = [group for group in groups if len(_nodes(hardware, group)) > 1]
    if spread:
        notes.append(f"{len(spread)} CPU instances have CPUs of several NUMA nodes")
    if not accelerators:
        if heterogeneous:
            notes.append("only the CPU embeds: heterogeneous mode is off")
        return EmbeddingPlan((cpu,), False, tuple(notes))
    if not heterogeneous:
        notes.append("heterogeneous mode is not asked for: the CPU does not embed")
        return EmbeddingPlan(accelerators, False, tuple(notes))
    return EmbeddingPlan((*accelerators, cpu), True, tuple(notes))


def service_pus(service: ServicePlan) -> tuple[int, ...]:
    """Return the CPUs that a service configuration gives to prompts, all processes together."""
    return tuple(dict.fromkeys(service.prefill.cpus))


def host_pus(hardware: HardwareSpec) -> tuple[int, ...]:
    """Return the CPUs a CPU instance runs on, best ones first.

    ARM: high indices first, the lowest quarter of the cores is left to the host side, and whole
    NUMA nodes come one after the other (WindVE §IV-D, §V-A5). Others: one CPU per core.
    """
    if hardware.arch not in ARM:
        return choose_pus(hardware, hardware.usable_threads)
    allowed = set(hardware.allowed_pus)
    pus = sorted((pu for pu in hardware.pus if pu.id in allowed), key=lambda pu: pu.id)
    cores = list(dict.fromkeys(pu.core for pu in pus))
    kept = set(cores[len(cores) // HOST_PART :])
    left = [pu for pu in pus if pu.core in kept]
    most = hardware.usable_threads if hardware.cpu_quota is not None else len(left)
    highest = {node: max(p.id for p in left if p.node == node) for node in {p.node for p in left}}
    left.sort(key=lambda pu: (-highest[pu.node], -pu.id))
    return tuple(pu.id for pu in _one_per_core(left)[:most])


def _one_per_core(pus: Sequence[PuSpec]) -> list[PuSpec]:
    cores: dict[int, PuSpec] = {}
    for pu in pus:
        cores.setdefault(pu.core, pu)
    return list(cores.values())


def _divide(
    pus: Sequence[int], instances: int, hardware: HardwareSpec
) -> tuple[tuple[int, ...], ...]:
    """Deal CPUs to instances in equal parts, so that none crosses nodes where that can be had."""
    if not pus:
        return ((),) * instances
    if instances > len(pus):
        raise SpecError(f"{instances} CPU instances need as many CPUs; there are {len(pus)}")
    size = len(pus) // instances
    parts = [tuple(pus[i * size : (i + 1) * size]) for i in range(instances)]
    if all(len(_nodes(hardware, part)) == 1 for part in parts):
        return tuple(parts)
    return tuple(_whole_parts(pus, instances, size, hardware) or parts)


def _whole_parts(
    pus: Sequence[int], instances: int, size: int, hardware: HardwareSpec
) -> list[tuple[int, ...]]:
    """Return parts that each lie in one node, a little smaller if need be; [] if not enough."""
    nodes = _nodes_in_order(hardware, pus)
    for least in range(size, math.ceil(size / 2) - 1, -1):
        parts = [
            tuple(node[i : i + least])
            for node in nodes
            for i in range(0, len(node) - least + 1, least)
        ]
        if len(parts) >= instances:
            return parts[:instances]
    return []


def _nodes_in_order(hardware: HardwareSpec, pus: Sequence[int]) -> list[list[int]]:
    node_of = {pu.id: pu.node for pu in hardware.pus}
    nodes: dict[int, list[int]] = {}
    for pu in pus:
        nodes.setdefault(node_of.get(pu, 0), []).append(pu)
    return list(nodes.values())


def _nodes(hardware: HardwareSpec, pus: Sequence[int]) -> set[int]:
    wanted = set(pus)
    return {pu.node for pu in hardware.pus if pu.id in wanted}
