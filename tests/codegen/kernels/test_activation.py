from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.kernels.harness import Runner, edges


def check(run: Runner, t: int, h: int, nth: int) -> None:
    rng = np.random.default_rng(h)
    gate, up = (rng.standard_normal((t, h + pad)).astype(np.float32) * 5 for pad in (2, 3))
    out = np.full((t, h + 1), 7, np.float32)
    run("silu_mul", t, h, gate, h + 2, up, h + 3, out, h + 1, nth=nth)
    x = gate[:, :h].astype(np.float64)
    want = x / (1 + np.exp(-x)) * up[:, :h]
    np.testing.assert_allclose(out[:, :h], want, rtol=1e-6, atol=1e-12)
    assert (out[:, h:] == 7).all()


def test_every_column_edge(any_runner: Runner) -> None:
    for h in edges(any_runner.lanes):
        check(any_runner, 2, h, 3)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_long_rows_are_shared_between_threads(native: Runner, nth: int) -> None:
    for h in (511, 512, 513, 1100):
        check(native, 3, h, nth)


def test_the_result_may_replace_the_gate(native: Runner) -> None:
    gate, up = np.linspace(-3, 3, 70, dtype=np.float32), np.arange(70, dtype=np.float32)
    want = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    native("silu_mul", 1, 70, gate, 70, up, 70, gate, 70)
    np.testing.assert_allclose(gate, want, rtol=1e-6)
