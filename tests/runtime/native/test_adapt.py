"""Plans on machines that are not as planned: fewer CPUs, a quota, busy ones; bound for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dovetail.ir.artifact import MACHINE, PhasePlan, ServicePlan
from dovetail.ir.errors import DeviceError
from dovetail.runtime.app import load
from dovetail.runtime.engine import executor
from dovetail.runtime.group.ranks import plan_ranks
from dovetail.runtime.native.adapt import (
    adapt_service,
)
from dovetail.topology.hardware import HardwareSpec, dump_hardware, read_hardware
from tests.runtime.conftest import MODEL, seal, served

EIGHT = read_hardware("core:8")
HERE = sorted(os.sched_getaffinity(0))
BUSY_LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("bound", flush=True)
while True: pass
"""


def service(processes: int, threads: int, first: int = 0) -> ServicePlan:
    cpus = tuple(range(first, first + processes * threads))
    phase = PhasePlan(threads=threads, cpus=cpus)
    return ServicePlan(processes=processes, prefill=phase, decode=phase)


def fit(plan: ServicePlan, hardware: HardwareSpec, busy: dict[int, float]) -> tuple[object, str]:
    fitted, said = adapt_service(plan, hardware, busy)
    return fitted.decode.cpus, " ".join(said)


def test_a_machine_as_planned_changes_nothing() -> None:
    plan = service(2, 4)
    assert adapt_service(plan, EIGHT, {}) == (plan, ())
    assert adapt_service(plan, EIGHT, dict.fromkeys(range(8), 0.3)) == (plan, ())


def test_busy_cpus_are_left_to_others_where_idle_ones_are_there() -> None:
    assert fit(service(1, 3), EIGHT, {1: 0.9, 3: 0.6}) == (
        (0, 4, 2),
        "CPU 1 is busy with other processes; using CPU 4 instead",
    )
    cpus, said = fit(service(1, 8), EIGHT, {1: 0.9})
    slower = "busy with other processes and none is idle; expect slower generation"
    assert (cpus, said) == (tuple(range(8)), f"CPU 1 is {slower}")
    assert fit(service(1, 8), EIGHT, {0: 0.9, 1: 0.9, 5: 1.0})[1] == f"CPUs 0-1, 5 are {slower}"


def test_idle_cpus_stand_in_for_those_that_are_gone_first() -> None:
    """Of four CPUs 0 is gone and 1 is busy: the one idle CPU stands in for 0, later on."""
    hardware = replace(EIGHT, allowed_pus=(1, 2, 3))
    cpus, said = fit(service(1, 3), hardware, {1: 1.0})
    assert cpus == (0, 1, 2) and "planned for CPU 0, offline or not allowed" in said
    (plan,) = plan_ranks(adapt_service(service(1, 3), hardware, {})[0], hardware, None, 1)
    assert sorted(plan.decode.cpus) == [1, 2, 3]


@pytest.mark.parametrize(
    "hardware", [replace(EIGHT, allowed_pus=(5,)), replace(EIGHT, cpu_quota=1.5)]
)
def test_more_processes_than_cpus_become_one(hardware: HardwareSpec) -> None:
    fitted, said = adapt_service(service(2, 4), hardware, {})
    assert fitted.processes == 1 and fitted.decode.threads == 8
    assert "2 processes were planned, but only 1 CPUs are available" in said[0]
    (plan,) = plan_ranks(fitted, hardware, None, 1)
    assert plan.decode.threads == 1 and set(plan.decode.cpus) <= set(hardware.allowed_pus)


@settings(deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 5), (2, 3), (4, 2)]),
    st.sets(st.integers(0, 7), min_size=1),
    st.dictionaries(st.integers(0, 7), st.floats(0, 1)),
)
def test_whatever_is_there_the_plan_can_be_run(
    shape: tuple[int, int], allowed: set[int], busy: dict[int, float]
) -> None:
    hardware = replace(EIGHT, allowed_pus=tuple(sorted(allowed)))
    fitted, _ = adapt_service(service(*shape), hardware, busy)
    used = []
    for plan in plan_ranks(fitted, hardware, None, 1):
        assert len(plan.decode.cpus) == plan.decode.threads >= 1
        used += plan.decode.cpus
    assert len(used) == len(set(used)) and set(used) <= allowed


@contextmanager
def busy_loop(cpu: int) -> Iterator[None]:
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY_LOOP, str(cpu)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "bound\n"
        yield
    finally:
        child.kill()
        child.communicate()


CHILD = """
import json, logging, os, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
os.sched_setaffinity(0, {int(sys.argv[2])})
from dovetail.runtime.app import load
with load(sys.argv[1]) as app:
    plan = app.engine.executor.model.decode.plan
    done = app.generate([[1, 2, 3]], max_tokens=8, ignore_eos=True)
    print(json.dumps([plan.threads, plan.cpus, done[0].token_ids]))
"""


@pytest.mark.skipif(len(HERE) < 2, reason="needs two CPUs")
def test_a_smaller_affinity_mask_shrinks_the_plan_and_says_so(
    make_artifact: Callable[..., Path],
) -> None:
    path = make_artifact(threads=(2, 2))
    plan = PhasePlan(threads=2, cpus=tuple(HERE[:2]))
    write_plan(path, ServicePlan(prefill=plan, decode=plan, kv_blocks=64))
    with load(path) as app:
        whole = list(app.generate([[1, 2, 3]], max_tokens=8, ignore_eos=True)[0].token_ids)
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, str(path), str(HERE[1])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [1, [HERE[1]], whole]
    assert f"planned for CPU {HERE[0]}, offline or not allowed" in done.stderr
    assert "2 threads were planned" in done.stderr


def write_plan(path: Path, plan: ServicePlan) -> None:
    (path / "graph/serve.json").write_bytes(served(plan).to_json())
    seal(path)
    assert (path / MODEL / "model.json").exists()


@pytest.mark.skipif(read_hardware().usable_threads < 2, reason="needs two cores")
@pytest.mark.parametrize(("options", "told"), [({}, True), ({"threads": 1}, False)])
def test_a_load_on_a_larger_machine_says_so(
    make_artifact: Callable[..., Path],
    options: dict[str, int],
    told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = make_artifact(threads=(1, 1))
    (path / MACHINE).write_bytes(dump_hardware(read_hardware("core:1")))
    seal(path)
    executor._warn_once.cache_clear()
    with load(path, **options):
        pass
    assert ("planned for 1 core, and" in caplog.text) == told


def test_a_cpu_that_went_away_after_the_load_is_a_clear_error(
    make_artifact: Callable[..., Path],
) -> None:
    with load(make_artifact(threads=(1, 1))) as app:
        missing = PhasePlan(threads=1, cpus=(1023,))
        with pytest.raises(DeviceError, match="CPUs 1023: one is offline or no longer allowed"):
            app.engine.executor.model.team.set_active(missing)  # type: ignore[attr-defined]
        done = app.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)
        assert len(done[0].token_ids) == 2
