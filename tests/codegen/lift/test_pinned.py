"""GEMM micro-kernels keep the width they were written for, and still run on every target."""

import numpy as np
import pytest

from dovetail.codegen.lift import lift
from dovetail.ir.diagnostics import Source
from dovetail.ir.low.parse import parse_low
from tests.codegen.lift.native import EACH, lifted, run_lifted, run_original
from tests.codegen.lift.native import NATIVE as HERE
from tests.codegen.lift.test_scalar import draw
from tests.shares import in_turns, share

NEON = "aarch64-neon"
CASES = {
    "kn_gemm_2x16_fma3": ("gemm_fma3.c", "x86-64-avx2", 2, 16, "8"),
    "kn_gemm_1x32_avx512f": ("gemm_avx512.c", "x86-64-avx512", 1, 32, "16"),
    "kn_gemm_1x8_neonfma": ("gemm_neon.c", NEON, 1, 8, "4"),
}
K = 5


def aligned(values):
    """The values at a 64-byte boundary, as packed weights are."""
    raw = np.zeros(values.size + 16, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    raw[start : start + values.size] = values.reshape(-1)
    return raw[start : start + values.size]


def arguments(rows, columns, mr, nc, k=K):
    blocks = -(-nc // columns)
    a, b = draw(rows, k), draw(k, blocks * columns, seed=1)
    bias = draw(blocks * columns, seed=2)
    packed = [np.vstack([bias[None], b])[:, i * columns : (i + 1) * columns] for i in range(blocks)]
    out = np.zeros((rows, nc + 4), np.float32)
    limits = np.array([-1.5, 2.0], np.float32)
    args = [mr, nc, 4 * k, a, a.strides[0], aligned(np.array(packed)), out]
    args += [out.strides[0], 4 * columns, limits]
    want = np.clip(a.astype(np.float64) @ b + bias, -1.5, 2.0)[:mr, :nc]
    return args, want


@pytest.mark.parametrize(("function", "target"), share(in_turns(list(CASES), EACH), 3))
def test_pinned_kernels_give_the_product_and_the_numbers_of_the_original(function, target):
    file, original, rows, columns, _ = CASES[function]
    for nc in sorted({1, 2, 3, columns - 1, columns, columns + 1, columns + 7, 2 * columns}):
        for mr in range(1, rows + 1):
            args, want = arguments(rows, columns, mr, nc)
            run_lifted(file, function, target, args)
            out = args[6]
            got = out[:mr, :nc]
            assert np.all(np.abs(got - want) <= 2e-6 * K), (nc, mr)
            assert not out[:, nc:].any() and not out[mr:].any()
            if original in HERE or original == NEON:
                again, _ = arguments(rows, columns, mr, nc)
                run_original(file, function, original, again)
                assert np.all(np.abs(again[6] - out) <= 1e-6 * np.maximum(np.abs(out), 1))


@pytest.mark.parametrize("function", CASES)
def test_the_note_says_so(function):
    file, _, _, _, lanes = CASES[function]
    notes = lifted(file, function).notes
    assert f"pinned to vectors of {lanes} lanes; other widths use groups or parts of them" in notes


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("__m256 v = _mm256_permute_ps(_mm256_loadu_ps(x), 1); _mm256_storeu_ps(y, v);", "whole"),
        ("__m256 v = _mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(y), 1);", "_mm256_cmp_ps"),
    ],
)
def test_what_moves_lanes_is_written_out_and_the_reason_told(body, reason):
    unit = parse_low(Source("k.c", f"void f(const float *x, float *y) {{ {body} }}"))
    assert reason in lift(unit, "f").notes[0]
