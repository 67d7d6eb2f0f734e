from __future__ import annotations

import msgspec
import pytest

from dovetail.topology.configuration import Configuration, Process, cross_section, memory_homes
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters
from dovetail.topology.resources import MachineModel, Profile, join_times
from dovetail.topology.values import HardwareSpec


def profile(spec: HardwareSpec, *teams: tuple[int, ...]) -> Profile:
    homes = memory_homes(spec)
    processes = (Process(team, tuple(sorted({homes[pu] for pu in team}))) for team in teams)
    return MachineModel(spec, default_parameters(spec)).profile(Configuration(tuple(processes)))


def test_the_slowest_resource_decides_and_near_ones_add_a_little() -> None:
    assert join_times([]) == join_times([0.0]) == 0.0
    assert join_times([3.0]) == 3.0
    assert join_times([2.0, 1.0]) == pytest.approx(2.0 * 1.0625**0.25)
    assert 1.18 < join_times([1.0, 1.0]) < 1.2


def test_a_latent_group_serves_three_cores() -> None:
    spec = read_hardware("package:2 numa:1 cluster:8 core:4")
    spread = tuple(range(0, 32, 4))  # one core of each cluster
    packed = tuple(range(8))  # all cores of two
    assert profile(spec, packed).seconds_per_byte > 1.2 * profile(spec, spread).seconds_per_byte


def test_hidden_groups_are_assumed_only_where_the_class_has_them() -> None:
    spec = read_hardware("package:2 numa:1 core:32")
    visible = msgspec.structs.replace(spec, arch="x86_64")
    packed, spread = tuple(range(8)), tuple(range(0, 32, 4))
    assert profile(spec, packed).seconds_per_byte > profile(spec, spread).seconds_per_byte
    assert profile(visible, packed).seconds_per_byte == profile(visible, spread).seconds_per_byte


def test_memory_nodes_share_the_package_and_links_cost() -> None:
    spec = read_hardware("package:2 numa:2 core:16")
    near = profile(spec, *(tuple(range(i, i + 16)) for i in range(0, 64, 16)))
    packages = profile(spec, tuple(range(32)), tuple(range(32, 64)))
    whole = profile(spec, tuple(range(64)))
    one_node = profile(spec, tuple(range(16)))
    assert near.seconds_per_byte <= packages.seconds_per_byte < whole.seconds_per_byte
    assert one_node.seconds_per_byte > 3 * near.seconds_per_byte


def test_spans_and_teams() -> None:
    spec = read_hardware("package:2 l3:2 core:4 pu:2")
    found = profile(spec, tuple(range(12)), tuple(range(12, 16)))
    assert (found.processes, found.largest_team, found.l3_groups) == (2, 12, 2)
    assert profile(spec, tuple(range(16))).l3_groups == 2
    nodes = read_hardware("package:2 numa:2 core:4")
    assert profile(nodes, tuple(range(12))).l3_groups == 3  # NUMA nodes, no L3 being known


def test_an_idle_pu_keeps_the_system_away() -> None:
    spec = read_hardware("core:8")
    assert profile(spec, tuple(range(7))).preemption == 0
    assert 0 < profile(spec, tuple(range(8))).preemption < 0.05
    smt = read_hardware("core:4 pu:2")
    one_per_core = cross_section(build_tree(smt).tree.remove(1, 2), 0, memory_homes(smt))
    assert MachineModel(smt, default_parameters(smt)).profile(one_per_core).preemption == 0


def test_siblings_that_a_file_gives_different_caches_are_one_core() -> None:
    spec = read_hardware("package:1 l3:2 core:2 pu:2")
    odd = [
        msgspec.structs.replace(c, pus=pus)
        for c, pus in zip(spec.caches, ((0,), (1, 2, 3)), strict=False)
    ]
    split = msgspec.structs.replace(spec, caches=tuple(odd))
    assert 0 < profile(split, (0, 1)).seconds_per_byte < 1
