from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.codegen.kernels.harness import Runner
from tests.codegen.kernels.reference import attention, paged


def check(
    run: Runner,
    kv: str,
    heads: tuple[int, int],
    hd: int,
    rows: list[int],
    lengths: list[int],
    window: int = 0,
    nth: int = 1,
    kernel: str = "prefill_attention",
) -> None:
    """Sequences with the given new rows, seeing the given key counts, against float64."""
    n_q, n_kv = heads
    rng = np.random.default_rng(sum(rows) + hd + n_q)
    pool = paged(rng, lengths, n_kv, hd, kv)
    starts = np.cumsum([2, *rows]).astype(np.int32)  # the first sequence need not start at row 0
    ldq, ldo = (n_q + 2 * n_kv) * hd + 16, n_q * hd + 3
    q = rng.standard_normal((starts[-1], ldq)).astype(np.float32)
    out = np.full((starts[-1], ldo), 7, np.float32)
    scale = 1 / np.sqrt(hd)
    tables = (starts, np.array(lengths, np.int32), pool.tables, pool.tables.shape[1])
    args = (len(rows), n_q, n_kv, hd, scale, window, q, ldq, *tables, pool.k, pool.v, out, ldo)
    run(f"{kernel}_{kv}", *args, nth=nth)
    for s, (first, last) in enumerate(itertools.pairwise(starts)):
        query = q[first:last, : n_q * hd].reshape(-1, n_q, hd)
        want = attention(query, pool.keys[s], pool.values[s], scale, window)
        got = out[first:last, : n_q * hd].reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert (out[:2] == 7).all()
    assert (out[:, n_q * hd :] == 7).all()


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("hd", [16, 64, 80, 96, 128, 256])
def test_each_head_dim_and_dtype(native: Runner, kv: str, hd: int) -> None:
    check(native, kv, (4, 2), hd, [33], [33], nth=2)


def test_every_prompt_length_around_key_and_row_blocks(native: Runner) -> None:
    for n in (1, 2, 15, 16, 17, 23, 24, 25, 47, 48, 49, 63, 64, 65, 95, 96, 97, 129, 193):
        check(native, "f32", (2, 2), 32, [n], [n], nth=1 + n % 3)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (7, 1), (8, 2), (6, 3), (14, 2), (12, 12)])
def test_any_group_ratio(native: Runner, heads: tuple[int, int]) -> None:
    check(native, "f32", heads, 32, [41], [41], nth=3)


def test_a_later_chunk_sees_earlier_keys(native: Runner) -> None:
    for rows, length in ((1, 64), (1, 65), (17, 100), (50, 51), (31, 300)):
        check(native, "f32", (4, 2), 64, [rows], [length], nth=2)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 64, 500])
def test_sliding_window(native: Runner, window: int) -> None:
    check(native, "f32", (4, 2), 32, [130], [150], window, nth=2)


@pytest.mark.parametrize("nth", [1, 2, 3, 16])
def test_several_sequences_are_dealt_to_all_threads(native: Runner, nth: int) -> None:
    check(native, "bf16", (4, 2), 32, [5, 1, 70, 16], [5, 20, 90, 16], nth=nth)


def test_large_scores_do_not_overflow(native: Runner) -> None:
    rng = np.random.default_rng(5)
    pool = paged(rng, [40], 1, 16, "f32")
    q = (rng.standard_normal((40, 16)) * 300).astype(np.float32)
    out = np.zeros((40, 16), np.float32)
    starts = np.array([0, 40], np.int32)
    tables = (starts, np.array([40], np.int32), pool.tables, pool.tables.shape[1])
    native("prefill_attention_f32", 1, 1, 1, 16, 1.0, 0, q, 16, *tables, pool.k, pool.v, out, 16)
    want = attention(q[:, None], pool.keys[0], pool.values[0], 1.0, 0)[:, 0]
    np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 30, 64, 70])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(native: Runner, kv: str, window: int) -> None:
    """Whole, in chunks, or a token at a time by the kernel for decodes of deterministic loads."""
    n, n_q, n_kv, hd = 150, 6, 2, 32
    rng = np.random.default_rng(window)
    pool = paged(rng, [n, n], n_kv, hd, kv)
    ldq = (n_q + 2 * n_kv) * hd
    q = rng.standard_normal((n, ldq)).astype(np.float32)
    heads = (n_q, n_kv, hd, hd**-0.5, window)
    tables = (pool.tables, pool.tables.shape[1], pool.k, pool.v)

    def prompt(first: int, last: int, out: np.ndarray) -> None:
        bounds = np.array([first, last], np.int32)
        where = (q, ldq, bounds, bounds[1:], *tables)
        run = f"prefill_attention_{kv}"
        native(run, 1, *heads, *where, out, n_q * hd, nth=2)

    def decode(position: int, out: np.ndarray) -> None:
        bounds, lengths = np.array([position], np.int32), np.array([position + 1], np.int32)
        where = (5, q, ldq, bounds, lengths, *tables, None)
        native(f"decode_attention_rows_{kv}", 0, 1, *heads, *where, out, n_q * hd, nth=3)

    whole, chunks, tokens = (np.zeros((n, n_q * hd), np.float32) for _ in range(3))
    prompt(0, n, whole)
    for first, last in itertools.pairwise((0, 1, 17, 80, 81, 149, n)):
        prompt(first, last, chunks)
    for position in range(n):
        decode(position, tokens)
    query = q[:, : n_q * hd].reshape(n, n_q, hd)
    want = attention(query, pool.keys[0], pool.values[0], hd**-0.5, window).reshape(whole.shape)
    np.testing.assert_allclose(whole, want, rtol=2e-5, atol=2e-5)
    assert whole.tobytes() == chunks.tobytes() == tokens.tobytes()


def test_a_decode_without_keys_gives_zeros(native: Runner) -> None:
    n_q, n_kv, hd = 4, 2, 32
    rng = np.random.default_rng(3)
    pool = paged(rng, [20], n_kv, hd, "f32")
    q = rng.standard_normal((2, n_q * hd)).astype(np.float32)
    out = np.full_like(q, np.nan)
    starts, lengths = np.zeros(1, np.int32), np.array([0, 20], np.int32)
    tables = (starts, lengths, pool.tables[[0, 0]], pool.tables.shape[1], pool.k, pool.v, None)
    heads, row = (n_q, n_kv, hd, 0.1, 0), n_q * hd
    native("decode_attention_rows_f32", 0, 2, *heads, 5, q, row, *tables, out, row, nth=2)
    want = attention(q[1:].reshape(1, n_q, hd), pool.keys[0], pool.values[0], 0.1, 0)[0]
    assert (out[0] == 0).all()
    np.testing.assert_allclose(out[1].reshape(want.shape), want, rtol=2e-5, atol=2e-5)


def test_small_shapes_in_every_target(interpreted: Runner) -> None:
    check(interpreted, "f32", (2, 1), 16, [2, 1], [3, 17], 4)
    check(interpreted, "bf16", (1, 1), 16, [2], [2])
