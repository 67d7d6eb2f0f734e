"""Products of few rows by generated kernels on an emulated GPU: by which are chosen, and right."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.cuda import CudaDevice
from dovetail.runtime.device_weights import DeviceWeight
from dovetail.runtime.launches import Matrix, Product
from dovetail.runtime.skinny_products import (
    CLOCK_RATE,
    MEMORY_BUS_WIDTH,
    MEMORY_CLOCK_RATE,
    SkinnyProducts,
    compare_in_graphs,
    gpu_rates,
)
from dovetail.runtime.streams import GpuStreams
from dovetail.topology.hardware import read_hardware
from tests.gpu_touches import Touch
from tests.lazy_gpu import Act, LazyDriver
from tests.runtime.cuda_gpu import PROMPTS, Gpu


@dataclass
class Library:
    """A library of products that notes what it is asked for and computes nothing."""

    rows: list[int] = field(default_factory=list)
    room: int = 10**9

    def bind(self, product: Product, rows: int) -> Any:
        return product

    def run(self, bound: Any, rows: int, stream: int) -> None:
        if len(self.rows) >= self.room:
            raise CapacityError("no room")
        self.rows.append(rows)


class Bench:
    """SkinnyProducts with one product of 24 x 70 on an emulated GPU; residual and C are one."""

    def __init__(self, gpu: Gpu, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(1)
        self.a = rng.standard_normal((64, 75)).astype(np.float32)
        self.b = rng.standard_normal((24, 70)).astype(np.float32)
        self.bias = rng.standard_normal(24).astype(np.float32)
        self.c = rng.standard_normal((64, 30)).astype(np.float32)
        self.driver = LazyDriver(gpu.library, gpu.kernels)
        self.device = CudaDevice(driver=self.driver)
        self.streams = GpuStreams(self.device)
        weights = {
            "w": DeviceWeight(self.b.ctypes.data, 24, 70, "f32"),
            "w_bias": DeviceWeight(self.bias.ctypes.data, 24, 1, "f32"),
        }
        self.library = Library()
        self.module, self.weights = self.device.load(*gpu.module), weights
        self.load(self.module)

    def load(self, module: Any) -> None:
        """Make the products anew."""
        self.products = SkinnyProducts(self.library, self.weights, module)
        a = Matrix(self.a.ctypes.data, 70, 75)
        out = Matrix(self.c.ctypes.data, 24, 30)
        self.bound = self.products.bind(Product(a, "w", "w_bias", out, out), 40)

    def choose(self, compare: Any = None) -> set[int]:
        """Return the rows of chosen programs."""
        self.products.choose(self.streams, self.folder, compare)
        return {rows for _, rows in self.products.programs}

    def left(self) -> int:
        """Return what is held on the device, once the streams have kept an event each."""
        self.streams.finish()
        return int(self.driver._c.dt_left())

    def run(self, rows: int) -> np.ndarray:
        """Run the product; return what C should be, if anybody computed it."""
        want = self.c.astype(np.float64)
        a = self.a[:rows, :70].astype(np.float64)
        want[:rows, :24] += a @ self.b.astype(np.float64).T + self.bias
        self.products.run(self.bound, rows, self.streams.compute)
        self.streams.finish()
        return want

    def close(self) -> None:
        self.products.close()
        self.streams.close()
        self.device.close()


@pytest.fixture
def bench(gpu: Gpu, tmp_path: Path) -> Any:
    made = Bench(gpu, tmp_path)
    yield made
    made.close()


def test_a_program_runs_where_it_was_faster_and_the_library_elsewhere(bench: Bench) -> None:
    compared = iter([0.5, 2.0, 0.96, 0.98, 0.1, 0.1])  # 1, 2, 4, 8, 16 and 32 of at most 40 rows
    assert bench.choose(lambda *_: next(compared)) == {1, 4, 16, 32}
    for rows in (1, 4, 16, 32):
        want = bench.run(rows)
        np.testing.assert_allclose(bench.c, want, rtol=1e-5, atol=1e-4)
    assert bench.library.rows == []
    for rows in (2, 3, 8, 33, 40):
        bench.run(rows)
    assert bench.library.rows == [2, 3, 8, 33, 40]


def test_sums_of_stretches_are_merged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with many slots the one row is split along K."""
    split_all(bench, monkeypatch)
    bench.choose(lambda *_: 0.0)
    (program,) = (p for (_, rows), p in bench.products.programs.items() if rows == 1)
    assert program.splits > 1
    want = bench.run(1)
    np.testing.assert_allclose(bench.c, want, rtol=1e-5, atol=1e-4)


def split_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.device, "multiprocessors", 132)
    monkeypatch.setattr("dovetail.runtime.polymerize.LEAST_STEPS", 1)


def test_room_for_sums_is_kept_for_chosen_programs_that_split_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_all(bench, monkeypatch)
    before, sizes = bench.left(), []
    alloc = bench.device.alloc
    monkeypatch.setattr(bench.device, "alloc", lambda n: sizes.append(n) or alloc(n))
    plans = bench.products._plan()
    split = {rows: plan.splits for (_, rows), plan in plans.items() if plan.splits > 1}
    assert split and len(split) < len(plans)  # 32 rows are many tiles
    room = 4 * 24 * max(rows * splits for rows, splits in split.items())
    chosen = max(rows for _, rows in plans if rows not in split)
    compared = iter(0.0 if rows == chosen else 1.0 for _, rows in plans)
    assert bench.choose(lambda *_: next(compared)) == {chosen}
    assert sizes.count(room) == 1  # while all are compared
    assert bench.left() == before + 1  # the chosen one's table
    bench.products.close()
    assert bench.left() == before


@pytest.mark.parametrize("room", [0, 20, 40])
def test_without_memory_to_compare_all_is_the_librarys(
    bench: Bench, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs out at the first run, in the first graph, and at the next number of rows."""
    before, bench.library.room = bench.left(), room
    assert bench.choose() == set()
    assert "are the library's: no room" in caplog.text
    assert bench.left() == before and not bench.driver._graphs
    assert not [*bench.folder.iterdir()]  # another load may have room
    bench.library.room = 10**9
    bench.run(4)
    assert bench.library.rows[-1] == 4


def test_without_room_for_programs_all_is_the_librarys(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise CapacityError("no room")

    before = bench.left()
    for _ in range(2):  # to compare, and to take what another load chose
        with monkeypatch.context() as full:
            full.setattr(bench.device, "alloc", refuse)
            assert bench.choose(lambda *_: 0.0) == set()
        assert bench.left() == before
        assert bench.choose(lambda *_: 0.0)
        bench.products.close()
        bench.load(bench.module)


def test_a_later_load_takes_what_the_first_one_chose(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of that name, while its file is sound."""
    compared = iter([0.5, 2.0, 0.5, 2.0, 0.5, 2.0])
    assert bench.choose(lambda *_: next(compared)) == {1, 4, 16}
    bench.products.close()
    bench.load(bench.module)
    assert bench.choose(lambda *_: pytest.fail("compared again")) == {1, 4, 16}
    bench.products.close()
    (file,) = bench.folder.iterdir()
    file.write_text("[[1")
    for name in ("another GPU", bench.device.name):
        monkeypatch.setattr(bench.device, "name", name)
        bench.load(bench.module)
        assert bench.choose(lambda *_: 2.0) == set()


def test_a_folder_that_keeps_nothing_is_told_of(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.folder = bench.folder / "none"
    assert bench.choose(lambda *_: 0.0)
    assert "could not be kept" in caplog.text


@pytest.mark.parametrize("untold", [CLOCK_RATE, MEMORY_CLOCK_RATE, MEMORY_BUS_WIDTH])
def test_a_gpu_that_does_not_tell_its_rates_has_no_programs(
    bench: Bench, untold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute = bench.device.attribute
    monkeypatch.setattr(bench.device, "attribute", lambda n: 0 if n == untold else attribute(n))
    assert bench.choose(lambda *_: 0.0) == set()
    bench.run(4)
    assert bench.library.rows == [4]


def test_what_is_compared_is_given_to_the_stream(bench: Bench) -> None:
    """Both ways run as graphs of 16 products; none stays behind."""
    seen = []

    def compare(streams: GpuStreams, ours: Any, theirs: Any) -> float:
        with streams.recording() as found:
            ours()
        seen.append(len(bench.driver._graphs[found[0]]))
        streams.forget(found[0])
        theirs()
        return 1.0

    bench.choose(compare)
    assert len(seen) == 6 and all(count in (16, 32) for count in seen)  # merges count, too
    assert bench.library.rows == [rows for rows in (1, 2, 4, 8, 16, 32) for _ in range(16)]
    assert not bench.driver._graphs and not bench.products.programs


def test_a_recording_tells_why_its_body_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that the driver has given the recording up, too."""

    def give_up(_stream: int, _graph: Any) -> None:
        bench.driver._captured = None
        raise DeviceError("the capture was invalidated")

    monkeypatch.setattr(bench.driver, "_cuStreamEndCapture", give_up)
    with pytest.raises(CapacityError, match="no room"), bench.streams.recording():
        raise CapacityError("no room")
    with pytest.raises(DeviceError, match="invalidated"), bench.streams.recording():
        pass


def test_times_are_compared_in_turns(bench: Bench) -> None:
    clock = [0.0]

    def take(seconds: float) -> Any:
        def pass_time() -> None:
            clock[0] += seconds

        return lambda: bench.driver.give(bench.streams.compute, Act("work", pass_time, Touch))

    ratio = compare_in_graphs(bench.streams, take(3.0), take(4.0), now=lambda: clock[0])
    assert ratio == 0.75
    assert not bench.driver._graphs


def test_a_loaded_model_decodes_by_them(gpu: Gpu, alone: list[tuple[int, ...]]) -> None:
    with gpu.load(200, 1, offload="off") as running:
        assert running.tokens(PROMPTS) == alone
        shapes = {shape for shape, _ in running.engine.pair._products.programs}
    spec = gpu.part.file.spec
    assert (spec.vocab_size, spec.hidden_size) in shapes
    assert (spec.hidden_size, spec.intermediate_size) in shapes
    assert (2 * spec.intermediate_size, spec.hidden_size) in shapes
    assert running.driver.launched["gemm_skinny_f32"] > 0


def test_rates_are_those_the_gpu_tells() -> None:
    told = {CLOCK_RATE: 1_980_000, MEMORY_CLOCK_RATE: 2_619_000, MEMORY_BUS_WIDTH: 5120}
    rates = gpu_rates(SimpleNamespace(attribute=told.__getitem__, multiprocessors=132))
    assert (rates.multiprocessors, rates.clock) == (132, 1.98e9)
    assert rates.bandwidth == pytest.approx(3.352e12, rel=1e-3)


def test_a_module_without_these_kernels_leaves_all_to_the_library(bench: Bench) -> None:
    """Artifacts of older versions have none."""
    bench.load(SimpleNamespace(kernels={}, device=bench.device))
    assert bench.choose(lambda *_: 0.0) == set()
    bench.run(4)
    assert bench.library.rows == [4]


def test_a_load_compares_and_the_next_one_does_as_it(
    gpu: Gpu, alone: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, over torch and in graphs of few products."""
    monkeypatch.setattr("dovetail.runtime.skinny_products.ROWS", (1, 2, 8))
    monkeypatch.setattr("dovetail.runtime.skinny_products.LEAST_CALLS", 1)
    monkeypatch.setattr("dovetail.runtime.skinny_products.ROUNDS", 1)
    mine = copy.copy(gpu)
    shutil.copytree(gpu.artifact.path, tmp_path / "app.dove")
    mine.artifact = open_artifact(tmp_path / "app.dove", read_hardware())
    (mine.part,) = mine.artifact.models.values()
    for old in mine.part.folder.glob("gpu_products.*"):
        old.unlink()
    with mine.load(200, 1, offload="off", compare=None) as first:
        plans = first.engine.pair._products._plan()
        assert first.driver.counts["cuGraphLaunch"] == 2 * len(plans)
        assert not first.driver._graphs
        assert first.tokens(PROMPTS[:2], max_tokens=3) == [tokens[:3] for tokens in alone[:2]]
    with mine.load(200, 1, offload="off", compare=None) as second:
        assert "cuGraphLaunch" not in second.driver.counts
        one, other = (run.engine.pair._products.programs for run in (first, second))
        assert one.keys() == other.keys()


def test_without_graphs_nothing_is_compared(gpu: Gpu) -> None:
    with gpu.load(200, 1, graphs=False) as running:
        assert not running.engine.pair._products.programs
        assert "cuStreamBeginCapture_v2" not in running.driver.counts
