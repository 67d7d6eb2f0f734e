from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.kernels.harness import Runner, edges
from tests.codegen.kernels.reference import rmsnorm


def check(run: Runner, t: int, h: int, nth: int) -> None:
    rng = np.random.default_rng(h * 100 + t)
    x = rng.standard_normal((t, h + 5)).astype(np.float32)
    w = rng.standard_normal(h).astype(np.float32)
    out = np.full((t, h + 3), 7, np.float32)
    run("rmsnorm", t, h, x, h + 5, w, 1e-5, out, h + 3, nth=nth)
    np.testing.assert_allclose(out[:, :h], rmsnorm(x[:, :h], w, 1e-5), rtol=3e-6, atol=1e-6)
    assert (out[:, h:] == 7).all()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_rows_are_normed_whatever_the_thread_count(native: Runner, nth: int) -> None:
    for t in (1, 2, 4, 7):
        for h in (16, 100, 768):
            check(native, t, h, nth)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_normed_row_is_added_to_what_is_there(native: Runner, nth: int) -> None:
    rng = np.random.default_rng(nth)
    for t, h in ((1, 100), (2, 16), (5, 77)):
        x, there = (rng.standard_normal((t, h + 3)).astype(np.float32) for _ in range(2))
        w = rng.standard_normal(h).astype(np.float32)
        for scale in (None, np.array([0.3], np.float32)):
            out = there.copy()
            native("rmsnorm_add", t, h, x, h + 3, w, 1e-5, scale, out, h + 3, nth=nth)
            wanted = there[:, :h] + rmsnorm(x[:, :h], w, 1e-5)
            wanted *= 1 if scale is None else scale
            np.testing.assert_allclose(out[:, :h], wanted, rtol=3e-6, atol=2e-6)
            assert (out[:, h:] == there[:, h:]).all()


@pytest.mark.parametrize("nth", [1, 3])
def test_parts_of_rows_are_normed_alike(native: Runner, nth: int) -> None:
    rng, t, n, h = np.random.default_rng(nth), 3, 4, 20
    x, there = (rng.standard_normal((t, n * h + 3)).astype(np.float32) for _ in range(2))
    w, out = rng.standard_normal(h).astype(np.float32), there.copy()
    native("rmsnorm_parts", t, n, h, x, n * h + 3, w, 1e-5, out, n * h + 3, nth=nth)
    parts = rmsnorm(x[:, : n * h].reshape(t, n, h), w, 1e-5).reshape(t, -1)
    np.testing.assert_allclose(out[:, : n * h], there[:, : n * h] + parts, rtol=3e-6, atol=2e-6)
    assert (out[:, n * h :] == there[:, n * h :]).all()


@pytest.mark.parametrize("nth", [1, 3])
def test_rows_are_normed_in_place(any_runner: Runner, nth: int) -> None:
    rng = np.random.default_rng(nth)
    for t, h in ((1, 16), (4, 77)):
        x, w = rng.standard_normal((t, h + 3)).astype(np.float32), np.ones(h, np.float32) * 0.7
        out = x.copy()
        any_runner("norm_rows", t, h, out, h + 3, w, 1e-5, nth=nth)
        np.testing.assert_allclose(out[:, :h], rmsnorm(x[:, :h], w, 1e-5), rtol=3e-6, atol=2e-6)
        assert (out[:, h:] == x[:, h:]).all()


@pytest.mark.parametrize("nth", [1, 3])
def test_rows_are_added_times_a_number(native: Runner, nth: int) -> None:
    rng = np.random.default_rng(nth)
    for t, h in ((1, 100), (3, 1030)):
        x, there = (rng.standard_normal((t, h + 3)).astype(np.float32) for _ in range(2))
        out = there.copy()
        native("scaled_add", t, h, x, h + 3, 0.3, out, h + 3, nth=nth)
        np.testing.assert_allclose(out[:, :h], there[:, :h] + 0.3 * x[:, :h], rtol=3e-6, atol=1e-6)
        assert (out[:, h:] == there[:, h:]).all()


def test_every_column_edge(any_runner: Runner) -> None:
    for h in edges(any_runner.lanes, 4 * any_runner.lanes):
        check(any_runner, 2, h, 3)


def test_a_zero_row_stays_zero(native: Runner) -> None:
    out = np.ones((1, 32), np.float32)
    run_args = (1, 32, np.zeros((1, 32), np.float32), 32, np.ones(32, np.float32), 1e-6)
    native("rmsnorm", *run_args, out, 32)
    assert (out == 0).all()
