from __future__ import annotations

import numpy as np
import pytest

from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from tests.codegen.kernels.harness import Runner, edges


def layernorm(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * w
    return scaled if b is None else scaled + b


def check(run: Runner, t: int, h: int, nth: int, *, bias: bool = True) -> None:
    rng = np.random.default_rng(h * 100 + t)
    x = (rng.standard_normal((t, h + 5)) * 3 + 7).astype(np.float32)
    w, b = rng.standard_normal((2, h)).astype(np.float32)
    wanted = layernorm(x[:, :h], w, b if bias else None, 1e-5)
    out = np.full((t, h + 3), 7, np.float32)
    run("layernorm", t, h, x, h + 5, w, b if bias else None, 1e-5, out, h + 3, nth=nth)
    np.testing.assert_allclose(out[:, :h], wanted, rtol=1e-5, atol=1e-5)
    assert (out[:, h:] == 7).all()
    run("layernorm", t, h, x, h + 5, w, b if bias else None, 1e-5, x, h + 5, nth=nth)
    np.testing.assert_array_equal(x[:, :h], out[:, :h])


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_rows_are_normed_in_place_or_not_whatever_the_thread_count(native: Runner, nth) -> None:
    for t in (1, 2, 7):
        for h in (16, 100, 384):
            check(native, t, h, nth, bias=t != 2)


def test_every_column_edge(any_runner: Runner) -> None:
    for h in edges(any_runner.lanes, 4 * any_runner.lanes)[1:]:
        check(any_runner, 2, h, 2)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_embeddings_are_summed_and_normed(any_runner: Runner, dtype: str) -> None:
    rng = np.random.default_rng(1)
    t, h = 5, 19
    tables = [rng.standard_normal((n, h)).astype(np.float32) for n in (11, 7, 2)]
    stored = [narrow_bf16(table) if dtype == "bf16" else table for table in tables]
    tables = [widen_bf16(narrow_bf16(table)) if dtype == "bf16" else table for table in tables]
    w, b = rng.standard_normal((2, h)).astype(np.float32)
    ids = [rng.integers(0, n, t).astype(np.int32) for n in (11, 7, 2)]
    rows = [table[i] for table, i in zip(tables, ids, strict=True)]
    pairs = [value for pair in zip(ids, stored, strict=True) for value in pair]
    for count in (3, 1):
        given = [*pairs[: 2 * count], *[None] * (6 - 2 * count)]
        out = np.zeros((t, h), np.float32)
        any_runner(f"embed_sum_{dtype}", t, h, *given, w, b, 1e-12, out, h, nth=2)
        wanted = layernorm(np.sum(rows[:count], 0), w, b, 1e-12)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
