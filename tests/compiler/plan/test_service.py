"""Plans of a machine: pairs by the contention model, and how each of them is served."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from dovetail.compiler.plan.service import (
    asked_choice,
    choose_plans,
    contenders,
    describe_choice,
    mark_tuned,
    place_searches,
    plan_service,
    service_plan,
    service_plans,
    unmeasured,
    whole_first,
    within_quota,
)
from dovetail.compiler.search.tables import EFFORTS
from dovetail.ir.errors import SpecError
from dovetail.ir.plans import ASKED, SIMULATED, PairChoice, PlanCandidate, PlanChoice
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.presets import preset_model
from dovetail.topology.replay import DEFAULT_TRACE

MODEL = preset_model("llama-3-8b")


def choose(source: str | HardwareSpec, **options: int) -> PlanChoice:
    hardware = source if isinstance(source, HardwareSpec) else read_hardware(source)
    return choose_plans(hardware, MODEL, DEFAULT_TRACE, **options)


@pytest.mark.parametrize(
    "source", ["core:2", "core:1", "package:2 numa:2 core:8", "package:2 numa:1 l3:4 core:4 pu:2"]
)
def test_every_pair_can_be_served(source: str) -> None:
    hardware = read_hardware(source)
    choice = choose(hardware)
    assert choice.source == SIMULATED and choice.figures["core_flops"].source
    core = {pu.id: pu.core for pu in hardware.pus}
    totals = [pair.simulated for pair in choice.pairs[1:]]
    assert all(a <= b for a, b in pairwise(totals))
    for plan in service_plans(choice):
        for name, phase in (("prefill", plan.prefill), ("decode", plan.decode)):
            count = phase.threads * plan.processes_of(name)
            assert len(phase.cpus) == count == len(set(phase.cpus))
            assert set(phase.cpus) <= set(hardware.allowed_pus)
        assert {core[cpu] for cpu in plan.prefill.cpus} == set(core.values())


def test_phases_with_different_numbers_of_processes_are_among_the_pairs() -> None:
    hardware = read_hardware("package:2 l3:4 core:4")
    found = choose_plans(hardware, preset_model("llama-160m"), DEFAULT_TRACE)
    plans = service_plans(found)
    assert any(plan.prefill_processes for plan in plans)
    assert any(not plan.prefill_processes for plan in plans)
    uneven = next(plan for plan in plans if plan.prefill_processes)
    counts = {uneven.processes, uneven.prefill_processes}
    assert counts <= found.processes and uneven.most_processes == max(counts)
    again = asked_choice(uneven, hardware)
    assert replace(service_plan(again), nodes=uneven.nodes) == uneven
    assert f"{uneven.prefill_processes} x" in describe_choice(again)


def test_ranks_keep_their_memory_node_in_both_phases() -> None:
    """A slow link between nodes: one process for each, bound to its node."""
    hardware = read_hardware("package:4 numa:1 core:24")
    choice = choose(hardware)
    plan = service_plan(choice)
    assert plan.processes > 1 and len(plan.nodes) == plan.processes
    assert sorted(plan.nodes) == list(plan.nodes)
    home = {pu.id: pu.node for pu in hardware.pus}
    for phase in (plan.prefill, plan.decode):
        for rank, node in enumerate(plan.nodes):
            cpus = phase.cpus[rank * phase.threads : (rank + 1) * phase.threads]
            assert {home[cpu] for cpu in cpus} == {node}
    assert any(p.decode.threads < p.prefill.threads for p in service_plans(choice)[1:])
    assert f"{plan.processes} processes" in describe_choice(choice)


@pytest.mark.parametrize(
    "source",
    ["core:2", "package:4 numa:1 core:24", "package:2 numa:1 l3:4 core:4 pu:2", "uneven"],
)
def test_what_nothing_has_measured_has_every_core_in_both_phases(source: str) -> None:
    """The simulator alone would decode on fewer; one core of three is no branch of a tree."""
    uneven = replace(read_hardware("package:2 core:2"), allowed_pus=(0, 1, 2))
    hardware = uneven if source == "uneven" else read_hardware(source)
    choice = choose(hardware)
    core = {pu.id: pu.core for pu in hardware.pus}
    for plan in (service_plan(choice), service_plan(contenders(choice, 1.0))):
        for phase in (plan.prefill, plan.decode):
            assert {core[cpu] for cpu in phase.cpus} == {core[cpu] for cpu in hardware.allowed_pus}
    assert service_plans(unmeasured(choice)) == (service_plan(choice),)


def test_a_plan_of_fewer_cores_is_only_for_measuring() -> None:
    hardware = read_hardware("core:2")
    one, two = (
        PlanCandidate(processes=1, threads=n, cpus=tuple(range(n)), nodes=((0,),), levels="")
        for n in (1, 2)
    )
    pairs = tuple(PairChoice(prefill=0, decode=d, simulated=1.0 + d) for d in (0, 1))
    found = PlanChoice(source=SIMULATED, prefill=(two,), decode=(one, two), pairs=pairs)
    assert whole_first(found, hardware).pairs == (pairs[1], pairs[0])
    alone = replace(found, decode=(one,), pairs=pairs[:1])
    assert service_plan(whole_first(alone, hardware)) == plan_service(hardware)
    assert whole_first(alone, hardware).pairs[1:] == pairs[:1]


def test_a_quota_takes_cores_away_and_says_so() -> None:
    hardware = replace(read_hardware("core:8"), cpu_quota=3.5)
    cut, notes = within_quota(hardware)
    assert len(cut.allowed_pus) == 3 and "3.5 cores" in notes[0]
    choice = choose(hardware)
    assert choice.notes[0] == notes[0]
    assert all(len(phase.cpus) <= 3 for phase in (*choice.prefill, *choice.decode))
    assert within_quota(replace(hardware, cpu_quota=8.0))[1] == ()
    assert len(within_quota(replace(hardware, cpu_quota=0.3))[0].allowed_pus) == 1


@pytest.mark.parametrize(("quota", "threads"), [(None, 32), (100.0, 32), (8.5, 4), (0.3, 1)])
def test_searches_have_half_of_what_a_quota_keeps_busy(quota: float | None, threads: int) -> None:
    assert place_searches(replace(read_hardware("core:64"), cpu_quota=quota)).threads == threads


def test_threads_that_are_asked_for_are_not_searched() -> None:
    choice = choose("package:2 numa:2 core:8", threads=5)
    plan = service_plan(choice)
    assert choice.source == ASKED and plan.prefill == plan.decode and plan.processes == 1
    assert plan.decode.threads == len(plan.decode.cpus) == 5
    assert contenders(choice, 1.0) == choice
    with pytest.raises(SpecError, match="33 threads"):
        choose("package:2 numa:2 core:8", threads=33)


def test_contenders_are_those_near_the_best_and_their_kernels_are_marked() -> None:
    choice = choose("package:2 numa:1 l3:4 core:4")
    best = min(pair.simulated for pair in choice.pairs if pair.simulated is not None)
    near = contenders(choice, 1.05)
    first, *others = near.pairs
    assert 0 < len(others) < len(choice.pairs) - 1 and first == choice.pairs[0]
    assert all(pair.simulated is not None and pair.simulated <= 1.05 * best for pair in others)
    marked = mark_tuned(choice, near.pairs)
    tuned = {(c.processes, c.threads) for c in marked.decode if c.tuned}
    assert tuned == {(p.processes, p.decode.threads) for p in service_plans(near)}
    assert not all(candidate.tuned for candidate in marked.decode)


def test_candidates_of_other_cores_share_the_tables_of_equal_teams() -> None:
    phase = [
        PlanCandidate(processes=p, threads=t, cpus=cpus, nodes=((0,),) * p, levels="")
        for p, t, cpus in ((1, 2, (0, 1)), (1, 2, (2, 3)), (2, 2, (0, 1, 2, 3)), (1, 4, ()))
    ]
    pairs = (PairChoice(prefill=0, decode=3),)
    choice = PlanChoice(source=SIMULATED, prefill=tuple(phase), decode=tuple(phase), pairs=pairs)
    marked = mark_tuned(choice, pairs)
    assert [c.tuned for c in marked.prefill] == [True, True, False, False]
    assert [c.tuned for c in marked.decode] == [False, False, False, True]


@pytest.mark.parametrize("line", ["core:8", "package:2 numa:1 l3:4 core:4 pu:2"])
def test_all_plans_that_may_be_the_best_are_searched_for(line: str) -> None:
    """The simulator is off by up to 30 %: one pair alone would be chosen by its error."""
    choice, slack = choose(line), EFFORTS["fast"].plan_slack
    best = min(pair.simulated for pair in choice.pairs if pair.simulated is not None)
    near = [pair for pair in choice.pairs if (pair.simulated or 0) <= 1.3 * best]
    assert len(near) > 1 and set(near) <= set(contenders(choice, slack).pairs)
