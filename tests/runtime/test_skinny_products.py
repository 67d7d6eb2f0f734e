"""Products of few rows by generated kernels on an emulated GPU: by which are chosen, and right."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.ir.errors import ArtifactError
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
from tests.gpu_touches import Touch
from tests.lazy_gpu import Act, LazyDriver
from tests.runtime.cuda_gpu import PROMPTS, Gpu


@dataclass
class Library:
    """A library of products that notes what it is asked for and computes nothing."""

    rows: list[int] = field(default_factory=list)

    def bind(self, product: Product, rows: int) -> Any:
        return product

    def run(self, bound: Any, rows: int, stream: int) -> None:
        self.rows.append(rows)


class Bench:
    """SkinnyProducts with one product of 24 x 70 on an emulated GPU; residual and C are one."""

    def __init__(self, gpu: Gpu) -> None:
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
        module = self.device.load(*gpu.module)
        self.products = SkinnyProducts(self.library, weights, module)
        a = Matrix(self.a.ctypes.data, 70, 75)
        out = Matrix(self.c.ctypes.data, 24, 30)
        self.bound = self.products.bind(Product(a, "w", "w_bias", out, out), 40)

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
def bench(gpu: Gpu) -> Any:
    made = Bench(gpu)
    yield made
    made.close()


def test_a_program_runs_where_it_was_faster_and_the_library_elsewhere(bench: Bench) -> None:
    compared = iter([0.5, 2.0, 0.96, 0.98, 0.1, 0.1])  # 1, 2, 4, 8, 16 and 32 of at most 40 rows
    bench.products.choose(bench.streams, lambda *_: next(compared))
    assert {rows for _, rows in bench.products.programs} == {1, 4, 16, 32}
    for rows in (1, 4, 16, 32):
        want = bench.run(rows)
        np.testing.assert_allclose(bench.c, want, rtol=1e-5, atol=1e-4)
    assert bench.library.rows == []
    for rows in (2, 3, 8, 33, 40):
        bench.run(rows)
    assert bench.library.rows == [2, 3, 8, 33, 40]


def test_sums_of_stretches_are_merged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with many slots the one row is split along K."""
    monkeypatch.setattr(bench.device, "multiprocessors", 132)
    monkeypatch.setattr("dovetail.runtime.polymerize.LEAST_STEPS", 1)
    bench.products.choose(bench.streams, lambda *_: 0.0)
    (program,) = (p for (_, rows), p in bench.products.programs.items() if rows == 1)
    assert program.splits > 1
    want = bench.run(1)
    np.testing.assert_allclose(bench.c, want, rtol=1e-5, atol=1e-4)


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

    bench.products.choose(bench.streams, compare)
    assert len(seen) == 6 and all(count in (16, 32) for count in seen)  # merges count, too
    assert bench.library.rows == [rows for rows in (1, 2, 4, 8, 16, 32) for _ in range(16)]
    assert not bench.driver._graphs and not bench.products.programs


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


def test_an_artifact_without_these_kernels_is_refused(bench: Bench) -> None:
    module = SimpleNamespace(kernels={}, device=bench.device)
    with pytest.raises(ArtifactError, match="lack 'gemm_skinny'"):
        SkinnyProducts(bench.library, {}, module)
