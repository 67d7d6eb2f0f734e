"""Which devices embed on machines of several kinds, and on which CPUs."""

from __future__ import annotations

import msgspec
import pytest

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.embed.devices import (
    choose_accelerators,
    detect_devices,
    host_pus,
    torch_names,
)
from dovetail.topology.synthetic import read_synthetic
from dovetail.topology.values import AcceleratorSpec, HardwareSpec

X86 = read_synthetic("package:2 numa:1 core:24 pu:2")
KUNPENG = read_synthetic("package:2 numa:2 core:32 pu:1")
ARM = msgspec.structs.replace(KUNPENG, arch="aarch64")


def with_gpus(hardware: HardwareSpec, count: int) -> HardwareSpec:
    gpus = tuple(AcceleratorSpec(kind="cuda", name=f"cuda{i}") for i in range(count))
    return msgspec.structs.replace(hardware, accelerators=gpus)


def test_one_kind_of_device_turns_heterogeneous_mode_off() -> None:
    plan = detect_devices(X86)
    assert [device.name for device in plan.devices] == ["cpu"]
    assert not plan.heterogeneous
    assert "heterogeneous mode is off" in plan.notes[0]


def test_both_kinds_get_queues_only_where_that_is_asked_for() -> None:
    plan = detect_devices(with_gpus(X86, 2))
    assert [device.name for device in plan.devices] == ["cuda0", "cuda1", "cpu"]
    assert plan.heterogeneous and not plan.notes
    only = detect_devices(with_gpus(X86, 2), heterogeneous=False)
    assert [device.kind for device in only.devices] == ["cuda", "cuda"]
    assert not only.heterogeneous


def test_any_accelerator_of_torch_counts_and_one_may_be_named() -> None:
    npu = AcceleratorSpec(kind="npu", name="npu0")
    mixed = with_gpus(X86, 2)
    mixed = msgspec.structs.replace(mixed, accelerators=(*mixed.accelerators, npu))
    assert torch_names(mixed) == ["cuda:0", "cuda:1", "npu:0"]
    assert choose_accelerators(mixed, "auto") is mixed
    assert choose_accelerators(mixed, "cpu").accelerators == ()
    for device, name in (("cuda:1", "cuda1"), ("cuda", "cuda0"), ("npu", "npu0")):
        assert [a.name for a in choose_accelerators(mixed, device).accelerators] == [name]
    plan = detect_devices(choose_accelerators(mixed, "npu"))
    assert [device.kind for device in plan.devices] == ["npu", "cpu"] and plan.heterogeneous
    with pytest.raises(DeviceError, match="no device xpu:3 here"):
        choose_accelerators(mixed, "xpu:3")
    assert "torch:cpu" not in torch_names(choose_accelerators(X86, "auto"))


def test_torch_on_the_cpu_leaves_no_cpu_where_there_is_one() -> None:
    one = msgspec.structs.replace(X86, allowed_pus=(3,))
    plan = detect_devices(choose_accelerators(one, "torch:cpu"))
    assert [device.name for device in plan.devices] == ["torch:cpu"] and not plan.heterogeneous
    assert "torch has all CPUs" in plan.notes[0]


def test_arm_keeps_a_quarter_of_low_cores_for_the_host_and_starts_at_the_top() -> None:
    pus = host_pus(ARM)
    assert len(pus) == 96 and min(pus) == 32 and pus[0] == 127  # three of four nodes
    assert list(pus) == sorted(pus, reverse=True)
    assert len(host_pus(X86)) == 48 and min(host_pus(X86)) == 0


def test_instances_do_not_cross_nodes_on_arm() -> None:
    for instances in (2, 3, 4, 5, 6, 7):
        (cpu,) = detect_devices(ARM, cpu_instances=instances).devices
        assert len(cpu.pus) == instances
        assert len({len(part) for part in cpu.pus}) == 1
        assert len({pu for part in cpu.pus for pu in part}) == sum(map(len, cpu.pus))
        node_of = {pu.id: pu.node for pu in ARM.pus}
        assert all(len({node_of[pu] for pu in part}) == 1 for part in cpu.pus)
    (one,) = detect_devices(ARM).devices
    assert one.pus == (host_pus(ARM),)
    assert any("several NUMA nodes" in note for note in detect_devices(ARM).notes)


def test_a_service_configuration_pins_the_cpu_instance() -> None:
    phase = PhasePlan(threads=3, cpus=(5, 6, 7))
    service = ServicePlan(prefill=phase, decode=phase)
    (cpu,) = detect_devices(X86, service=service).devices
    assert cpu.pus == ((5, 6, 7),)
    loose = ServicePlan(prefill=PhasePlan(threads=2, cpus=()), decode=phase)
    assert detect_devices(X86, service=loose, cpu_instances=2).devices[0].pus == ((), ())


def test_quota_and_mask_hold_on_arm() -> None:
    small = msgspec.structs.replace(ARM, allowed_pus=tuple(range(8)), cpu_quota=2.0)
    assert host_pus(small) == (7, 6)
    assert host_pus(msgspec.structs.replace(ARM, allowed_pus=(3,))) == (3,)


@pytest.mark.parametrize("instances", [0, 97])
def test_impossible_instances_are_refused(instances: int) -> None:
    with pytest.raises(SpecError, match="instance"):
        detect_devices(ARM, cpu_instances=instances)
