from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dovetail.ir.errors import SpecError
from dovetail.topology.binding import choose_pus, describe_idle
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.values import NodeSpec, PuSpec
from tests.topology.snapshot import Machine

EIGHT = read_hardware("core:8")


def test_cores_before_siblings(tmp_path: Path) -> None:
    spec = read_hardware(root=Machine(sockets=2, cores=2, smt=2).build(tmp_path))
    assert choose_pus(spec, 2) == (0, 1)  # one socket
    assert choose_pus(spec, 4) == (0, 1, 2, 3)
    assert choose_pus(spec, 8) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_only_allowed_pus(tmp_path: Path) -> None:
    spec = read_hardware(root=Machine(cores=4, smt=2, affinity="1,5-7").build(tmp_path))
    assert choose_pus(spec, 3) == (1, 6, 7)
    assert choose_pus(spec, 4) == (1, 6, 7, 5)


def test_fast_cores_first(tmp_path: Path) -> None:
    capacities = {f"sys/devices/system/cpu/cpu{pu}/cpu_capacity": "512" for pu in (0, 1)}
    spec = read_hardware(root=Machine(cores=4, extra=capacities).build(tmp_path))
    assert choose_pus(spec, 3) == (2, 3, 0)


@pytest.mark.parametrize("threads", [-1, 0, 3])
def test_impossible_counts(tmp_path: Path, threads: int) -> None:
    spec = read_hardware(root=Machine(cores=2).build(tmp_path))
    with pytest.raises(SpecError, match=f"cannot bind {threads} threads"):
        choose_pus(spec, threads)


@st.composite
def machines(draw: st.DrawFn) -> HardwareSpec:
    cores = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    allowed = draw(st.sets(st.sampled_from(range(len(cores))), min_size=1))
    pus = tuple(PuSpec(id=i, core=c, socket=c % 2, node=0) for i, c in enumerate(cores))
    return HardwareSpec(
        source="test",
        arch="x86_64",
        cpu_vendor="",
        cpu_model="",
        isa_flags=(),
        pus=pus,
        allowed_pus=tuple(sorted(allowed)),
        nodes=(NodeSpec(id=0, pus=tuple(range(len(cores))), memory_bytes=1),),
        caches=(),
        memory_bytes=1,
    )


@given(machines(), st.data())
def test_any_machine(spec: HardwareSpec, data: st.DataObject) -> None:
    threads = data.draw(st.integers(1, len(spec.allowed_pus)))
    chosen = choose_pus(spec, threads)
    cores = [pu.core for i in chosen for pu in spec.pus if pu.id == i]
    assert len(set(chosen)) == threads
    assert set(chosen) <= set(spec.allowed_pus)
    assert len(set(cores)) == min(threads, spec.usable_threads)


@pytest.mark.parametrize(
    ("planned", "here", "said"),
    [
        ("core:2", EIGHT, "planned for 2 cores, and this process may use 8"),
        ("core:8", EIGHT, None),
        ("core:64", EIGHT, None),
        ("core:2", replace(EIGHT, cpu_quota=2.5), None),
    ],
)
def test_cores_that_a_plan_of_a_smaller_machine_leaves_idle_are_told(
    planned: str, here: HardwareSpec, said: str | None
) -> None:
    found = describe_idle(read_hardware(planned), here)
    assert (found is None) == (said is None) and (said or "") in (found or "")
    assert describe_idle(None, here) is None
