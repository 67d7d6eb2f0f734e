"""Generated products on torch's CPU, by the kernels' text as C++: right, chosen by measurement."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dovetail.codegen.catalog import device_kernels
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.tape.forward import build_forward_tape
from dovetail.ir.errors import DeviceError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import ExpertSpec
from dovetail.runtime.accel import generated
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.accel.experts import without_experts
from dovetail.runtime.accel.generated import (
    GeneratedProducts,
    find_operands,
    panel_bytes,
)
from dovetail.runtime.accel.skinny import gemm_skinny, register_module
from dovetail.runtime.accel.weights import load_weights
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.native.polymerize import GpuSpec
from dovetail.runtime.native.weights import Weights
from dovetail.topology.hardware import read_hardware
from tests.blocks import random_blocks
from tests.codegen.kernels.harness import SOME_FORMATS
from tests.codegen.warp_host import WarpLibrary, warp_library
from tests.compiler.tape.test_forward import make_spec, plan_weights
from tests.models import save_model

CPU = torch.device("cpu")
H100 = GpuSpec(132, 1.75e9, 3.35e12)
N, K = 96, 512
BLOCKS = {"q": ("q4_32m", "packed"), "gate_up": ("q8_32", "packed_pair")}


@cache
def module() -> WarpLibrary:
    return warp_library(device_kernels(SOME_FORMATS))


class Stored:
    """Plain and quantised weights as an artifact has them: gate and up in turns of a panel."""

    def __init__(self) -> None:
        plain = SimpleNamespace(layout="packed", dtype="f32", n=N, k=K)
        self.entries, self.packed, self.values = {"w": plain}, {}, {}
        for name, (form, layout) in BLOCKS.items():
            blocks = random_blocks(FORMATS[form], N, K, len(name))
            panels = FORMATS[form].pack(blocks)
            if layout == "packed_pair":
                panels = np.stack([panels[: N // 32], panels[N // 32 :]], 1)
            self.packed[name] = panels.reshape(-1)
            self.values[name] = FORMATS[form].values(blocks).astype(np.float64)
            self.entries[name] = SimpleNamespace(layout=layout, dtype=form, n=N, k=K)

    def array(self, name: str) -> np.ndarray:
        return self.packed[name]


class Bench:
    """Products of one plain and two quantised weights, chosen in a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.stored, self.folder, self.dtype = Stored(), folder, dtype
        plain = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.values = {**self.stored.values, "w": plain.double().numpy()}
        tensors = {name: torch.from_numpy(self.values[name]).to(dtype) for name in BLOCKS}
        operands = find_operands({"w": plain, **tensors}, self.stored, CPU)
        self.own_calls: list[str] = []
        self.products = GeneratedProducts(module(), H100, operands, folder, CPU, dtype)

    def own(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.own_calls.append(name)
        return x @ torch.from_numpy(self.values[name]).to(x.dtype).T

    def choose(self, *ratios: float, rows: tuple[int, ...] = (1, 4)) -> None:
        """Choose by ratios, as if measured: shape by shape, rows ascending."""
        found = iter(ratios)

        def compare(ours: Any, theirs: Any) -> float:
            ours()
            theirs()
            return next(found)

        self.products.choose(self.own, rows, compare)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_nothing_is_generated_before_a_measurement(bench: Bench) -> None:
    assert bench.products.product("w", 1) is None
    assert bench.products.product("q", 1) is None


def test_a_program_runs_where_it_was_faster(bench: Bench) -> None:
    bench.choose(0.5, 1.2, 0.98, 0.96, 0.1, 0.1)
    taken = {
        (name, rows)
        for name in (*BLOCKS, "w")
        for rows in (1, 2, 4)
        if bench.products.product(name, rows)
    }
    assert taken == {("w", 1), ("q", 4), ("gate_up", 1), ("gate_up", 4)}
    assert set(bench.own_calls) == {"w", "q", "gate_up"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w", "q", "gate_up"])
def test_products_equal_float64(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Bias or none, rows that lie apart, K in stretches; halves in the order of torch's weights."""
    bench = Bench(tmp_path, dtype)
    bench.choose(*[0.0] * 6)
    assert max(program.splits for program in bench.products.programs.values()) > 1
    for rows in (1, 4):
        x = torch.randn(rows, K + 3).to(dtype)[:, :K]
        bias = torch.randn(N).to(dtype)
        want = x.double().numpy() @ bench.values[name].T
        size = np.abs(x.double().numpy()) @ np.abs(bench.values[name]).T
        multiply = bench.products.product(name, rows)
        for added in (None, bias):
            got = multiply(x, added)
            total = want if added is None else want + bias.double().numpy()
            assert got.dtype == dtype and got.shape == (rows, N)
            bound = 2e-6 * size + torch.finfo(dtype).eps * np.abs(total) + 1e-6
            assert (np.abs(got.double().numpy() - total) <= bound).all()


def test_the_choice_is_kept_and_taken_by_the_next_load(bench: Bench) -> None:
    bench.choose(0.5, 2.0, 2.0, 0.5, 2.0, 2.0)
    (kept,) = bench.folder.iterdir()
    assert json.loads(kept.read_bytes()) == [[[N, K, "f32"], 1], [[N, K, "q4_32m"], 4]]
    again = Bench(bench.folder)
    again.choose()  # measures nothing: there is no ratio to take
    assert again.products.programs.keys() == bench.products.programs.keys()
    assert again.own_calls == []


def test_other_rows_are_compared_on_their_own(bench: Bench) -> None:
    bench.choose(*[0.5] * 6)
    bench.choose(*[0.5] * 3, rows=(2,))
    assert len([*bench.folder.iterdir()]) == 2


def test_a_gpu_that_does_not_tell_its_rates_leaves_all_to_torch(bench: Bench) -> None:
    bench.products._rates = replace(H100, bandwidth=0.0)
    bench.choose()
    assert bench.products.programs == {} and not [*bench.folder.iterdir()]


def test_without_room_on_the_device_all_is_torchs(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def full(ours: Any, theirs: Any) -> float:
        raise torch.OutOfMemoryError("no room")

    with caplog.at_level(logging.WARNING, "dovetail"):
        bench.products.choose(bench.own, (1,), full)
    assert "all matrix products on cpu: no room" in caplog.text
    assert bench.products.product("w", 1) is None


def test_which_weights_have_products() -> None:
    """Matrices that were packed; in blocks where they are whole, and K is whole units."""
    stored = Stored()
    for name, layout, k in (("norm", "vector", 1), ("embed", "packed", K), ("odd", "packed", 500)):
        stored.entries[name] = SimpleNamespace(layout=layout, dtype="q4_32", n=N, k=k)
    tensors = {name: torch.zeros(e.n, e.k) for name, e in stored.entries.items()}
    tensors["q"] = tensors["q"][: N // 2]  # a rank's part
    found = {name: o.form for name, o in find_operands(tensors, stored, CPU).items()}
    assert found == {"w": "f32", "q": "f32", "gate_up": "q8_32", "odd": "f32"}


def test_there_are_none_on_other_devices_nor_without_a_module() -> None:
    without = SimpleNamespace(manifest=SimpleNamespace(targets=("generic",)))
    with_module = SimpleNamespace(manifest=SimpleNamespace(targets=("generic", "cuda")))
    for artifact, device in ((with_module, CPU), (without, torch.device("cuda"))):
        found = GeneratedProducts.open(artifact, None, None, {}, device, torch.float32)
        assert found is None


def operands(x: torch.Tensor, kernels: WarpLibrary) -> tuple[Any, ...]:
    regions = torch.tensor([[0, 0, 2, 3, 0, 0, 0]])
    weight = torch.randn(3, x.shape[1])
    name = register_module(kernels)
    return x, weight, torch.randn(3), regions, 3, x.shape[1], 1, 1, 2, "f32", name


def test_it_is_an_operator_of_torch() -> None:
    """Its schema holds, and what it says of tensors without data is what it does."""
    torch.library.opcheck(
        torch.ops.dovetail.gemm_skinny,
        operands(torch.randn(2, 40), module()),
        test_utils=("test_schema", "test_faketensor"),
    )
    without = [
        a.to("meta") if hasattr(a, "to") else a for a in operands(torch.ones(2, 8), module())
    ]
    assert gemm_skinny(*without).shape == (2, 3)


def test_without_kernels_the_operator_says_what_to_do() -> None:
    given = operands(torch.randn(2, 40), module())
    with pytest.raises(DeviceError, match=r"loaded as 'gone'.* `--target cuda`"):
        gemm_skinny(*given[:-1], "gone")
    with pytest.raises(DeviceError, match="no gemm_skinny_q5_32_f32; run `dovetail compile`"):
        gemm_skinny(*given[:-2], "q5_32", given[-1])


def test_experts_are_not_compared_one_by_one() -> None:
    spec = make_spec(experts=ExpertSpec(count=4, used=2), intermediate_size=112)
    tape = build_forward_tape(spec, plan_weights(spec), 64, 8)
    names = ("layers.0.o", "layers.1.gate_up", "layers.1.down", "layers.1.router", "head")
    kept = without_experts(tape, dict.fromkeys(names, torch.zeros(1)))
    assert list(kept) == ["layers.0.o", "layers.1.router", "head"]


def test_weights_of_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real artifact has packed gives the products of what the device has unpacked."""
    folder = save_model(tmp_path / "model", "llama", intermediate_size=128)
    compile_model(folder, output=tmp_path / "a.dove", effort="none", weight_dtype="int4")
    (part,) = open_artifact(tmp_path / "a.dove", read_hardware()).models.values()
    weights = Weights(part)
    tensors = load_weights(TorchDevice("torch:cpu"), weights, torch.float32)
    found = find_operands(tensors, weights, CPU)
    monkeypatch.setattr(generated, "device_module", lambda artifact: artifact)
    entries, gpu = part.file.weights, "cuda"
    panels = sum(o.put().nbytes for o in found.values() if o.form != "f32")
    for there, device, wanted in ((part, gpu, panels), (None, gpu, 0), (part, "cpu", 0)):
        assert panel_bytes(there, entries, torch.device(device)) == wanted  # type: ignore[arg-type]
    kinds = {o.form for o in found.values()}
    assert {"layers.0.gate_up", "layers.1.down", "layers.0.o", "head"} <= found.keys()
    assert kinds <= {"q4_32", "q8_32", "f32"} and kinds & {"q4_32", "q8_32"}
    products = GeneratedProducts(module(), H100, found, tmp_path, CPU, torch.float32)
    products.choose(lambda name, x: x @ tensors[name].T, (2,), lambda *_: 0.0)
    for name, operand in found.items():
        x = torch.randn(2, operand.k)
        got = products.product(name, 2)(x, None)
        torch.testing.assert_close(got, x @ tensors[name].T, rtol=1e-4, atol=1e-4)
