"""What memory and multiply-adds give at most: how much is read, and that it is read."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dovetail.codegen.targets import get_target, host_target
from dovetail.compiler.measure import roofline
from dovetail.compiler.measure.roofline import (
    CACHE_SHARE,
    MEMORY_SHARE,
    STEP,
    STREAMS,
    stream_bytes,
)
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.values import CacheSpec

MIB = 1 << 20


def machine(l3_mib: int, *, memory_gib: int = 64) -> HardwareSpec:
    spec = read_hardware("package:1 l3:2 core:4 pu:1")
    caches = tuple(
        CacheSpec(level=3, kind="unified", bytes=l3_mib * MIB, line_bytes=64, pus=pus)
        for pus in ((0, 1, 2, 3), (4, 5, 6, 7))
    )
    return replace(spec, caches=caches, memory_bytes=memory_gib << 30)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("l3_mib", [2, 32, 96])
def test_the_stream_outgrows_all_caches_and_its_parts_share_no_bank(threads, l3_mib):
    size = stream_bytes(machine(l3_mib), threads)
    assert size >= max(roofline.LEAST_BYTES, CACHE_SHARE * 2 * l3_mib * MIB) - STREAMS * 8 * STEP
    apart, rest = divmod(size, STREAMS * threads)
    assert rest == 0 and apart % (2 * STEP) == STEP


@pytest.mark.parametrize(
    "hardware",
    [
        machine(1024, memory_gib=4),
        replace(machine(1024, memory_gib=512), memory_limit=4 << 30),  # a container's
    ],
)
def test_the_stream_leaves_memory_to_others(hardware):
    size = stream_bytes(hardware, 2)
    assert size <= (4 << 30) // MEMORY_SHARE + 2 * STREAMS * STEP


def test_each_thread_reads_its_whole_share_of_unlike_pages(monkeypatch):
    monkeypatch.setattr(roofline, "LEAST_BYTES", 8 * MIB)
    monkeypatch.setattr(roofline, "CACHE_SHARE", 0)
    roofline.free_stream()
    try:
        data = roofline._stream(1)
        assert data.nbytes == stream_bytes(read_hardware(), 1) == 12 * MIB
        pages = data.reshape(-1, 1024)
        assert len({page.tobytes() for page in pages}) == len(pages)
        assert roofline.measure_read_bandwidth(1, passes=3) > 0
    finally:
        roofline.free_stream()


def test_multiply_adds_are_those_of_the_target_held_to(monkeypatch):
    def run_once(threads, passes, work):
        work(0)
        return [1.0]

    monkeypatch.setattr(roofline, "_wall_seconds", run_once)
    targets = (get_target("generic"), host_target())  # the same one, on a host without AVX
    for target in targets:
        flop = 2 * roofline.FMA_CHAINS * target.lanes * roofline.FMA_REPEATS
        assert roofline.measure_fma_rate(1, target=target) == flop
    assert roofline.measure_fma_rate(1) == flop
    names = {target.name for target in targets}
    assert len({roofline._library(name)._name for name in names}) == len(names)


def test_a_pass_ends_with_its_last_thread():
    spans = roofline._wall_seconds(1, 5, lambda thread: None)
    assert len(spans) == 5 and min(spans) > 0
