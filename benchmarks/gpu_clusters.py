"""Scans of hot clusters on a device of torch, beside faiss's on the CPU.

In: a device. Out: a row for each number of queries that are scanned together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.runtime.index.ivf import FaissScanner, IvfIndex
from dovetail.runtime.index.scans import Part
from retrieval import draw_queries, make_index

if TYPE_CHECKING:
    from dovetail.runtime.accel.torch_lists import TorchLists

TOPK, NPROBE, ROUNDS = 10, 16, 5
MakeLists = Callable[[IvfIndex, int], "TorchLists"]
"""Makes the lists of an index on a device, with room for so many bytes."""


def torch_lists(device: str) -> MakeLists:
    """Return what makes lists on a device of torch."""
    from dovetail.runtime.accel.device import TorchDevice
    from dovetail.runtime.accel.torch_lists import TorchLists

    return lambda index, room: TorchLists(TorchDevice(device), index, room)


def compare_scans(make: MakeLists, *, tiny: bool) -> list[dict[str, Any]]:
    """Return times of scans of clusters that are all on the device; hits are checked."""
    count, d, clusters = (2000, 64, 20) if tiny else (200_000, 384, 400)
    index = make_index(count, d, clusters, "ip")
    lists = make(index, 2 * count * d * 4)
    begun = time.perf_counter()
    lists.load(index, range(clusters))
    loading = time.perf_counter() - begun
    rows = []
    for queries in (1, 4) if tiny else (1, 16, 64):
        scans = draw_scans(index, queries)
        device, hits = best_of(lambda s=scans: lists.scan(index, s, TOPK, None))
        cpu, wanted = best_of(lambda s=scans: FaissScanner().scan(index, s, TOPK, None))
        found = [
            len({i for _, i in a} & {i for _, i in b}) for a, b in zip(hits, wanted, strict=True)
        ]
        rows.append(
            {
                "queries": queries,
                "clusters": NPROBE,
                "device_ms": round(1e3 * device, 3),
                "cpu_ms": round(1e3 * cpu, 3),
                "ratio": round(cpu / device, 2),
                "same": round(sum(found) / sum(len(row) for row in wanted), 4),
                "load_mb_per_second": round(count * d * 4 / loading / 1e6),
            }
        )
    lists.close()
    return rows


def draw_scans(index: IvfIndex, count: int) -> Sequence[Part]:
    """Return parts with the clusters nearest to queries that lie near documents."""
    return index.probe(draw_queries(index, count, count), NPROBE)


def best_of(scan: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least seconds of some calls, and what they return."""
    times = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        found = scan()
        times.append(time.perf_counter() - begun)
    return min(times[1:]), found
