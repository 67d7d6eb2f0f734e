"""Activations of rows against float64 at column edges."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr

from tests.codegen.kernels.harness import ACTIVATIONS, Runner, edges

FUNCTIONS = {
    "gelu": lambda x: x * ndtr(x),
    "gelu_tanh": lambda x: x / (1 + np.exp(-np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))),
    "tanh": np.tanh,
}


def check(run: Runner, act: str, t: int, h: int, nth: int) -> None:
    """Into rows beside others, and in place."""
    x = np.random.default_rng(h).standard_normal((t, h + 2)).astype(np.float32) * 4
    out = np.full((t, h + 1), 7, np.float32)
    run(f"activate_rows_{act}", t, h, x, h + 2, out, h + 1, nth=nth)
    wide = x[:, :h].astype(np.float64)
    near(act, out[:, :h], FUNCTIONS[act](wide), wide)
    assert (out[:, h:] == 7).all()
    run(f"activate_rows_{act}", t, h, x, h + 2, x, h + 2, nth=nth)
    np.testing.assert_array_equal(x[:, :h], out[:, :h])


def near(act: str, got: np.ndarray, want: np.ndarray, size: np.ndarray) -> None:
    """The error of a function is relative to it, of GELU's error function and tanh to 1."""
    slack = {"tanh": 2e-7 / np.maximum(np.abs(size), 1e-9)}.get(act, 4e-7)
    assert (np.abs(got - want) <= 1e-6 * np.abs(want) + slack * np.abs(size) + 1e-12).all()


@pytest.mark.parametrize("act", ACTIVATIONS["gate_rows"])
def test_rows_are_gated_by_others(any_runner: Runner, act: str) -> None:
    rng = np.random.default_rng(3)
    for h in edges(any_runner.lanes):
        x, y = (rng.standard_normal((3, h + 2)).astype(np.float32) for _ in range(2))
        scaled = x[:, :h].astype(np.float64) * 2.5
        gate = scaled / (1 + np.exp(-scaled)) if act == "silu" else FUNCTIONS[act](scaled)
        want = gate * y[:, :h]
        any_runner(f"gate_rows_{act}", 3, h, x, h + 2, 2.5, y, h + 2, nth=2)
        np.testing.assert_allclose(x[:, :h], want, rtol=2e-6, atol=2e-6)


def test_rows_are_capped(any_runner: Runner) -> None:
    for v in edges(any_runner.lanes):
        x = np.random.default_rng(v).standard_normal((2, v + 3)).astype(np.float32) * 60
        there = x.copy()
        any_runner("cap_rows", 2, v, 30.0, x, v + 3, nth=3)
        want = 30 * np.tanh(there[:, :v].astype(np.float64) / 30)
        np.testing.assert_allclose(x[:, :v], want, rtol=1e-6, atol=1e-5)
        assert (x[:, v:] == there[:, v:]).all()


def test_xielu_of_numbers_of_a_layer(any_runner: Runner) -> None:
    numbers = np.array([-0.7, 0.4, 0.5], np.float32)
    (p, n), b = np.log1p(np.exp(numbers[:2].astype(np.float64))), 0.5
    for h in edges(any_runner.lanes):
        x = np.random.default_rng(h).standard_normal((2, h + 3)).astype(np.float32) * 6
        there, y = x.copy(), x[:, :h].astype(np.float64)
        any_runner("xielu_rows", 2, h, x, h + 3, numbers, nth=3)
        want = np.where(y > 0, p * y * y, (n + b) * (np.expm1(np.minimum(y, 0)) - y)) + b * y
        np.testing.assert_allclose(x[:, :h], want, rtol=2e-6, atol=2e-6)
        assert (x[:, h:] == there[:, h:]).all()


@pytest.mark.parametrize("act", ACTIVATIONS["activate_rows"])
def test_every_column_edge(any_runner: Runner, act: str) -> None:
    for h in (*edges(any_runner.lanes), 21):
        check(any_runner, act, 3, h, 2)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_long_rows_are_shared_between_threads(native: Runner, nth: int) -> None:
    for h in (511, 512, 513, 1100):
        check(native, "gelu", 3, h, nth)
