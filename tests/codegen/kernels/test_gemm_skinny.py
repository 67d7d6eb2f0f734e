"""gemm_skinny with planned and with arbitrary regions, split or not, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dovetail.ir.formats import FORMATS
from dovetail.runtime.native.polymerize import (
    PANEL_TILES,
    TILES,
    GpuSpec,
    Region,
    SkinnyPlan,
    Tile,
    assumed_costs,
    assumed_panel_costs,
    cut_columns,
    plan_skinny,
)
from tests.blocks import random_blocks
from tests.codegen.kernels.harness import QUANTISED, SOME_FORMATS, Runner, interpreted_runner
from tests.codegen.kernels.reference import stored, widened

GPU = GpuSpec(132, 1.75e9, 3.35e12)
H100, PANELS = assumed_costs(GPU, 4), assumed_panel_costs(GPU, 0.5625)
ROUNDING = {"f32": 1e-6, "bf16": 2**-8, "f16": 2**-10}
"""Of the result, of each type, as a share of it."""
OTHERS = [name for name in QUANTISED if name not in SOME_FORMATS]


def seldom(value: str) -> Any:
    """Return a parameter of long tests."""
    return pytest.param(value, marks=pytest.mark.long)


@dataclass
class Weights:
    """A weight as the kernel takes it, and its float64 values [n][k]."""

    format: str
    operand: np.ndarray
    stride: int
    values: np.ndarray


def row_major(n: int, k: int, dtype: str) -> Weights:
    rng = np.random.default_rng(n * k)
    rows = stored(rng.standard_normal((n, k + 5)), dtype)
    return Weights(dtype, rows, k + 5, widened(rows, dtype)[:, :k].astype(np.float64))


def in_blocks(n: int, k: int, name: str) -> Weights:
    form = FORMATS[name]
    blocks = random_blocks(form, n, k, 0)
    values = form.values(blocks).astype(np.float64)
    return Weights(name, form.pack(blocks), form.panel_elements(k), values)


def check(
    run: Runner,
    plan: SkinnyPlan,
    m: int,
    weights: Weights,
    rows: str | None = None,
    bias: bool = True,
    nth: int = 3,
) -> None:
    """One product of rows with padding, of the type `rows`, by default that of the weights."""
    n, k = weights.values.shape
    rows = rows or weights.format
    rng = np.random.default_rng(m * n + k)
    a = stored(rng.standard_normal((m, k + 3)), rows)
    added = stored(rng.standard_normal(n), rows) if bias else None
    c = stored(rng.standard_normal((m, n + 2)), rows)
    before = c.copy()
    partial = np.full((plan.splits, m, n), np.nan, np.float32)
    table = plan.table()
    head = (m, n, k, a, k + 3, weights.operand, weights.stride, added, c, n + 2)
    run(
        f"gemm_skinny_{weights.format}_{rows}",
        *(*head, plan.splits, partial, len(table), table),
        nth=nth,
    )
    if plan.splits > 1:
        np.testing.assert_array_equal(c, before)
        merge = (m, n, plan.splits, partial, added, c, n + 2)
        run(f"gemm_skinny_merge_{rows}", *merge, nth=nth)
    wide = widened(a, rows)[:, :k].astype(np.float64)
    want = wide @ weights.values.T
    scale = np.abs(wide) @ np.abs(weights.values).T
    if added is not None:
        want = want + widened(added, rows)
        scale = scale + np.abs(widened(added, rows))
    error = np.abs(widened(c, rows)[:, :n] - want)
    assert (error <= 2e-6 * scale + ROUNDING[rows] * np.abs(want) + 1e-7).all(), error.max()
    np.testing.assert_array_equal(c[:, n:], before[:, n:])


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.columns}")
def test_every_tile(cuda: Runner, tile: Tile) -> None:
    n = tile.columns + 1
    plan = SkinnyPlan(tuple(cut_columns(0, n, 1, tile)), 1, 0.0)
    check(cuda, plan, tile.rows, row_major(n, 33, "f32"))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 37, 70), (3, 5, 31), (13, 11, 64), (7, 2, 97)])
def test_planned_products(cuda: Runner, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for bias in (True, False):
        check(cuda, plan_skinny(*shape, H100), m, row_major(n, k, dtype), bias=bias)


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("k", [31, 32, 65, 130])
def test_sums_of_split_stretches_are_merged(cuda: Runner, splits: int, k: int) -> None:
    regions = (Region(0, 0, 1, 4, Tile(1, 1)), Region(2, 0, 1, 2, Tile(0, 2)))
    plan = SkinnyPlan(regions, splits, 0.0)
    check(cuda, plan, 3, row_major(8, k, "f32"))
    check(cuda, plan, 3, row_major(8, k, "bf16"), bias=False, nth=1)


def test_more_warps_than_tiles(cuda: Runner) -> None:
    check(cuda, plan_skinny(2, 3, 40, H100), 2, row_major(3, 40, "f32"), nth=40)


def test_a_large_product_on_many_warps(cuda: Runner) -> None:
    shape = (64, 333, 257)
    check(cuda, plan_skinny(*shape, H100), 64, row_major(333, 257, "bf16"), nth=50)


@pytest.mark.parametrize("name", [*SOME_FORMATS, *map(seldom, OTHERS)])
@pytest.mark.parametrize("n", [1, 16, 17, 32, 33, 48, 70])
def test_blocks_at_edges_of_panels(cuda: Runner, name: str, n: int) -> None:
    """One panel or two in a vector, whole or in part, in one stretch of K and in two."""
    k = 3 * FORMATS[name].unit
    columns = -(-n // 32)
    for splits in (1, 2):
        regions = (
            Region(0, 0, 1, columns, Tile(1, 0)),
            Region(2, 0, 1, columns, Tile(0, 0)),
        )
        check(cuda, SkinnyPlan(regions, splits, 0.0), 3, in_blocks(n, k, name), "f32")


@pytest.mark.parametrize("tile", PANEL_TILES, ids=lambda t: f"{t.rows}")
@pytest.mark.parametrize("rows", ["f32", "bf16", "f16"])
def test_every_tile_of_blocks(cuda: Runner, tile: Tile, rows: str) -> None:
    plan = SkinnyPlan((Region(0, 0, 1, 2, tile),), 1, 0.0)
    for name in ("q8_32", "q4_32m", "q6_16k"):
        weights = in_blocks(40, FORMATS[name].unit, name)
        check(cuda, plan, tile.rows, weights, rows, bias=tile.e % 2 == 0)


@pytest.mark.parametrize("name", ["q8_32", "q4_32", "q4_32km"])
@pytest.mark.parametrize("m", [1, 7, 64])
def test_planned_products_with_blocks(cuda: Runner, name: str, m: int) -> None:
    plan = plan_skinny(m, 100, 1024, PANELS)
    assert plan.splits > 1
    check(cuda, plan, m, in_blocks(100, 1024, name), "bf16", nth=7)


def test_the_interpreted_text_computes_the_same() -> None:
    run = interpreted_runner("cuda")
    regions = (Region(0, 0, 1, 2, Tile(1, 1)), Region(2, 0, 1, 1, Tile(0, 2)))
    panels = (Region(0, 0, 1, 2, Tile(1, 0)), Region(2, 0, 1, 2, Tile(0, 0)))
    for splits in (1, 2):
        check(run, SkinnyPlan(regions, splits, 0.0), 3, row_major(4, 70, "bf16"))
        weights = in_blocks(34, 64, "q4_32m")
        check(run, SkinnyPlan(panels, splits, 0.0), 3, weights, "f16")


@pytest.mark.parametrize("name", QUANTISED)
def test_the_interpreted_text_reads_every_format(name: str) -> None:
    plan = SkinnyPlan((Region(0, 0, 1, 1, Tile(0, 0)),), 1, 0.0)
    weights = in_blocks(18, FORMATS[name].unit, name)
    check(interpreted_runner("cuda"), plan, 1, weights, "f32", nth=1)
