"""NEON under qemu: intrinsics against their meanings, lowered kernels against numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dovetail.codegen.catalog import KernelRequest, kernel_request
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import TARGETS
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.formats import FORMATS
from tests.codegen.emulated import EmulatedKernels, emulator_for
from tests.codegen.isa_probe import check_table
from tests.codegen.lower.test_quads import UNIT, interpreted

NEON = TARGETS["aarch64-neon"]
BESIDE = {
    "aarch64-neon": "",
    "aarch64-dotprod": "aarch64-neon",
    "aarch64-i8mm": "aarch64-dotprod",
}
"""Target to the one whose instructions need no second check."""
AARCH64 = 183
"""The machine number in an ELF header."""


@pytest.mark.parametrize("name", BESIDE)
def test_meanings_equal_the_instructions(name, tmp_path):
    target, beside = TARGETS[name], BESIDE[name]
    known = TARGETS[beside].intrinsics if beside else {}
    rows = [row for row in target.intrinsics.values() if row.name not in known]
    assert rows and not check_table(target, rows, tmp_path, emulator_for(target))


@pytest.mark.parametrize("name", BESIDE)
def test_quads_as_compiled_equal_the_interpreter(name):
    rng = np.random.default_rng(6)
    running = EmulatedKernels(
        TARGETS[name],
        [KernelRequest("quads", k, {}, k) for k in ("dots", "bytes")],
        {"quads": UNIT},
    )
    w, p = rng.integers(0, 128, 64, np.uint8), rng.integers(0, 256, 4, np.uint8)
    s, x, q = (rng.integers(-127, 128, n, np.int8) for n in (64, 64, 4))
    for kernel, args in (
        ("dots", (4, w, s, x, np.arange(16, dtype=np.int32))),
        ("bytes", (p, q, np.zeros(8, np.int32), np.full(9, 99, np.int8))),
    ):
        wanted = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        interpreted(kernel, name, *wanted)
        running.call(kernel, args)
        for got, want in zip(args, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    running.close()


def gemm_request(dtype: str) -> KernelRequest:
    return KernelRequest("gemm", "gemm_linear", {"W": dtype}, f"gemm_{dtype}")


@pytest.fixture(scope="module")
def kernels() -> Iterator[EmulatedKernels]:
    requests = (kernel_request("rmsnorm", NEON), gemm_request("f32"), gemm_request("bf16"))
    running = EmulatedKernels(NEON, requests)
    yield running
    running.close()


@pytest.mark.parametrize("width", [1, 3, 4, 5, 64, 67])
def test_rmsnorm_at_tile_edges(kernels, width):
    rng = np.random.default_rng(width)
    x, w = rng.standard_normal((3, width)).astype(np.float32), np.ones(width, np.float32) * 2
    out = np.full((3, width + 1), 7, np.float32)
    kernels.call("rmsnorm", (3, width, x, width, w, 1e-5, out, width + 1))
    wide = x.astype(np.float64)
    want = 2 * wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out[:, :width], want, rtol=2e-6)
    assert (out[:, width] == 7).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 15, 7), (4, 16, 8), (5, 33, 20)])
def test_gemm_at_tile_edges(kernels, dtype, m, n, k):
    rng = np.random.default_rng(m * n)
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = np.zeros((-(-n // 16) * 16, k), np.float32)
    b[:n] = rng.standard_normal((n, k))
    if dtype == "bf16":
        b = widen_bf16(narrow_bf16(b))
    form = FORMATS[dtype]
    packed = form.pack(narrow_bf16(b) if dtype == "bf16" else b)
    stride = form.panel_elements(k)
    bias, residual = (rng.standard_normal(s).astype(np.float32) for s in (b.shape[0], (m, n)))
    out = np.full((m, n + 3), 9, np.float32)
    slots = (m, n, k, a, k, packed, stride, bias, residual, n, out, n + 3)
    kernels.call(f"gemm_{dtype}", slots, schedule=(4, 0, 0, 1, 1, 1, 1, 0, 0))
    want = a.astype(np.float64) @ b[:n].T + bias[:n] + residual
    np.testing.assert_allclose(out[:, :n], want, rtol=1e-5, atol=1e-5)
    assert (out[:, n:] == 9).all()


def test_library_is_cross_built_with_its_team(tmp_path):
    pytest.importorskip("ziglang")
    request = kernel_request("rmsnorm", NEON)
    built = build_library(LibrarySpec(NEON, (request,)), tmp_path)
    header = built.path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == AARCH64
    assert built.index.target == "aarch64-neon"
