from __future__ import annotations

from functools import cache
from itertools import product

import msgspec
import pytest

from dovetail.ir.errors import SpecError
from dovetail.topology.configuration import (
    Configuration,
    allows_processes,
    enumerate_configurations,
    memory_homes,
)
from dovetail.topology.contention import Simulator
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import load_hardware, read_hardware
from dovetail.topology.parameters import default_parameters
from dovetail.topology.plan import PlanBudget, TopologyPlan, plan_topology
from dovetail.topology.presets import preset_model
from dovetail.topology.replay import Replay, Trace
from dovetail.topology.transform import enumerate_groups
from dovetail.topology.values import HardwareSpec
from tests.topology.corpus import TOPOLOGIES, truths

MODEL = preset_model("llama-3-8b")


@cache
def plan(source: str | HardwareSpec, **options: object) -> TopologyPlan:
    spec = source if isinstance(source, HardwareSpec) else read_hardware(source)
    return plan_topology(spec, MODEL, **options)


def decode_cores(found: TopologyPlan) -> int:
    return len(found.pairs[0].decode.configuration.pus)


def test_latent_clusters_are_found_and_lose_one_core_each() -> None:
    found = plan("package:4 numa:2 core:24")
    prefill, decode = found.pairs[0].prefill, found.pairs[0].decode
    assert len(prefill.configuration.pus) == 192
    assert decode.levels == "package:4 numa:2 latent:6 core:3/4"
    assert {pu % 4 for pu in decode.configuration.pus} == {0, 1, 2}
    assert len(found.decode) == 10
    seconds = [item.seconds for item in found.decode]
    assert seconds == sorted(seconds)
    assert "core by 4" in found.report.patterns
    assert found.report.group_trees < found.report.group_trees_total
    assert any("group patterns" in text for text in found.report.cut)


def test_larger_clusters_lose_more_of_their_cores() -> None:
    of_four = plan("package:4 numa:2 cluster:6 core:4")
    of_six = plan("package:4 numa:2 cluster:4 core:6")
    assert of_four.pairs[0].decode.levels.endswith("core:3/4")
    assert decode_cores(of_six) < decode_cores(of_four)
    assert len(of_six.pairs[0].prefill.configuration.pus) == 192


def test_half_the_bandwidth_needs_fewer_cores() -> None:
    line = "package:4 numa:2 cluster:6 core:4"
    figures = default_parameters(read_hardware(line))
    slower = plan(
        line, parameters=figures.measured(package_bandwidth=figures.package_bandwidth.value / 2)
    )
    assert decode_cores(slower) < decode_cores(plan(line))
    assert slower.pairs[0].score.decode > plan(line).pairs[0].score.decode


def test_every_plan_keeps_to_allowed_pus_and_operator_limits() -> None:
    spec = read_hardware("package:2 l3:4 core:4 pu:2")
    cut = msgspec.structs.replace(spec, allowed_pus=tuple(range(0, 64, 3)))
    found = plan(cut)
    assert found.notes
    for item in (*found.prefill, *found.decode, found.pairs[0].prefill, found.pairs[0].decode):
        assert set(item.configuration.pus) <= set(cut.allowed_pus)
        assert allows_processes(MODEL, len(item.configuration.processes))


def all_configurations(spec: HardwareSpec) -> list[Configuration]:
    """Every cross-section of every tree by every grouping and removal, nothing pruned."""
    found: dict[object, Configuration] = {}
    base = build_tree(spec).tree
    for grouped in enumerate_groups(base, budget=10**6, every_divisor=True).trees:
        for widths in product(*(range(1, level.arity + 1) for level in grouped.tree.levels)):
            tree = grouped.tree
            for depth, kept in enumerate(widths, 1):
                if kept < tree.levels[depth - 1].arity:
                    tree = tree.remove(tree.levels[depth - 1].arity - kept, depth)
            for item in enumerate_configurations(
                tree, memory_homes(spec), lambda count: allows_processes(MODEL, count)
            ):
                found[item.identity] = item
    return list(found.values())


@pytest.mark.parametrize(
    "line", ["core:12 pu:2", "package:2 l3:2 core:3", "package:2 numa:2 core:4", "core:16"]
)
def test_the_choice_is_near_the_best_of_all(line: str) -> None:
    spec = read_hardware(line)
    found = plan(line)
    replay = Replay(Simulator(spec, found.parameters, MODEL), found.trace)
    best = min(replay.decode(item) for item in all_configurations(spec))
    assert best >= 0.98 * found.decode[0].seconds


def test_group_sizes_are_powers_of_two_where_all_would_be_too_many() -> None:
    assert plan("core:12 pu:2").report.group_sizes == "every divisor"
    large = plan("package:4 numa:2 core:24").report
    assert large.group_sizes == "powers of two"


def test_one_core_is_enough() -> None:
    found = plan("core:1")
    assert (
        found.pairs[0].prefill.configuration.pus == found.pairs[0].decode.configuration.pus == (0,)
    )
    assert found.report.cut == ()


def test_a_small_budget_is_kept_and_reported() -> None:
    budget = PlanBudget(group_trees=20, trees=10, top=3)
    found = plan("package:2 numa:2 core:32", budget=budget)
    assert found.report.group_trees == 20 and found.report.trees_scored <= 10
    assert len(found.decode) <= 3
    assert len(found.report.cut) >= 2


def assert_bounded(found: TopologyPlan) -> None:
    """What a search does is counted, whatever the machine: its time is not, here.

    A tree takes 1 to 2 ms and a configuration less: all that the budget allows ends in 60 s.
    """
    budget, report = PlanBudget(), found.report
    assert report.group_trees <= budget.group_trees and report.trees_scored <= budget.trees
    trees = report.group_trees * 2 + report.trees_scored  # prefill leaves threads out, too
    assert report.configurations <= trees * sum(allows_processes(MODEL, n) for n in range(1, 1025))
    assert len(found.decode) <= budget.top and len(found.pairs) <= budget.top


@pytest.mark.parametrize("line", ["package:4 numa:2 core:24", "package:2 l3:8 core:64"])
def test_the_budget_bounds_the_search_of_any_machine(line: str) -> None:
    found = plan(line)
    assert_bounded(found)
    assert found.report.cut


def test_a_model_that_does_not_fit_is_said() -> None:
    assert plan("package:2 [NUMANode(memory=64G)] core:4").notes == ()
    (note,) = plan("package:2 [NUMANode(memory=1G)] core:4").notes
    assert note.startswith("the model does not fit") and "2048 MiB" in note


def test_a_trace_without_requests() -> None:
    with pytest.raises(SpecError, match="no requests"):
        plan("core:2", trace=Trace("empty.csv", ()))


@pytest.mark.long
@pytest.mark.parametrize("file", [truth.file for truth in truths()])
def test_every_machine_of_the_corpus(file: str) -> None:
    spec = load_hardware(TOPOLOGIES / file)
    found = plan(spec)
    assert set(found.pairs[0].decode.configuration.pus) <= set(spec.allowed_pus)
    assert found.report.patterns
    assert_bounded(found)
