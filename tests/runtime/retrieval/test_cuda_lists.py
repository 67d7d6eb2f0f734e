"""Lists on a GPU, through a driver of our own: copies, launches, merges with the CPU's part."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

faiss = pytest.importorskip("faiss")

from dovetail.codegen.catalog import retrieval_kernels  # noqa: E402
from dovetail.codegen.library import lower_request  # noqa: E402
from dovetail.codegen.targets import DEVICE_TARGETS  # noqa: E402
from dovetail.ir.errors import CapacityError, SpecError  # noqa: E402
from dovetail.runtime.cuda import CudaDevice, CudaModule  # noqa: E402
from dovetail.runtime.retrieval import cuda_lists  # noqa: E402
from dovetail.runtime.retrieval.build import build_index  # noqa: E402
from dovetail.runtime.retrieval.cuda_lists import CudaLists  # noqa: E402
from dovetail.runtime.retrieval.device_lists import DeviceScanner  # noqa: E402
from dovetail.runtime.retrieval.scans import Only, Scan  # noqa: E402
from tests.emulated_gpu import build_driver, make_index, open_device  # noqa: E402

CUDA = DEVICE_TARGETS["cuda"]
KERNELS = [lower_request(request, CUDA) for request in retrieval_kernels(CUDA)]
DIM, COUNT, LISTS = 40, 300, 10
RNG = np.random.default_rng(17)
VECTORS = RNG.standard_normal((COUNT, DIM)).astype(np.float32)
QUERIES = RNG.standard_normal((5, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def driver() -> str:
    return str(build_driver(KERNELS))


@pytest.fixture
def device(driver: str) -> Iterator[CudaDevice]:
    with open_device(driver) as device:
        yield device


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says, while it is there, that the device is lost."""
    monkeypatch.setenv("DT_DEAD_GPU", str(tmp_path / "dead"))
    return tmp_path / "dead"


@pytest.fixture
def module(device: CudaDevice, tmp_path: Path) -> Iterator[CudaModule]:
    (tmp_path / "k.ptx").write_text("emulated")
    module = device.load(tmp_path / "k.ptx", make_index(KERNELS))
    yield module
    module.close()


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("depth", [1, 20])
def test_gpu_and_cpu_find_what_the_cpu_finds(
    device: CudaDevice,
    module: CudaModule,
    metric: str,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_lists, "STAGING", 1000)  # copies in several parts
    index = build_index(VECTORS, clusters=LISTS, metric=metric)
    lists = CudaLists(device, module, index, 1 << 20)
    hybrid = DeviceScanner(lists)
    hybrid.swap(index, [0, 3, 4, 7, 9], [], 1 << 20)
    hybrid.swap(index, [1], [0, 4, 7, 9], 1 << 20)
    held = [c for c in range(LISTS) if lists.holds(index, c)]
    assert held == [0, 1, 4, 7, 9]
    assert lists.used == sum(index.sizes[c] for c in held) * index.code_bytes
    changed = index.change(QUERIES[:1], [COUNT], remove=range(0, COUNT, 4))
    only = Only(np.flatnonzero(np.arange(COUNT + 1) % 3))
    probes = index.probe(QUERIES, LISTS)
    for seen in (index, changed):
        scans = [
            Scan(q, p.clusters[: 3 * n], p.distances[: 3 * n], only if n % 2 else None)
            for n, (q, p) in enumerate(zip(QUERIES, probes, strict=True))
        ]
        found, wanted = seen.scan(scans, depth, hybrid), seen.scan(scans, depth)
        for row, expected in zip(found, wanted, strict=True):
            assert [i for _, i in row] == [i for _, i in expected]
            near = [d for d, _ in row], [d for d, _ in expected]
            np.testing.assert_allclose(*near, rtol=1e-5, atol=1e-5)
    hybrid.close()
    assert lists.used == 0


def test_the_gpu_scans_what_lies_in_its_own_memory(device: CudaDevice, module: CudaModule) -> None:
    index = build_index(VECTORS, clusters=LISTS)
    lists = CudaLists(device, module, index, 1 << 20)
    lists.load(index, [2])
    ids, vectors = index.lists(2)
    before = vectors.copy()
    vectors[:] = 0  # the CPU's copy is lost
    scan = Scan(VECTORS[ids[1]], [2], np.zeros(1, np.float32))
    assert lists.scan(index, [scan], 1, None) == [[(0.0, int(ids[1]))]]
    vectors[:] = before
    lists.close()


def test_a_lost_device_is_done_without(device: CudaDevice, module: CudaModule, dead: Path) -> None:
    """What was there when it was lost is given back when it is found again."""
    index = build_index(VECTORS, clusters=LISTS)
    lists = CudaLists(device, module, index, 1 << 20)
    hybrid, scan = DeviceScanner(lists), Scan(QUERIES[0], range(6), np.zeros(6, np.float32))
    assert hybrid.swap(index, [0, 1, 2], [], 1 << 20) == set()
    wanted, before = index.scan([scan], 5), lists.used
    dead.touch()
    assert index.scan([scan], 5, hybrid) == wanted and hybrid.take_absent().of(index) == set(
        range(6)
    )
    assert hybrid.swap(index, [3, 4], [0, 1, 2], 1 << 20) == {3, 4} and lists.used == before
    dead.unlink()
    assert hybrid.swap(index, [3, 4], [0, 1, 2], 1 << 20) == set()
    assert [[i for _, i in row] for row in index.scan([scan], 5, hybrid)] == [
        [i for _, i in row] for row in wanted
    ]
    assert hybrid.take_absent().of(index) == {5}
    hybrid.close()


def test_what_a_lost_device_does_not_drop_did_not_arrive(
    device: CudaDevice, module: CudaModule, dead: Path
) -> None:
    """Old copies of what is to be loaded stay as they are, for the scans that use them."""
    index = build_index(VECTORS, clusters=LISTS)
    lists = CudaLists(device, module, index, 1 << 20)
    hybrid = DeviceScanner(lists)
    assert hybrid.swap(index, [0, 1, 2], [], 1 << 20) == set()
    before = lists.used
    dead.touch()
    assert hybrid.swap(index, [0, 1], [2], 1 << 20) == {0, 1}
    assert lists.held() == {0, 1, 2} and lists.used == before
    dead.unlink()
    assert hybrid.swap(index, [0, 1], [2], 1 << 20) == set() and lists.used == before
    hybrid.close()


def test_a_copy_that_fails_leaves_nothing_on_the_gpu(
    device: CudaDevice, module: CudaModule, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build_index(VECTORS, clusters=LISTS)
    lists = CudaLists(device, module, index, 1 << 20)
    before = ctypes.CDLL(driver).dt_left()

    def fail(*_: object) -> None:
        raise CapacityError("the GPU is out of memory")

    monkeypatch.setattr(lists, "_copy", fail)
    with pytest.raises(CapacityError, match="out of memory"):
        lists.load(index, [0])
    assert ctypes.CDLL(driver).dt_left() == before and not lists.held()
    lists.close()


def test_what_cannot_be_is_refused(device: CudaDevice, module: CudaModule) -> None:
    index = build_index(VECTORS, clusters=LISTS)
    lists = CudaLists(device, module, index, index.sizes[0] * index.code_bytes)
    lists.load(index, [0])
    with pytest.raises(CapacityError, match="does not fit"):
        lists.load(index, [1])
    lists.close()
    with pytest.raises(SpecError, match="sq8"):
        CudaLists(device, module, build_index(VECTORS, clusters=4, codes="sq8"), 1)
    module.kernels.clear()
    with pytest.raises(SpecError, match="lacks ivf_scan_l2"):
        CudaLists(device, module, index, 1)
