from __future__ import annotations

from itertools import pairwise

import numpy as np

from tests.codegen.kernels.harness import Runner, edges


def test_means_of_sequences_at_column_edges(any_runner: Runner) -> None:
    starts = np.array([0, 1, 4, 9], np.int32)
    for h in edges(any_runner.lanes, 128):
        x = np.random.default_rng(h).standard_normal((9, h + 2)).astype(np.float32)
        out = np.full((3, h + 1), 7, np.float32)
        any_runner("mean_rows", 3, h, starts, x, h + 2, out, h + 1, nth=2)
        bounds = pairwise(starts)
        wanted = np.array([x[a:b, :h].astype(np.float64).mean(0) for a, b in bounds])
        np.testing.assert_allclose(out[:, :h], wanted, rtol=1e-5, atol=1e-6)
        assert (out[:, h] == 7).all()


def test_rows_of_unit_length_and_zeros_stay(any_runner: Runner) -> None:
    x = np.random.default_rng(0).standard_normal((4, 37)).astype(np.float32) * 50
    x[2] = 0
    out = np.full((4, 39), 7, np.float32)
    any_runner("unit_rows", 4, 37, x, 37, out, 39, nth=3)
    wanted = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(out[:, :37], wanted, rtol=1e-6, atol=1e-7)
