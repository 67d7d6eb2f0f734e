from __future__ import annotations

import pytest

from dovetail.ir.errors import SpecError
from dovetail.topology.builder import PuRow, add_distances, build_hardware, scale_capacity
from dovetail.topology.values import NodeSpec


def node(number: int, *pus: int) -> NodeSpec:
    return NodeSpec(id=number, pus=pus, memory_bytes=number)


def test_cores_and_sockets_get_dense_numbers() -> None:
    rows = [PuRow(7, ("a", 1), "x"), PuRow(2, ("a", 0), "y"), PuRow(9, ("a", 1), "x")]
    spec = build_hardware("m", rows)
    assert [(p.id, p.core, p.socket) for p in spec.pus] == [(2, 0, 0), (7, 1, 1), (9, 1, 1)]
    assert spec.allowed_pus == (2, 7, 9)


def test_pus_without_memory_use_the_nearest_nodes_evenly() -> None:
    rows = [PuRow(i, i, 0) for i in range(8)]
    dies = [frozenset((i, i + 1)) for i in range(0, 8, 2)]
    package = frozenset(range(8))
    nodes = [node(0, 0, 1), node(5, 4, 5)]
    spec = build_hardware("m", rows, nodes, domains=[*dies, package])
    assert [p.node for p in spec.pus] == [0, 0, 0, 0, 5, 5, 5, 5]
    assert spec.memory_bytes == 5


def test_distances_are_put_in_the_order_of_the_nodes() -> None:
    nodes = add_distances([node(4, 0), node(1, 1)], [4, 1], [[10, 20], [30, 11]])
    assert [(n.id, n.distances) for n in nodes] == [(1, (11, 30)), (4, (20, 10))]


def test_favoured_cores_are_no_kind_of_their_own() -> None:
    assert scale_capacity({0: 5000.0, 1: 4600.0, 2: 3900.0}) == {2: 799}
    assert scale_capacity({}) == {}


@pytest.mark.parametrize("rows", [[], [PuRow(1, 0, 0)] * 2, [PuRow(i, i, 0) for i in range(8193)]])
def test_impossible_numbers_of_pus(rows: list[PuRow]) -> None:
    with pytest.raises(SpecError, match="m lists"):
        build_hardware("m", rows)
