"""Activations of rows, alone and as gates, against float64 at column edges."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr

from tests.codegen.kernels.harness import ACTIVATIONS, Runner, edges

FUNCTIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * ndtr(x),
    "gelu_tanh": lambda x: x / (1 + np.exp(-np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))),
    "tanh": np.tanh,
}


def check(run: Runner, act: str, t: int, h: int, nth: int) -> None:
    rng = np.random.default_rng(h)
    gate, up = (rng.standard_normal((t, h + pad)).astype(np.float32) * 5 for pad in (2, 3))
    out = np.full((t, h + 1), 7, np.float32)
    run(f"gate_rows_{act}", t, h, gate, h + 2, up, h + 3, out, h + 1, nth=nth)
    wide, times = gate[:, :h].astype(np.float64), up[:, :h]
    near(act, out[:, :h], FUNCTIONS[act](wide) * times, wide * times)
    assert (out[:, h:] == 7).all()


def near(act: str, got: np.ndarray, want: np.ndarray, size: np.ndarray) -> None:
    """The error of a function is relative to it, of GELU's error function and tanh to 1."""
    slack = {"silu": 0, "tanh": 2e-7 / np.maximum(np.abs(size), 1e-9)}.get(act, 4e-7)
    assert (np.abs(got - want) <= 1e-6 * np.abs(want) + slack * np.abs(size) + 1e-12).all()


@pytest.mark.parametrize("act", ACTIVATIONS["gate_rows"])
def test_every_column_edge(any_runner: Runner, act: str) -> None:
    for h in edges(any_runner.lanes):
        check(any_runner, act, 2, h, 3)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_long_rows_are_shared_between_threads(native: Runner, nth: int) -> None:
    for h in (511, 512, 513, 1100):
        check(native, "silu", 3, h, nth)


@pytest.mark.parametrize("act", ACTIVATIONS["activate_rows"])
def test_activations_of_rows(any_runner: Runner, act: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 21)).astype(np.float32) * 4
    out = np.zeros((3, 21), np.float32)
    any_runner(f"activate_rows_{act}", 3, 21, x, 21, out, 21, nth=2)
    wide = x.astype(np.float64)
    near(act, out, FUNCTIONS[act](wide), wide)
    any_runner(f"activate_rows_{act}", 3, 21, x, 21, x, 21, nth=2)
    np.testing.assert_array_equal(x, out)


def test_the_result_may_replace_the_gate(native: Runner) -> None:
    gate, up = np.linspace(-3, 3, 70, dtype=np.float32), np.arange(70, dtype=np.float32)
    want = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    native("gate_rows_silu", 1, 70, gate, 70, up, 70, gate, 70)
    np.testing.assert_allclose(gate, want, rtol=1e-6)
