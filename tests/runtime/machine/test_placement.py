"""Which nodes a process takes memory from, and what the kernel says of its pages then."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.runtime.app import load
from dovetail.runtime.group.ranks import plan_ranks
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.machine.placement import choose_nodes, place_pages, placing_on
from dovetail.runtime.native.tape import Team
from dovetail.topology.hardware import read_hardware

NUMBERS = {"x86_64": (239, 279), "aarch64": (236, 239)}
PREFERRED, INTERLEAVE, OF_ADDRESS = 1, 3, 2
PAGE = 4096
real = pytest.mark.skipif(platform.machine() not in NUMBERS, reason="unknown system call numbers")


def policy(address: int | None = None) -> tuple[int, int]:
    """Return (mode, mask of the first 64 nodes) of this thread, or of the pages at an address."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    flags = ctypes.c_ulong(OF_ADDRESS if address else 0)
    call, (number, _) = ctypes.CDLL(None).syscall, NUMBERS[platform.machine()]
    if call(
        number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_void_p(address), flags
    ):
        pytest.skip("this kernel has no NUMA policies")
    return mode.value, mask[0]


def homes(memory: np.ndarray) -> set[int]:
    """Return the nodes that the pages of touched memory lie on."""
    count = memory.nbytes // PAGE
    pages = (ctypes.c_void_p * count)(*(memory.ctypes.data + i * PAGE for i in range(count)))
    found = (ctypes.c_int * count)()
    _, number = NUMBERS[platform.machine()]
    if ctypes.CDLL(None).syscall(number, 0, ctypes.c_ulong(count), pages, None, found, 0):
        pytest.skip("this kernel does not tell where pages lie")
    return set(found)


@pytest.fixture
def node() -> int:
    online = Path("/sys/devices/system/node/online")
    if not online.exists():
        pytest.skip("this kernel has no NUMA nodes")
    return int(online.read_text().replace("-", ",").split(",")[0])


def phase(*cpus: int) -> PhasePlan:
    return PhasePlan(threads=max(1, len(cpus)), cpus=cpus)


@pytest.mark.parametrize(
    ("decode", "planned", "nodes"),
    [
        (phase(0, 1), None, (0,)),  # prefill may touch pages elsewhere, decode reads them
        (phase(0, 2, 4, 6), None, (0, 1, 2, 3)),
        (phase(2, 3, 4, 5), None, (1, 2)),
        (phase(), None, (0, 1, 2, 3)),  # unpinned threads run anywhere
        (phase(*range(8)), 2, (2,)),
        (phase(0, 99), None, (0,)),  # a CPU that is gone has no node
    ],
)
def test_memory_lies_where_decode_reads_it(decode, planned, nodes):
    machine = read_hardware("package:2 numa:2 core:2 pu:1")
    assert choose_nodes(decode, machine, planned) == nodes


def test_a_process_that_only_gets_one_node_needs_no_rule():
    machine = replace(read_hardware("package:2 numa:2 core:2 pu:1"), allowed_pus=(2, 3))
    for decode in (phase(2, 3), phase()):
        assert choose_nodes(decode, machine) == ()


@real
def test_pages_are_wanted_from_the_nodes_for_a_time(node):
    before = policy()
    with placing_on((node,)):
        assert policy() == (PREFERRED, 1 << node)
        with placing_on((node, node)):  # as over several: this machine may have one
            assert policy() == (INTERLEAVE, 1 << node)
        assert policy() == (PREFERRED, 1 << node)
    with placing_on(()):
        assert policy() == before
    assert policy() == before


@real
@pytest.mark.parametrize("mode", [PREFERRED, INTERLEAVE])
def test_pages_keep_their_nodes_whoever_touches_them(node, mode):
    memory = allocate(64 * PAGE)
    place_pages(memory, (node,) * mode)
    assert policy(memory.ctypes.data) == (mode, 1 << node)
    memory[:] = 1
    assert homes(memory) == {node}


@real
def test_a_loaded_model_lies_where_its_plan_says(node, make_artifact):
    phases = PhasePlan(threads=1, cpus=())
    plan = ServicePlan(prefill=phases, decode=phases, nodes=(node,))
    with load(make_artifact(), plan=plan) as app:
        kv, weights = app.engine.executor.model.kv, app.engine.executor.model.weights
        for address in (kv.k.ctypes.data, kv.v.ctypes.data, weights.address("w")):
            assert policy(address) == (PREFERRED, 1 << node)


@real
def test_threads_start_with_the_nodes_of_their_plan(node, make_artifact, monkeypatch):
    """What they touch first, stacks and packed rows, lies there too."""
    before, seen = policy(), []
    begin = Team.__init__

    def start(*arguments):
        seen.append(policy())
        begin(*arguments)

    monkeypatch.setattr(Team, "__init__", start)
    path, phases = make_artifact(), PhasePlan(threads=1, cpus=())
    for nodes in ((node,), ()):
        load(path, plan=ServicePlan(prefill=phases, decode=phases, nodes=nodes)).close()
    assert seen == [(PREFERRED, 1 << node), before]
    assert policy() == before


def test_a_rank_on_two_nodes_takes_memory_from_both():
    both, machine = phase(0, 1), read_hardware("package:1 numa:2 core:1 pu:1")
    (rank,) = plan_ranks(ServicePlan(prefill=both, decode=both), machine, None, 1)
    assert rank.nodes == (0, 1)


def test_nodes_that_are_not_there_are_only_a_warning(caplog):
    for nodes, said in (((999,), "999"), ((5000, 5001), "5000, 5001"), ((-1, 0), "-1, 0")):
        with placing_on(nodes):
            pass
        assert f"NUMA node {said};" in caplog.messages[-1]
        caplog.clear()
        place_pages(allocate(PAGE), nodes)
        assert f"NUMA node {said};" in caplog.messages[-1]
    caplog.clear()
    place_pages(allocate(PAGE), ())
    assert not caplog.messages
