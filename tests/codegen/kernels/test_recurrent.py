"""Convolutions and the delta rule against float64, over steps that go on from earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from tests.codegen.kernels.harness import Runner, edges

F32 = npt.NDArray[np.float32]
STEPS = (((5, 1), 1), ((2, 17), 0), ((), 3), ((3,), 1))
"""Rows of each prefill sequence, and decodes, of steps over sequences 0, 1, 2 in this order."""
SLOTS = np.array([4, 0, 2], np.int32)


def run_steps(total: int, width: int, run: Callable[..., F32]) -> list[tuple[F32, F32]]:
    """Have `run` compute rows in steps as in STEPS; return inputs and outputs of each sequence.

    run: gets (rows, starts, positions, slots, n_prefill, n_decode) and returns a row for each.
    """
    rng = np.random.default_rng(width)
    inputs = [rng.standard_normal((total, width)).astype(np.float32) for _ in SLOTS]
    done, outputs = [0] * len(SLOTS), [list[F32]() for _ in SLOTS]
    for prefill, decodes in STEPS:
        counts = [*prefill, *(1,) * decodes]
        starts = np.cumsum([0, *prefill]).astype(np.int32)
        rows = np.concatenate([inputs[s][done[s] : done[s] + n] for s, n in enumerate(counts)])
        places = [np.arange(done[s], done[s] + n) for s, n in enumerate(counts)]
        positions = np.concatenate(places).astype(np.int32)
        found = run(rows, starts, positions, SLOTS[: len(counts)], len(prefill), decodes)
        at = 0
        for s, n in enumerate(counts):
            outputs[s].append(found[at : at + n])
            done[s], at = done[s] + n, at + n
    return [(inputs[s][: done[s]], np.concatenate(outputs[s])) for s in range(len(SLOTS))]


def silu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def check_conv(run: Runner, columns: int, taps: int, nth: int, *, gated: bool) -> None:
    rng = np.random.default_rng(columns)
    w, bias = (rng.standard_normal(n).astype(np.float32) for n in ((taps, columns), columns))
    stride = (taps - 1) * columns + 3
    state = np.full((5, stride), np.nan, np.float32)  # what nobody has written is never read
    name, width = ("gated_conv_rows", 3 * columns) if gated else ("conv_rows", columns)

    def step(added, rows, starts, positions, slots, n_prefill, n_decode):
        given = np.pad(rows, ((0, 0), (0, 2)))
        out = np.full((len(rows), columns + 1), 7, np.float32)
        counts = n_prefill, n_decode, columns, taps
        where = starts, positions, slots, state, stride
        run(name, *counts, given, width + 2, w, added, *where, out, columns + 1, nth=nth)
        assert (out[:, columns:] == 7).all()
        return out[:, :columns]

    for added in (bias, None):
        for rows, got in run_steps(40, width, partial(step, added)):
            x = rows.astype(np.float64)
            u = x[:, :columns] * x[:, 2 * columns :] if gated else x
            before = np.concatenate([np.zeros((taps - 1, columns)), u])
            sums = sum(w[j] * before[j : j + len(u)] for j in range(taps))
            sums = sums + (0 if added is None else added)
            wanted = x[:, columns : 2 * columns] * sums if gated else silu(sums)
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert np.isnan(state[[1, 3]]).all(), "states of others are not touched"


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_a_convolution_goes_on_where_the_last_step_ended(
    native: Runner, gated: bool, nth: int
) -> None:
    for columns, taps in ((16, 3), (300, 4), (529, 2)):
        check_conv(native, columns, taps, nth, gated=gated)


def test_every_column_edge(any_runner: Runner) -> None:
    for columns in edges(any_runner.lanes):
        check_conv(any_runner, columns, 3, 2, gated=columns % 2 == 1)


def delta(x: F32, rates: F32, a_log: F32, dt: F32, shape: tuple[int, ...], tiled: int) -> F32:
    """The rule token by token, in float64."""
    hk, hv, dk, dv = shape
    q, k, v = np.split(x.astype(np.float64), [hk * dk, 2 * hk * dk], axis=1)
    q, k = (each.reshape(-1, hk, dk) for each in (q, k))
    q, k = (each / np.sqrt((each * each).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
    heads = [h % hk if tiled else h // (hv // hk) for h in range(hv)]
    q, k, v = q[:, heads] / np.sqrt(dk), k[:, heads], v.reshape(-1, hv, dv)
    beta = 1 / (1 + np.exp(-rates[:, :hv].astype(np.float64)))
    decay = np.exp(-np.exp(a_log) * np.logaddexp(0, rates[:, hv:].astype(np.float64) + dt))
    state, out = np.zeros((hv, dk, dv)), []
    for t in range(len(x)):
        state *= decay[t][:, None, None]
        change = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state += k[t][:, :, None] * change[:, None, :]
        out.append(np.einsum("hkv,hk->hv", state, q[t]).reshape(-1))
    return np.array(out)


def check_delta(run: Runner, shape: tuple[int, int, int, int], nth: int, tiled: int = 0) -> None:
    hk, hv, dk, dv = shape
    rng = np.random.default_rng(hv)
    a_log, dt = (rng.standard_normal(hv).astype(np.float32) for _ in range(2))
    width, stride = 2 * hk * dk + hv * dv, hv * dk * dv + 1
    state = np.full((5, stride), np.nan, np.float32)

    def step(rows, starts, positions, slots, n_prefill, n_decode):
        x, rates = np.ascontiguousarray(rows[:, :width]), np.ascontiguousarray(rows[:, width:])
        out = np.full((len(rows), hv * dv + 2), 7, np.float32)
        counts = n_prefill, n_decode, *shape, tiled
        where = starts, positions, slots, state, stride
        given = x, width, rates, 2 * hv, a_log, dt
        run("delta_rows", *counts, *given, *where, out, hv * dv + 2, nth=nth)
        assert (out[:, hv * dv :] == 7).all()
        return out[:, : hv * dv]

    for x, got in run_steps(40, width + 2 * hv, step):
        wanted = delta(x[:, :width], x[:, width:], a_log, dt, shape, tiled)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)
    assert np.isnan(state[[1, 3]]).all(), "states of others are not touched"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_the_delta_rule_goes_on_where_the_last_step_ended(native: Runner, nth: int) -> None:
    check_delta(native, (1, 1, 16, 32), nth)
    check_delta(native, (2, 4, 48, 64), nth)
    check_delta(native, (2, 6, 128, 128), nth, tiled=1)


def test_every_target_applies_the_delta_rule(any_runner: Runner) -> None:
    check_delta(any_runner, (2, 4, 16, 32), 2)


def scan(x: F32, rates: F32, vectors: list[F32], shape: tuple[int, ...]) -> F32:
    """Mamba-2 token by token, in float64."""
    hk, hv, dk, dv = shape
    a_log, dt, skip = vectors
    v, k, q = np.split(x.astype(np.float64), [hv * dv, hv * dv + hk * dk], axis=1)
    heads = [h // (hv // hk) for h in range(hv)]
    k, q = (each.reshape(-1, hk, dk)[:, heads] for each in (k, q))
    v = v.reshape(-1, hv, dv)
    step = np.logaddexp(0, rates.astype(np.float64) + dt)
    decay = np.exp(-np.exp(a_log) * step)
    state, out = np.zeros((hv, dk, dv)), []
    for t in range(len(x)):
        state *= decay[t][:, None, None]
        state += k[t][:, :, None] * (step[t][:, None] * v[t])[:, None, :]
        seen = np.einsum("hkv,hk->hv", state, q[t]) + skip[:, None] * v[t]
        out.append(seen.reshape(-1))
    return np.array(out)


def check_scan(run: Runner, shape: tuple[int, int, int, int], nth: int) -> None:
    hk, hv, dk, dv = shape
    rng = np.random.default_rng(hv)
    vectors = [rng.standard_normal(hv).astype(np.float32) for _ in range(3)]
    width, stride = 2 * hk * dk + hv * dv, hv * dk * dv + 1
    state = np.full((5, stride), np.nan, np.float32)
    whole, cuts = [], []

    def step(rows, starts, positions, slots, n_prefill, n_decode):
        x, rates = np.ascontiguousarray(rows[:, :width]), np.ascontiguousarray(rows[:, width:])
        out = np.full((len(rows), hv * dv + 2), 7, np.float32)
        given = n_prefill, n_decode, *shape, x, width, rates, hv, *vectors
        where = starts, positions, slots, state, stride
        run("scan_rows", *given, *where, out, hv * dv + 2, nth=nth)
        assert (out[:, hv * dv :] == 7).all()
        return out[:, : hv * dv]

    for x, got in run_steps(40, width + hv, step):
        wanted = scan(x[:, :width], x[:, width:], vectors, shape)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=5e-5)
        starts, places = np.array([0, len(x)], np.int32), np.arange(len(x), dtype=np.int32)
        whole.append(step(x, starts, places, SLOTS[:1], 1, 0))
        cuts.append(got)
    assert all(map(np.array_equal, whole, cuts)), "cuts of a prompt change no bit"
    assert np.isnan(state[[1, 3]]).all(), "states of others are not touched"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_scan_goes_on_where_the_last_step_ended(native: Runner, nth: int) -> None:
    check_scan(native, (1, 1, 16, 32), nth)
    check_scan(native, (2, 4, 37, 48), nth)
    check_scan(native, (2, 6, 128, 64), nth)


def test_every_target_scans(any_runner: Runner) -> None:
    check_scan(any_runner, (2, 4, 19, 16), 2)
    check_scan(any_runner, (1, 1, 5, 64), 2)


def test_rates_far_apart_give_numbers(native: Runner) -> None:
    """A state that fades at once, and one that never does."""
    x = np.ones((2, 96 + 32), np.float32)
    rates = np.array([[100, 100, -100, -100], [90, 1000, 1000, -1000]], np.float32)
    state, out = np.zeros((1, 2 * 32 * 32), np.float32), np.zeros((2, 64), np.float32)
    starts, places = np.array([0, 2], np.int32), np.arange(2, dtype=np.int32)
    given = x, 128, rates, 4, np.full(2, 3, np.float32), np.zeros(2, np.float32)
    where = starts, places, np.zeros(1, np.int32), state, 2048
    native("delta_rows", 1, 0, 1, 2, 32, 32, 0, *given, *where, out, 64)
    assert np.isfinite(out).all() and np.isfinite(state).all()


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_parts_are_normed_and_gated(native: Runner, first: int, nth: int) -> None:
    for t, parts, size, own in ((1, 1, 32, 0), (3, 5, 90, 1), (2, 2, 128, 0), (2, 1, 37, None)):
        rng = np.random.default_rng(t)
        shape = (t, parts * size + 2)
        x, gate = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        weights, before = rng.standard_normal((parts, size)).astype(np.float32), x.copy()
        w = None if own is None else weights
        how = size, w, own or 0, 1e-6, first
        native("gated_norm", t, parts, *how, gate, shape[1], x, shape[1], nth=nth)
        cells, gates = (
            each[:, :-2].reshape(t, parts, size).astype(np.float64) for each in (before, gate)
        )
        gates = silu(gates)
        normed = cells * gates if first else cells
        if w is not None:
            normed = normed / np.sqrt((normed**2).mean(-1, keepdims=True) + 1e-6)
            normed = normed * (weights if own else weights[0])
        wanted = normed if first else normed * gates
        np.testing.assert_allclose(x[:, :-2], wanted.reshape(t, -1), rtol=1e-5, atol=1e-6)
        assert (x[:, -2:] == before[:, -2:]).all()


@pytest.mark.parametrize("nth", [1, 3])
def test_rows_are_multiplied_by_a_sigmoid(native: Runner, nth: int) -> None:
    for t, h in ((1, 16), (3, 1030)):
        rng = np.random.default_rng(t)
        x, gate = (rng.standard_normal((t, h + 3)).astype(np.float32) for _ in range(2))
        before = x.copy()
        native("sigmoid_rows", t, h, gate, h + 3, x, h + 3, nth=nth)
        wanted = before[:, :h] / (1 + np.exp(-gate[:, :h].astype(np.float64)))
        np.testing.assert_allclose(x[:, :h], wanted, rtol=1e-5, atol=1e-6)
        assert (x[:, h:] == before[:, h:]).all()
