"""Expected products: plain float64, whatever rows and panels were asked for before."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr

from dovetail.compiler.measure.expected import (
    ExpectedProduct,
    agrees,
    panels_to_check,
    rows_to_check,
)
from dovetail.ir.model import PANEL

N, K, M = 37, 21, 30
RANDOM = np.random.default_rng(3)
A = RANDOM.standard_normal((M, K)).astype(np.float32)
B = RANDOM.standard_normal((2 * -(-N // PANEL), K, PANEL))


def product(kind: str) -> np.ndarray:
    plain = (A.astype(np.float64) @ np.concatenate(B, axis=1))[:, :N]
    if kind == "linear":
        return plain
    if kind == "gelu":
        return plain * ndtr(plain)
    gate, up = (A.astype(np.float64) @ np.concatenate(B[side::2], axis=1) for side in (0, 1))
    if kind == "clamped":
        low = np.minimum(gate, 7)
        return (low / (1 + np.exp(-1.702 * low)) * (np.clip(up, -7, 7) + 1))[:, :N]
    weight = ndtr(gate) if kind == "geglu" else 1 / (1 + np.exp(-gate))
    return (gate * weight * up)[:, :N]


@pytest.mark.parametrize("kind", ["linear", "silu", "gelu", "geglu", "clamped"])
def test_rows_and_panels_are_those_of_the_whole_product(kind):
    whole = product(kind)
    asked: list[int] = []
    expected = ExpectedProduct(kind, N, lambda panel: asked.append(panel) or B[panel])
    for rows in ([0, 3], [0, 3, 7], [29]):
        np.testing.assert_allclose(expected.rows(A, rows)[0], whole[rows], rtol=1e-12, atol=1e-13)
    before = len(asked)
    expected.rows(A[:8], [7, 0])
    assert len(asked) == before  # rows are the same for every M
    for m in (5, M, 8):
        found, bound = expected.panel(A[:m], 2)
        np.testing.assert_allclose(found, whole[:m, 2 * PANEL :], rtol=1e-12, atol=1e-13)
        assert found.shape == bound.shape == (m, N - 2 * PANEL)


def test_a_value_out_of_bounds_or_none_at_all_does_not_agree():
    expected = ExpectedProduct("linear", N, lambda panel: B[panel]).rows(A, [1, 2])
    right = product("linear")[[1, 2]].astype(np.float32)
    assert agrees(right, expected)
    for bad in (right[0, 5] + 0.01, np.nan, np.inf):
        wrong = right.copy()
        wrong[0, 5] = bad
        assert not agrees(wrong, expected)


def test_rows_and_panels_to_check_hold_the_edges():
    assert rows_to_check(1, 4) == [0]
    assert {0, 12, 11, 13} <= set(rows_to_check(14, 6))
    assert set(rows_to_check(5, 0)) == {0, 1, 2, 3, 4}
    assert rows_to_check(100, 7)[-1] == 99
    assert (panels_to_check(1), panels_to_check(40)) == ([0], [0, 1, 2])
