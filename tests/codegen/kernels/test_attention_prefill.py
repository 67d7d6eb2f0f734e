from __future__ import annotations

import itertools
import platform
from functools import cache

import numpy as np
import pytest

from dovetail.codegen.catalog import PROMPTS, HeadShape, kernel_request
from dovetail.codegen.targets import TARGETS, host_features, runs_on
from tests.codegen.kernels.harness import (
    Runner,
    compiled_runner,
    interpreted_runner,
    pair_requests,
)
from tests.codegen.kernels.reference import attention, drawn_sinks, paged

ROUNDED = 2e-2
"""How far from float64 attention may be whose products round to bfloat16."""


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
    bound: float = 2e-5,
    sinking: bool = False,
    cap: int = 0,
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
    sinks = drawn_sinks(rng, n_q) if sinking else None
    head_args = (len(rows), n_q, n_kv, hd, scale, window, sinks, q, ldq)
    args = (*head_args, *tables, pool.k, pool.v, out, ldo)
    ends = "_wide" * (hd > 256) + "_pairs" * (bound == ROUNDED) + f"_cap{cap}" * (cap > 0)
    run(f"{kernel}_{kv}{ends}", *args, nth=nth)
    for s, (first, last) in enumerate(itertools.pairwise(starts)):
        query = q[first:last, : n_q * hd].reshape(-1, n_q, hd)
        want = attention(query, pool.keys[s], pool.values[s], scale, window, sinks, cap)
        got = out[first:last, : n_q * hd].reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=bound, atol=bound)
    assert (out[:2] == 7).all()
    assert (out[:, n_q * hd :] == 7).all()


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("hd", [16, 64, 80, 96, 128, 256, 512])
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


@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2)])
def test_sinks_take_their_part(
    native: Runner, kv: str, window: int, heads: tuple[int, int]
) -> None:
    check(native, kv, heads, 32, [41, 1], [41, 90], window, nth=2, sinking=True)


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
    args = (1, 1, 1, 16, 1.0, 0, None, q, 16, *tables, pool.k, pool.v, out, 16)
    native("prefill_attention_f32", *args)
    want = attention(q[:, None], pool.keys[0], pool.values[0], 1.0, 0)[:, 0]
    np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 30, 64, 70])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(native: Runner, kv: str, window: int) -> None:
    """Whole, in chunks, or a token at a time by the kernel for decodes of deterministic loads."""
    check_cuts(native, kv, window, 2e-5)


def check_cuts(
    native: Runner, kv: str, window: int, bound: float, sinking: bool = False, cap: int = 0
) -> None:
    """The same bits for each way to cut a prompt; kv: the end of the kernels' names, too."""
    n, n_q, n_kv, hd = 150, 6, 2, 32
    rng = np.random.default_rng(window)
    pool = paged(rng, [n, n], n_kv, hd, kv.partition("_")[0])
    ldq = (n_q + 2 * n_kv) * hd
    q = rng.standard_normal((n, ldq)).astype(np.float32)
    sinks = drawn_sinks(rng, n_q) if sinking else None
    heads = (n_q, n_kv, hd, hd**-0.5, window, sinks)
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
    want = attention(query, pool.keys[0], pool.values[0], hd**-0.5, window, sinks, cap)
    want = want.reshape(whole.shape)
    np.testing.assert_allclose(whole, want, rtol=bound, atol=bound)
    assert whole.tobytes() == chunks.tobytes() == tokens.tobytes()


@pytest.mark.parametrize("window", [0, 30])
def test_bits_with_sinks_do_not_depend_on_it_either(native: Runner, window: int) -> None:
    check_cuts(native, "f32", window, 2e-5, sinking=True)


def test_a_decode_without_keys_gives_zeros(native: Runner) -> None:
    n_q, n_kv, hd = 4, 2, 32
    rng = np.random.default_rng(3)
    pool = paged(rng, [20], n_kv, hd, "f32")
    q = rng.standard_normal((2, n_q * hd)).astype(np.float32)
    out = np.full_like(q, np.nan)
    starts, lengths = np.zeros(1, np.int32), np.array([0, 20], np.int32)
    tables = (starts, lengths, pool.tables[[0, 0]], pool.tables.shape[1], pool.k, pool.v, None)
    heads, row = (n_q, n_kv, hd, 0.1, 0, None), n_q * hd
    native("decode_attention_rows_f32", 0, 2, *heads, 5, q, row, *tables, out, row, nth=2)
    want = attention(q[1:].reshape(1, n_q, hd), pool.keys[0], pool.values[0], 0.1, 0)[0]
    assert (out[0] == 0).all()
    np.testing.assert_allclose(out[1].reshape(want.shape), want, rtol=2e-5, atol=2e-5)


def test_small_shapes_in_every_target(interpreted: Runner) -> None:
    check(interpreted, "f32", (2, 1), 16, [2, 1], [3, 17], 4)
    check(interpreted, "bf16", (1, 1), 16, [2], [2])
    check(interpreted, "f32", (2, 1), 16, [2], [18], 17, sinking=True)


# ---- products of bfloat16 pairs ----

PAIRED = TARGETS["x86-64-avx512bf16"]


@cache
def paired() -> Runner:
    """Return kernels that multiply pairs, compiled."""
    if not runs_on(PAIRED, platform.machine(), host_features()):
        pytest.skip("this CPU has no dot products of bfloat16 pairs")
    return compiled_runner(PAIRED, pair_requests(PAIRED))


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("hd", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("window", [0, 21])
def test_pairs_of_each_head_dim_and_dtype(kv: str, hd: int, window: int) -> None:
    rows, lengths = [33, 1, 70], [33, 65, 131]
    check(paired(), kv, (6, 2), hd, rows, lengths, window, nth=2, bound=ROUNDED)


def test_sinks_take_their_part_of_pairs() -> None:
    check(paired(), "bf16", (6, 2), 64, [33, 1], [33, 131], 40, 2, bound=ROUNDED, sinking=True)


def test_pairs_of_every_length_around_blocks() -> None:
    for n in (1, 2, 3, 15, 16, 17, 31, 33, 47, 63, 64, 65, 95, 97, 129, 191, 193):
        check(paired(), "f32", (3, 1), 32, [n], [n], nth=1 + n % 3, bound=ROUNDED)
        check(paired(), "bf16", (2, 2), 32, [(n + 1) // 2], [n], nth=1 + n % 3, bound=ROUNDED)


@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 30, 65])
def test_bits_of_pairs_do_not_depend_on_how_a_prompt_is_cut(kv: str, window: int) -> None:
    check_cuts(paired(), f"{kv}_pairs", window, ROUNDED)


def test_small_shapes_of_pairs_as_their_text_says() -> None:
    run = interpreted_runner(PAIRED.name)
    check(run, "f32", (2, 1), 32, [2, 1], [3, 17], 4, bound=ROUNDED)
    check(run, "bf16", (1, 1), 32, [2], [2], bound=ROUNDED)
    check(run, "bf16", (2, 1), 32, [2], [3], bound=ROUNDED, sinking=True)


@pytest.mark.parametrize(
    ("target", "head_dim", "rounded", "pairs"),
    [
        *(("x86-64-avx512bf16", 64, True, True), ("x86-64-avx512bf16", 64, False, False)),
        *(("x86-64-avx512bf16", 80, True, False), ("x86-64-avx512", 64, True, False)),
        ("x86-64-amx", 64, True, False),  # its dot products take two cycles
    ],
)
def test_pairs_are_multiplied_where_products_round(
    target: str, head_dim: int, rounded: bool, pairs: bool
) -> None:
    for family in PROMPTS:
        found = kernel_request(family, TARGETS[target], "f32", HeadShape(head_dim, 1, rounded))
        assert found.binding.get("DOT", 0) == pairs
        assert found.name == f"{family}_f32{'_pairs' * pairs}"
