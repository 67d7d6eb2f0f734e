from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.kernels.harness import Runner
from tests.codegen.kernels.reference import attention, paged


def check(
    run: Runner,
    kv: str,
    heads: tuple[int, int],
    hd: int,
    lengths: list[int],
    window: int = 0,
    splits: int = 1,
    nth: int = 1,
) -> None:
    """Decode rows behind one prefill sequence of three rows, against float64."""
    n_q, n_kv = heads
    rng = np.random.default_rng(sum(lengths) + hd + n_q)
    pool = paged(rng, [3, *lengths], n_kv, hd, kv)
    n, first = len(lengths), 3
    ldq, ldo = (n_q + 2 * n_kv) * hd + 16, n_q * hd + 3
    q = rng.standard_normal((first + n, ldq)).astype(np.float32)
    out = np.full((first + n, ldo), 7, np.float32)
    partial = np.full((n, n_q, splits, hd + 16), np.nan, np.float32)
    scale = 1 / np.sqrt(hd)
    starts = np.array([0, first], np.int32)
    tables = (starts, np.array([3, *lengths], np.int32), pool.tables, pool.tables.shape[1])
    head_args = (1, n, n_q, n_kv, hd, scale, window, splits, q, ldq)
    args = (*head_args, *tables, pool.k, pool.v, partial, out, ldo)
    run(f"decode_attention_{kv}", *args, nth=nth)
    assert (out == 7).all()
    run(f"decode_attention_merge_{kv}", *args, nth=nth)
    for d in range(n):
        query = q[first + d, : n_q * hd].reshape(1, n_q, hd)
        want = attention(query, pool.keys[1 + d], pool.values[1 + d], scale, window)[0]
        got = out[first + d, : n_q * hd].reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert (out[:first] == 7).all()
    assert (out[:, n_q * hd :] == 7).all()


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("hd", [16, 64, 80, 96, 128, 256])
def test_each_head_dim_and_dtype(native: Runner, kv: str, hd: int) -> None:
    check(native, kv, (4, 2), hd, [33, 7], splits=2, nth=2)


def test_every_length_around_blocks_and_chunks(native: Runner) -> None:
    lengths = [1, 2, 3, 14, 15, 16, 17, 18, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]
    check(native, "f32", (2, 1), 32, lengths, nth=3)
    check(native, "f32", (2, 1), 32, lengths, splits=3, nth=2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 12])
def test_any_group_ratio(native: Runner, group: int) -> None:
    check(native, "f32", (2 * group, 2), 32, [37], splits=2, nth=3)


@pytest.mark.parametrize("heads", [(70, 1), (72, 9), (130, 2)])
def test_more_rows_than_share_a_chunk(native: Runner, heads: tuple[int, int]) -> None:
    check(native, "f32", heads, 32, [150, 20], splits=2, nth=2)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_more_parts_than_blocks_and_any_threads(native: Runner, splits: int, nth: int) -> None:
    check(native, "bf16", (4, 2), 32, [5, 300, 64], splits=splits, nth=nth)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 500])
def test_sliding_window(native: Runner, window: int) -> None:
    check(native, "f32", (4, 2), 32, [1, 16, 17, 90, 144], window, splits=2, nth=2)


def test_small_shapes_in_every_target(interpreted: Runner) -> None:
    check(interpreted, "f32", (3, 1), 16, [1, 18], 17, splits=2)
    check(interpreted, "bf16", (2, 1), 16, [3])
    check(interpreted, "f16", (2, 1), 16, [3])
