from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import SpecError
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import load_hardware, read_hardware
from tests.topology.corpus import corpus_file
from tests.topology.integrity import check_tree


def shape(source: object) -> str:
    spec = read_hardware(source)
    found = build_tree(spec)
    check_tree(found.tree)
    return " ".join(f"{level.kind}:{level.arity}" for level in found.tree.levels)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("package:4 numa:2 core:24", "package:4 numa:2 core:24"),
        ("package:2 numa:1 l3:16 core:4 pu:2", "numa:2 l3:16 core:4 pu:2"),
        ("package:2 die:2 l2:2 core:2 pu:1", "package:2 die:2 l2:2 core:2"),
        ("package:1 l3:1 core:1 pu:1", "core:1"),
        ("pu:4", "core:4"),
    ],
)
def test_levels_with_one_child_are_left_out(line: str, expected: str) -> None:
    assert shape(line) == expected


CORPUS = {
    "kunpeng-920-2s-128c-4numa-clusters.xml": "package:2 numa:2 cluster:8 core:4",
    "epyc-7h12-2s-nps4.xml": "package:2 numa:4 l3:4 core:4 pu:2",
    "xeon-max-9462-2s-snc4-cache.xml": "l3:2 numa:4 core:8 pu:2",
    "threadripper-2990wx-memoryless-dies.xml": "group:4 l3:2 core:4 pu:2",
    "opteron-bulldozer-4s-64c.xml": "package:4 numa:2 l2:4 core:2",
    "power7-256pu-smt4.xml": "group:4 numa:2 core:8 pu:4",
    "riscv-sg2042-milkv-pioneer.lscpu-p.csv": "numa:4 core:16",
    # irregular ones: the largest symmetric part
    "xeon-phi-7250-snc4-flat.xml": "numa:4 l2:8 core:2 pu:4",
    "core-i9-12900h-hybrid.lscpu-p.csv": "core:6 pu:2",
    "core-i7-1370p-hybrid.xml": "core:6 pu:2",
    "arm-a510-a710-a715-x3.lscpu-p.csv": "core:7",
    "opteron-865-8s-cpuset-disallowed.xml": "numa:4 core:2",
    "xeon-2s8c-asymmetric-caches.xml": "package:2 core:4",
}


@pytest.mark.parametrize(("name", "expected"), CORPUS.items(), ids=CORPUS)
def test_real_machines(name: str, expected: str) -> None:
    assert shape(corpus_file(f"topologies/{name}")) == expected


def test_what_is_left_out_is_said() -> None:
    notes = build_tree(load_hardware(corpus_file("topologies/core-i7-1370p-hybrid.xml"))).notes
    assert notes == (
        "2 kinds of core: only those of capacity 1024 are used",
        "the largest symmetric part has 12 of 20 PUs",
    )
    phi = build_tree(load_hardware(corpus_file("topologies/xeon-phi-7250-snc4-flat.xml")))
    assert phi.notes == ("the largest symmetric part has 256 of 272 PUs",)


@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 31), min_size=1))
def test_any_cpuset_gives_a_symmetric_part(allowed: set[int]) -> None:
    spec = read_hardware("package:2 l3:2 core:4 pu:2")
    cut = msgspec.structs.replace(spec, allowed_pus=tuple(sorted(allowed)))
    found = build_tree(cut)
    check_tree(found.tree)
    assert set(found.tree.pus) <= allowed
    assert len(found.tree.pus) == len(allowed) or any("symmetric part" in n for n in found.notes)


def test_without_allowed_pus_there_is_no_tree() -> None:
    spec = msgspec.structs.replace(read_hardware("core:2"), allowed_pus=())
    with pytest.raises(SpecError, match="at least one"):
        build_tree(spec)
