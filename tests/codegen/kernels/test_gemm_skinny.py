"""gemm_skinny with planned and with arbitrary regions, split or not, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.runtime.polymerize import (
    TILES,
    GpuSpec,
    Region,
    SkinnyPlan,
    Tile,
    assumed_costs,
    cut_columns,
    plan_skinny,
)
from tests.codegen.kernels.harness import Runner, interpreted_runner
from tests.codegen.kernels.reference import stored, widened

H100 = assumed_costs(GpuSpec(132, 1.75e9, 3.35e12), 4)


def check(
    run: Runner,
    plan: SkinnyPlan,
    shape: tuple[int, int, int],
    dtype: str = "f32",
    extras: bool = True,
    nth: int = 3,
) -> None:
    """One product with padded rows; `extras` adds bias and residual, the residual being C."""
    m, n, k = shape
    rng = np.random.default_rng(m * n + k)
    a = rng.standard_normal((m, k + 3)).astype(np.float32)
    b = stored(rng.standard_normal((n, k + 5)), dtype)
    bias = rng.standard_normal(n).astype(np.float32) if extras else None
    c = rng.standard_normal((m, n + 2)).astype(np.float32)
    before = c.copy()
    residual = c if extras else None
    partial = np.full((plan.splits, m, n), np.nan, np.float32)
    head = (m, n, k, a, k + 3, b, k + 5, bias, residual, n + 2, c, n + 2)
    table = plan.table()
    args = (*head, plan.splits, partial, len(table), table)
    run(f"gemm_skinny_{dtype}", *args, nth=nth)
    if plan.splits > 1:
        np.testing.assert_array_equal(c, before)
        run(f"gemm_skinny_merge_{dtype}", *args, nth=nth)
    wide_a, wide_b = a[:, :k].astype(np.float64), widened(b, dtype)[:, :k].astype(np.float64)
    want = wide_a @ wide_b.T
    scale = np.abs(wide_a) @ np.abs(wide_b).T
    if extras:
        want = want + bias + before[:, :n]
        scale = scale + np.abs(bias) + np.abs(before[:, :n])
    assert (np.abs(c[:, :n] - want) <= 1e-6 * scale).all()
    np.testing.assert_array_equal(c[:, n:], before[:, n:])


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.columns}")
def test_every_tile(cuda: Runner, tile: Tile) -> None:
    n = tile.columns + 1
    plan = SkinnyPlan(tuple(cut_columns(0, n, 1, tile)), 1, 0.0)
    check(cuda, plan, (tile.rows, n, 33))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 37, 70), (3, 5, 31), (13, 11, 64), (7, 2, 97)])
def test_planned_products(cuda: Runner, dtype: str, shape: tuple[int, int, int]) -> None:
    check(cuda, plan_skinny(*shape, H100), shape, dtype)
    check(cuda, plan_skinny(*shape, H100), shape, dtype, extras=False)


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("k", [31, 32, 65, 130])
def test_sums_of_split_stretches_are_merged(cuda: Runner, splits: int, k: int) -> None:
    regions = (Region(0, 0, 1, 4, Tile(1, 1)), Region(2, 0, 1, 2, Tile(0, 2)))
    plan = SkinnyPlan(regions, splits, 0.0)
    check(cuda, plan, (3, 8, k))
    check(cuda, plan, (3, 8, k), extras=False, nth=1)


def test_more_warps_than_tiles(cuda: Runner) -> None:
    check(cuda, plan_skinny(2, 3, 40, H100), (2, 3, 40), nth=40)


def test_the_interpreted_text_computes_the_same() -> None:
    regions = (Region(0, 0, 1, 2, Tile(1, 1)), Region(2, 0, 1, 1, Tile(0, 2)))
    for splits in (1, 2):
        check(interpreted_runner("cuda"), SkinnyPlan(regions, splits, 0.0), (3, 4, 70), "bf16")


def test_a_large_product_on_many_warps(cuda: Runner) -> None:
    shape = (64, 333, 257)
    check(cuda, plan_skinny(*shape, H100), shape, "bf16", nth=50)
