from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dovetail.ir.errors import SpecError
from dovetail.topology.hardware import (
    HardwareSpec,
    check_hardware,
    dump_hardware,
    read_hardware,
)
from dovetail.topology.values import MOST_CORE_L3_BYTES, AcceleratorSpec, GroupSpec
from tests.topology.snapshot import Machine, write


def test_two_sockets_with_smt(tmp_path: Path) -> None:
    spec = read_hardware(root=Machine(sockets=2, cores=4, smt=2).build(tmp_path))
    assert (spec.sockets, spec.cores, len(spec.pus), spec.usable_threads) == (2, 8, 16, 8)
    assert [n.pus for n in spec.nodes] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert spec.nodes[0].distances == (10, 21)
    assert spec.nodes[0].memory_bytes == 8192 << 10
    assert spec.memory_bytes == 16384 << 10
    assert {pu.core for pu in spec.pus if pu.id in (3, 11)} == {3}
    assert spec.cache_bytes(1) == 48 << 10  # the instruction cache is smaller and not counted
    assert [c.pus for c in spec.caches_of(3)] == [n.pus for n in spec.nodes]
    assert "avx2" in spec.isa_flags and spec.arch == "x86_64"
    assert (spec.cpu_vendor, spec.cpu_model) == ("Acme", "Acme 9000")


def test_offline_and_disallowed_pus(tmp_path: Path) -> None:
    spec = read_hardware(root=Machine(cores=4, online="0,2-3", affinity="1-2").build(tmp_path))
    assert spec.allowed_pus == (2,)
    assert [pu.online for pu in spec.pus] == [True, False, True, True]
    assert (spec.cores, spec.usable_threads) == (3, 1)
    assert 1 not in spec.caches_of(3)[0].pus


def test_a_guest_counts_on_its_cores_share_of_the_cache_that_it_is_shown(tmp_path: Path) -> None:
    machine = read_hardware(root=Machine(sockets=2, cores=4, smt=2).build(tmp_path))

    def shown(*sizes: int) -> HardwareSpec:
        caches = [c for c in machine.caches if c.level != 3]
        last = zip(machine.caches_of(3), sizes, strict=True)
        caches += [msgspec.structs.replace(cache, bytes=size) for cache, size in last]
        return msgspec.structs.replace(machine, caches=tuple(caches))

    host = shown(480 << 20, 0)
    assert host.l3_shares == (4 * MOST_CORE_L3_BYTES, 0)
    assert (host.l3_bytes, host.cache_bytes(3)) == (4 * MOST_CORE_L3_BYTES, 480 << 20)
    assert shown(32 << 20, 480 << 20).l3_bytes == 32 << 20
    assert shown(0, 0).l3_bytes == 0


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_machine_of_any_width(tmp_path: Path, n: int) -> None:
    spec = read_hardware(root=Machine(cores=n, smt=2).build(tmp_path))
    assert (spec.usable_threads, len(spec.allowed_pus)) == (n, 2 * n)


def test_without_sys_the_processors_of_cpuinfo_stand(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/cpuinfo": "processor : 0\nFeatures : fp asimd\nCPU implementer : 0x41\n"
            "CPU part : 0xd0c\n\nprocessor : 1\n",
            "proc/meminfo": "MemTotal: 100 kB",
        },
    )
    spec = read_hardware(root=tmp_path)
    assert (spec.arch, spec.cpu_vendor, spec.cpu_model) == ("aarch64", "ARM", "0x41 part 0xd0c")
    assert spec.isa_flags == ("asimd", "fp")
    assert spec.allowed_pus == (0, 1)
    assert spec.nodes[0].pus == (0, 1)
    assert (spec.cache_bytes(1), spec.cache_bytes(2), spec.cache_bytes(3)) == (32768, 262144, 0)


def test_memory_only_node(tmp_path: Path) -> None:
    machine = Machine(
        extra={
            "sys/devices/system/node/online": "0-1",
            "sys/devices/system/node/node1/cpulist": "",
            "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 4096 kB",
        }
    )
    spec = read_hardware(root=machine.build(tmp_path))
    assert (spec.nodes[1].pus, spec.nodes[1].memory_bytes) == ((), 4096 << 10)


def test_text_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    """As of lscpu under an old locale."""
    file = tmp_path / "cpu.json"
    file.write_bytes(b'{"lscpu": [{"field": "Model name:", "data": "Caf\xe9"}]}')
    with pytest.raises(SpecError, match=r"cpu\.json is neither output of lscpu -J"):
        read_hardware(file)


def test_json_round_trip(tmp_path: Path) -> None:
    spec = read_hardware(root=Machine(sockets=2, smt=2).build(tmp_path / "machine"))
    path = tmp_path / "hardware.json"
    path.write_bytes(dump_hardware(spec))
    assert read_hardware(path) == spec
    assert read_hardware(str(path)) == spec


def test_this_machine() -> None:
    spec = read_hardware()
    assert set(spec.allowed_pus) <= os.sched_getaffinity(os.getpid())
    assert 1 <= spec.usable_threads <= len(spec.allowed_pus)
    assert 0 < spec.usable_memory <= spec.memory_bytes


BROKEN_FILES = {
    "sys/devices/system/cpu/online": "zero",
    "sys/devices/system/cpu/present": "3-1",
    "sys/devices/system/cpu/cpu0/topology/physical_package_id": "east",
    "sys/devices/system/cpu/cpu0/cache/index0/size": "large",
    "sys/devices/system/cpu/cpu0/cache/index0/level": "99",
    "sys/devices/system/node/node0/cpulist": "0-99999999",
    "sys/devices/system/cpu/cpu1/cpu_capacity": "-5",
    "proc/meminfo": "MemFree: 1 kB",
    "proc/cpuinfo": "",
    "proc/self/status": "Cpus_allowed_list:\t7",
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_nonsense_in_a_file_is_a_spec_error(tmp_path: Path, name: str) -> None:
    root = Machine(extra={name: BROKEN_FILES[name]}).build(tmp_path)
    if name == "proc/cpuinfo":
        (root / name).unlink()
    with pytest.raises(SpecError):
        read_hardware(root=root)


def _bad(spec: HardwareSpec, **changes: object) -> HardwareSpec:
    return msgspec.structs.replace(spec, **changes)


def test_impossible_machines_are_refused(tmp_path: Path) -> None:
    spec = read_hardware(root=Machine().build(tmp_path))
    cache, node, pu = spec.caches[0], spec.nodes[0], spec.pus[0]
    replace = msgspec.structs.replace
    impossible = [
        _bad(spec, schema=2),
        _bad(spec, pus=()),
        _bad(spec, pus=(pu, pu)),
        _bad(spec, pus=(replace(pu, core=-1), spec.pus[1])),
        _bad(spec, allowed_pus=()),
        _bad(spec, allowed_pus=(0, 5)),
        _bad(spec, allowed_pus=(1, 0)),
        _bad(spec, caches=(replace(cache, bytes=-1),)),
        _bad(spec, caches=(replace(cache, pus=(9,)),)),
        _bad(spec, nodes=(replace(node, id=4),)),
        _bad(spec, nodes=(node, node)),
        _bad(spec, nodes=(replace(node, distances=(10, 20)),)),
        _bad(spec, memory_bytes=-1),
        _bad(spec, cpu_quota=0.0),
    ]
    group = GroupSpec(kind="die", pus=(9,))
    impossible += [
        _bad(spec, groups=(group,)),
        _bad(spec, empty_sockets=-1),
        _bad(spec, accelerators=(AcceleratorSpec(kind="cuda", name="cuda0", near=(9,)),)),
    ]
    for machine in impossible:
        with pytest.raises(SpecError, match="hardware description of here"):
            check_hardware(machine, "here")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', "[" * 100_000, "\x00"])
def test_files_that_are_no_spec(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"hardware\.json"):
        read_hardware(path)


def test_missing_file() -> None:
    with pytest.raises(SpecError, match="cannot read hardware file"):
        read_hardware("/nonexistent/hardware.json")


def test_clusters_dies_and_kinds_of_cores(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    extra = {"sys/devices/cpu_atom/cpus": "2-3", "sys/devices/cpu_core/cpus": "0-1"}
    for pu in range(4):
        extra[f"{cpu}/cpu{pu}/topology/package_cpus_list"] = "0-3"
        extra[f"{cpu}/cpu{pu}/topology/die_cpus_list"] = "0-3"
        extra[f"{cpu}/cpu{pu}/topology/cluster_cpus_list"] = "2-3" if pu > 1 else str(pu)
        clock = 3900000 if pu > 1 else 5000000 + pu
        extra[f"{cpu}/cpu{pu}/cpufreq/cpuinfo_max_freq"] = str(clock)
    spec = read_hardware(root=Machine(cores=4, extra=extra).build(tmp_path))
    assert [(g.kind, g.pus) for g in spec.groups] == [("cluster", (2, 3))]
    assert [pu.capacity for pu in spec.pus] == [1024, 1024, 799, 799]
