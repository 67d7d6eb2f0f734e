"""Low-rank sums of rows of several adapters against float64, at edges of tiles and panels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.dtypes import DTYPES
from tests.codegen.kernels.harness import Runner, edges

RANKS = (1, 3, 8, 16, 64)


def sums(
    run: Runner,
    whose: list[int],
    ranks: list[int],
    k: int,
    n: int,
    *,
    dtype: str = "f32",
    nth: int = 1,
    step: int = 16,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return C before and after, and what float64 makes of it; columns past the end included."""
    rng, t, count, most = np.random.default_rng(k + n), len(whose), len(ranks), max(ranks)
    form, panels = DTYPES[dtype], -(-n // 16)
    first = form.narrow(rng.standard_normal((count, most, k)).astype(np.float32))
    second = form.narrow(rng.standard_normal((count, panels, most, 16)).astype(np.float32))
    x = rng.standard_normal((t, k + 3)).astype(np.float32)
    low = np.full((t, most + 2), np.nan, np.float32)
    before = rng.standard_normal((t, panels * step + 2)).astype(np.float32)
    after, rows = before.copy(), np.array(whose, np.int32)
    known = np.array(ranks, np.float32)
    run(f"adapter_in_{dtype}", t, most, k, rows, known, x, k + 3, first, low, most + 2, nth=nth)
    there = (after, after.shape[1], step)
    run(f"adapter_out_{dtype}", t, most, n, rows, known, low, most + 2, second, *there, nth=nth)
    wanted = before.astype(np.float64)
    columns = [c // 16 * step + c % 16 for c in range(n)]
    for row, adapter in enumerate(whose):
        if adapter and ranks[adapter - 1]:
            rank, a, b = ranks[adapter - 1], form.widen(first), form.widen(second)
            down = a[adapter - 1, :rank].astype(np.float64) @ x[row, :k]
            up = b[adapter - 1, :, :rank].transpose(0, 2, 1).reshape(-1, rank)[:n]
            wanted[row, columns] += up.astype(np.float64) @ down
    return before, after, wanted


def near(after: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(after, wanted, atol=2e-5 * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_get_the_sums_of_their_adapters(any_runner: Runner, dtype: str) -> None:
    for n in edges(any_runner.lanes, 16):
        before, after, wanted = sums(
            any_runner, [2, 0, 1, 1, 1, 1, 1, 2, 3], [3, 1, 0], 21, n, dtype=dtype, nth=2
        )
        near(after, wanted)
        kept = wanted == before
        assert (after[kept] == before[kept]).all(), "rows of none, and what lies beside"


@pytest.mark.parametrize("rank", RANKS)
def test_any_rank(native: Runner, rank: int) -> None:
    for whose in ([1], [1] * 7, [1, 2] * 40):
        _, after, wanted = sums(native, whose, [rank, 5], 50, 90, nth=3, step=32)
        near(after, wanted)


@settings(max_examples=60, deadline=None)
@given(
    whose=st.lists(st.integers(0, 3), min_size=1, max_size=140),
    ranks=st.tuples(*[st.sampled_from((0, *RANKS))] * 3).filter(any),
    k=st.integers(1, 70),
    n=st.integers(1, 100),
    nth=st.integers(1, 5),
)
def test_bits_depend_on_no_other_row_and_no_thread(
    native: Runner, whose: list[int], ranks: tuple[int, ...], k: int, n: int, nth: int
) -> None:
    _, after, wanted = sums(native, whose, list(ranks), k, n, nth=nth)
    near(after, wanted)
    _, single, _ = sums(native, whose, list(ranks), k, n)
    np.testing.assert_array_equal(after, single)
    _, spread, _ = sums(native, whose[:1], list(ranks), k, n)
    if len(whose) == 1:
        np.testing.assert_array_equal(after, spread)


def test_a_row_has_its_bits_among_equal_ones_and_alone(native: Runner) -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(s).astype(np.float32) for s in ((5, 37), (3, 5, 16)))
    x, ranks = rng.standard_normal((1, 37)).astype(np.float32), np.full(1, 5, np.float32)
    found = []
    for t in (1, 4, 65):
        rows, many = np.ones(t, np.int32), np.repeat(x, t, 0)
        low, out = np.zeros((t, 5), np.float32), np.zeros((t, 48), np.float32)
        native("adapter_in_f32", t, 5, 37, rows, ranks, many, 37, first, low, 5)
        native("adapter_out_f32", t, 5, 40, rows, ranks, low, 5, second, out, 48, 16)
        assert (out == out[0]).all()
        found.append(out[0])
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gates_and_ups_in_turns(any_runner: Runner, act: str) -> None:
    for h in edges(any_runner.lanes, 16):
        width = -(-h // 16) * 32
        x = np.random.default_rng(h).standard_normal((2, width + 1)).astype(np.float32)
        out = np.full((2, h + 1), 7, np.float32)
        any_runner(f"gate_pairs_{act}", 2, h, x, width + 1, out, h + 1, nth=2)
        pairs = x[:, :width].reshape(2, -1, 2, 16).astype(np.float64)
        gate, up = (pairs[:, :, side].reshape(2, -1)[:, :h] for side in (0, 1))
        bent = gate * 1.5957691216057308 * (1 + 0.044715 * gate**2) if act != "silu" else gate
        want = gate / (1 + np.exp(-bent)) * up
        np.testing.assert_allclose(out[:, :h], want, rtol=2e-6, atol=2e-6)
        assert (out[:, h:] == 7).all()
