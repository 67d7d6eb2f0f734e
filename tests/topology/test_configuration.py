from __future__ import annotations

import math

import pytest

from dovetail.topology.configuration import (
    Configuration,
    Process,
    Ranking,
    allows_processes,
    cross_section,
    enumerate_configurations,
    memory_homes,
)
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import read_hardware
from dovetail.topology.presets import preset_model
from dovetail.topology.transform import enumerate_groups

KUNPENG = read_hardware("package:4 numa:2 core:24")  # Fig. 5: four Kunpeng-920, 192 cores
HOMES = memory_homes(KUNPENG)


def test_figure_5_groups_of_four_find_the_l3_tag_clusters() -> None:
    tree = build_tree(KUNPENG).tree
    assert len(tree.pus) == 192
    tags = tree.group(4, 1, 3)
    assert tags in [item.tree for item in enumerate_groups(tree).trees]
    assert tags.width(3) == 48
    assert list(tags.subtrees(3))[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    fewer = tags.remove(1, 4)
    assert len(fewer.pus) == 144
    assert list(fewer.subtrees(3))[:2] == [(0, 1, 2), (4, 5, 6)]
    assert {pu % 4 for pu in fewer.pus} == {0, 1, 2}


def test_figure_6_cross_sections() -> None:
    tree = build_tree(KUNPENG).tree.group(4, 1, 3).remove(1, 4)
    sccl = cross_section(tree, 2, HOMES)
    assert len(sccl.processes) == 8
    assert {len(process.pus) for process in sccl.processes} == {18}
    assert [process.nodes for process in sccl.processes] == [(i,) for i in range(8)]
    ccl = cross_section(tree, 3, HOMES)
    assert len(ccl.processes) == 48
    assert {len(process.pus) for process in ccl.processes} == {3}
    assert [process.nodes for process in ccl.processes] == [
        (i,) for i in range(8) for _ in range(6)
    ]


def test_operator_limits_forbid_48_processes() -> None:
    tree = build_tree(KUNPENG).tree.group(4, 1, 3).remove(1, 4)
    model = preset_model("llama-3-8b")
    found = enumerate_configurations(tree, HOMES, lambda count: allows_processes(model, count))
    assert [len(c.processes) for c in found] == [1, 4, 8]


@pytest.mark.parametrize(
    ("model", "allowed"),
    [("llama-3-8b", {1, 2, 4, 8}), ("tinyllama", {1, 2, 4}), ("llama-160m", {1, 2, 3, 4, 6, 12})],
)
def test_heads_and_panels_limit_the_degree(model: str, allowed: set[int]) -> None:
    spec = preset_model(model)
    assert {count for count in range(1, 65) if allows_processes(spec, count)} == allowed


def test_a_process_over_two_nodes_names_both() -> None:
    config = cross_section(build_tree(KUNPENG).tree, 1, HOMES)
    assert [p.nodes for p in config.processes] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert config.pus == tuple(range(192))


def config(*sizes: int, node: int = 0) -> Configuration:
    """Processes of the given numbers of PUs, all on one node."""
    first, processes = 0, []
    for size in sizes:
        processes.append(Process(tuple(range(first, first + size)), (node,)))
        first += size
    return Configuration(tuple(processes))


def test_equal_configurations_are_scored_once() -> None:
    calls: list[Configuration] = []
    ranking = Ranking(lambda c: calls.append(c) or 1.0)
    one = config(2, 3)
    assert ranking.offer(one) == ranking.offer(Configuration(one.processes[::-1])) == 1.0
    assert len(calls) == ranking.seen == 1


def test_patience_counts_within_a_family_and_discards_all_of_it() -> None:
    ranking = Ranking(lambda c: float(len(c.pus)), patience=2)
    assert ranking.offer(config(1, 1)) == 2.0
    assert [ranking.offer(config(n, node=1)) for n in (3, 4)] == [3.0, 4.0]
    # two of the family of one process in a row did not beat the best: none of it remains
    assert ranking.closed == {(1, ((1,),))}
    assert ranking.offer(config(1, node=1)) == math.inf
    assert [c for c, _ in ranking.top(9)] == [config(1, 1)]
    # another family has a patience of its own
    assert ranking.offer(config(5, node=2)) == 5.0


def test_the_family_of_the_best_is_closed_but_kept() -> None:
    ranking = Ranking(lambda c: float(len(c.pus)), patience=2)
    for n in (1, 2, 3):
        ranking.offer(config(n))
    assert ranking.closed == {(1, ((0,),))}
    assert [score for _, score in ranking.top(2)] == [1.0, 2.0]


def test_candidates_that_are_alike_count_once() -> None:
    ranking = Ranking(lambda c: float(len(c.processes)))
    left = Configuration((Process((0, 1), (0,)),))
    right = Configuration((Process((2, 3), (0,)),))
    for item in (left, right, config(4), config(3, node=1)):
        ranking.offer(item)
    assert [c for c, _ in ranking.top(9)] == [left, config(4), config(3, node=1)]
