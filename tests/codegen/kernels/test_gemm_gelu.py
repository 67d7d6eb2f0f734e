"""Products with an activation, against float64: slices and parts of K are activated once."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

import numpy as np
import pytest
from scipy.special import ndtr

from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import TARGETS, host_features, runs_on
from dovetail.compiler.rules.schedules import (
    ACTIVATED,
    CLAMPED,
    GEGLU,
    GEGLU_TANH,
    built_tiles,
    gemm_requests,
    kernel_name,
    make_schedule,
)
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import RELU2
from dovetail.runtime.machine import abi
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.shares import in_turns, share

PLAIN = [n for n, t in FLOAT_TARGETS.items() if not t.rounds_rows]
NATIVE = [n for n in PLAIN if runs_on(TARGETS[n], platform.machine(), host_features())]
CASES = [("gelu", "f32"), ("gelu_tanh", "bf16"), (RELU2, "f32")]


def wanted(kind: str, sums: np.ndarray) -> np.ndarray:
    if kind == RELU2:
        return np.maximum(sums, 0) ** 2
    if kind == "gelu":
        return sums * ndtr(sums)
    return sums / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (sums + 0.044715 * sums**3)))


@cache
def library(target: str, kind: str, dtype: str) -> tuple[ctypes.CDLL, str]:
    """Build the kernel of the smallest tile, which has the name, and those that add up parts."""
    tiles = built_tiles(kind, TARGETS[target], dtype).values()
    name = kernel_name(kind, dtype, min(tiles, key=lambda tile: tile.rows * tile.panels))
    requests = gemm_requests((dtype,), TARGETS[target], (kind,))
    chosen = tuple(r for r in requests if r.name == name or "reduce" in r.name)
    spec = LibrarySpec(TARGETS[target], chosen, team=False, tvm_ffi=False)
    return ctypes.CDLL(str(build_library(spec).path)), name


def product(target: str, kind: str, dtype: str, m: int, n: int, k: int, **schedule: int) -> None:
    """Run on two threads' shares with bias and residual, and compare."""
    random = np.random.default_rng(m * n + k)
    a = random.standard_normal((m, k), np.float32)
    weight = random.standard_normal((n, k), np.float32) * np.float32(k**-0.5)
    bias = np.zeros(-(-n // 16) * 16, np.float32)
    bias[:n] = random.standard_normal(n, np.float32)
    residual = random.standard_normal((m, n), np.float32)
    stored = narrow_bf16(weight) if dtype == "bf16" else weight
    exact = widen_bf16(stored) if dtype == "bf16" else weight
    packed = FORMATS[dtype].pack(stored)
    out, partial = np.full((m, n + 3), 7, np.float32), np.empty(1 << 16, np.float32)
    values = (
        m,
        n,
        k,
        a,
        k,
        packed,
        packed.shape[1],
        bias,
        residual,
        n,
        out,
        n + 3,
        partial,
        1 << 16,
    )
    built, name = library(target, kind, dtype)
    kernels = [name]
    if schedule.get("grid_k", 1) > 1:
        kernels.append(f"gemm_{kind}_reduce_{dtype}")
    for kernel in kernels:
        call(built, kernel, values, **schedule)
    sums = a.astype(np.float64) @ exact.T.astype(np.float64) + bias[:n] + residual
    np.testing.assert_allclose(out[:, :n], wanted(kind, sums), rtol=2e-5, atol=2e-5)
    assert (out[:, n:] == 7).all()


def call(
    built: ctypes.CDLL, kernel: str, values: tuple[int | np.ndarray, ...], **schedule: int
) -> None:
    """Run two threads' shares of a kernel one after the other."""
    slots = (abi.Slot * len(values))(
        *(abi.Slot(i=v if isinstance(v, int) else v.ctypes.data) for v in values)
    )
    row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*make_schedule(**schedule))
    for tid in range(2):
        built[f"dt_entry_{kernel}"](slots, row, ctypes.c_int64(tid), ctypes.c_int64(2))


def gated_product(
    target: str, kind: str, dtype: str, m: int, n: int, k: int, **schedule: int
) -> None:
    """Run an activation of one weight's product times another's, with biases, and compare."""
    random = np.random.default_rng(m * n + k)
    a = random.standard_normal((m, k), np.float32)
    pair = random.standard_normal((2, n, k), np.float32) * np.float32(k**-0.5)
    biases = random.standard_normal((2, n), np.float32) * np.float32(5 if kind == CLAMPED else 1)
    stored = narrow_bf16(pair) if dtype == "bf16" else pair
    exact = widen_bf16(stored) if dtype == "bf16" else pair
    packed = np.stack([FORMATS[dtype].pack(half) for half in stored], axis=1)
    padded = np.zeros((2, -(-n // 16) * 16), np.float32)
    padded[:, :n] = biases
    ordered = np.ascontiguousarray(padded.reshape(2, -1, 16).swapaxes(0, 1))
    stride = FORMATS[dtype].panel_elements(k)
    out = np.full((m, n + 3), 7, np.float32)
    built, name = library(target, kind, dtype)
    given = (m, n, k, a, k, packed, stride, ordered, out, n + 3)
    call(built, name, given, **schedule)
    gate, up = (
        a.astype(np.float64) @ half.T.astype(np.float64) + bias
        for half, bias in zip(exact, biases, strict=True)
    )
    if kind == CLAMPED:
        low = np.minimum(gate, 7)
        pair = low / (1 + np.exp(-1.702 * low)) * (np.clip(up, -7, 7) + 1)
    else:
        pair = wanted("gelu" if kind == GEGLU else "gelu_tanh", gate) * up
    np.testing.assert_allclose(out[:, :n], pair, rtol=2e-5, atol=2e-5)
    assert (out[:, n:] == 7).all()


GATES = [(GEGLU, "bf16"), (GEGLU_TANH, "f32"), (CLAMPED, "f32"), (GEGLU, "f32")]


@pytest.mark.parametrize(("target", "kind", "dtype"), share(in_turns(NATIVE, GATES), 4))
def test_an_activation_is_a_gate(target: str, kind: str, dtype: str) -> None:
    for m, n, k in ((1, 16, 16), (5, 37, 48), (19, 130, 70)):
        gated_product(target, kind, dtype, m, n, k, m_tile=3, grid_n=2)
        gated_product(target, kind, dtype, m, n, k, m_tile=2, block_m=4, block_n=1)


@pytest.mark.parametrize(("target", "kind", "dtype"), share(in_turns(NATIVE, CASES), 3))
def test_sums_are_activated_once(target: str, kind: str, dtype: str) -> None:
    for m, n, k in ((1, 16, 16), (5, 37, 48), (19, 130, 70)):
        product(target, kind, dtype, m, n, k, m_tile=3, grid_n=2)
        product(target, kind, dtype, m, n, k, m_tile=2, block_m=4, block_k=16, block_n=1)
        product(target, kind, dtype, m, n, k, m_tile=2, grid_k=2)


def test_every_activation_has_tiles_and_a_reduction() -> None:
    for kind in ACTIVATED:
        for target in TARGETS.values():
            names = [r.name for r in gemm_requests(("f32",), target, (kind,))]
            assert f"gemm_{kind}_reduce_f32" in names
            assert len(names) == len(set(names)) > 1
