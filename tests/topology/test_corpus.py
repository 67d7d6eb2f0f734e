"""Every file of the corpus loads with the counts that its index gives."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import SpecError
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import dump_hardware, load_hardware, read_hardware
from tests.topology.corpus import CORPUS, TOPOLOGIES, Truth, corpus_file, truths
from tests.topology.integrity import check_tree

TRUTHS = truths()


@pytest.mark.skipif(not TRUTHS, reason=f"no topologies under {CORPUS}; set DOVETAIL_CORPUS")
def test_the_index_lists_every_file() -> None:
    listed = {truth.file for truth in TRUTHS}
    found = {str(p.relative_to(TOPOLOGIES)) for p in TOPOLOGIES.rglob("*.*") if p.suffix != ".md"}
    assert listed == found


@pytest.mark.parametrize("truth", TRUTHS, ids=[truth.file for truth in TRUTHS])
def test_counts(truth: Truth) -> None:
    spec = read_hardware(TOPOLOGIES / truth.file)
    counts = Truth(
        truth.file,
        spec.sockets,
        len(spec.nodes),
        len(spec.memory_only_nodes),
        len([cache for cache in spec.caches if cache.level == 3]),
        spec.cores,
        len(spec.pus),
        len(spec.allowed_pus),
    )
    assert counts == truth
    tree = build_tree(spec).tree
    check_tree(tree)
    assert set(tree.pus) <= set(spec.allowed_pus)


def test_json_keeps_all_that_a_file_says(tmp_path: Path) -> None:
    for name in ("power9-v100-gpu-numa-nodes.xml", "dgx2-platinum-8174-2s-io.xml"):
        spec = load_hardware(corpus_file(f"topologies/{name}"))
        copy = tmp_path / "copy.json"
        copy.write_bytes(dump_hardware(spec))
        assert load_hardware(copy) == spec


def test_device_memory_is_apart_and_keeps_its_place() -> None:
    spec = load_hardware(corpus_file("topologies/power9-v100-gpu-numa-nodes.xml"))
    assert {node.kind for node in spec.memory_only_nodes} == {"GPUMemory"}
    assert spec.memory_only_nodes[0].near == spec.nodes[1].pus
    assert spec.nodes[0].distances == (10, 40, *(80,) * 6)


def test_dies_without_memory_use_the_nodes_of_their_package_evenly() -> None:
    spec = load_hardware(corpus_file("topologies/threadripper-2990wx-memoryless-dies.xml"))
    users = [sum(pu.node == node.id for pu in spec.pus) for node in spec.nodes]
    assert users == [32, 32]
    assert [len(node.pus) for node in spec.nodes] == [16, 16]


def test_sixteen_gpus_and_hidden_clusters() -> None:
    gpus = load_hardware(corpus_file("topologies/dgx2-platinum-8174-2s-io.xml")).accelerators
    assert len(gpus) == 16
    assert gpus[0].model == "Tesla V100-SXM3-32GB-H" and len(gpus[0].near) == 2
    arm = load_hardware(corpus_file("topologies/kunpeng-920-2s-128c-4numa-clusters.xml"))
    assert [len(group.pus) for group in arm.groups] == [4] * 32
    hybrid = load_hardware(corpus_file("topologies/core-i7-1370p-hybrid.xml"))
    assert [pu.capacity for pu in hybrid.pus] == [1024] * 12 + [799] * 8


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False))
def test_damaged_files_are_spec_errors_or_sound(tmp_path_factory, draw) -> None:
    names = ("core-i7-1370p-hybrid.xml", "epyc-7451-2s.lscpu-p.csv")
    data = bytearray(corpus_file(f"topologies/{draw.choice(names)}").read_bytes())
    for _ in range(draw.randrange(1, 4)):
        first = draw.randrange(len(data))
        junk = draw.choice((b"", b"9", b"-1", b"0xffffffff", b'"', b",", b"\xff", b"<object/>"))
        data[first : first + draw.randrange(12)] = junk
    file = tmp_path_factory.mktemp("damaged") / "file"
    file.write_bytes(data)
    with contextlib.suppress(SpecError):
        check_tree(build_tree(read_hardware(file)).tree)
