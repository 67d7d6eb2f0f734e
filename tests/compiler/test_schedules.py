"""Default schedules: total cover, and tiles that fit the registers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.schedules import (
    FAR_PREFETCH,
    LINEAR,
    MOST_ROWS,
    SILU,
    SINGLE_PREFETCH,
    SPREAD_PREFETCH,
    SUMS,
    GemmOp,
    MicroKernel,
    breakpoints,
    built_tiles,
    default_block,
    default_gemm_rows,
    default_row,
    default_tile,
    make_schedule,
    merge_rows,
    micro_kernels,
    rule_tiles,
    thread_grid,
)
from dovetail.ir.errors import ScheduleError
from dovetail.ir.model import PANEL
from dovetail.ir.schedule import ORDERS, SCHEDULE_VALUES, Row
from tests.codegen.float_targets import FLOAT_TARGETS


@pytest.mark.parametrize("target", FLOAT_TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", [LINEAR, SILU])
def test_micro_kernels_are_all_that_fit_the_register_file(target, kind):
    tiles = micro_kernels(kind, target)
    built = built_tiles(kind, target)
    assert {(t.rows, t.panels) for t in tiles} == {
        (rows, panels) for panels, tallest in built.items() for rows in range(1, tallest.rows + 1)
    }
    if target.lanes == 1:
        return
    assert all(tile.registers(target.lanes) <= target.registers for tile in tiles)
    for panels, tallest in built.items():
        higher = MicroKernel(tallest.rows + 1, panels)
        assert higher.registers(target.lanes) > target.registers or higher.rows > MOST_ROWS[kind]
    for dtype in ("f32", "bf16"):
        assert set(rule_tiles(GemmOp("x", kind, 1, 1, dtype), target)) <= set(tiles)


def test_the_tiles_of_avx512_and_avx2():
    def heights(target):
        return {t.panels: t.rows for t in built_tiles(LINEAR, TARGETS[target]).values()}

    assert heights("x86-64-avx512") == {1: 16, 2: 14, 3: 9, 4: 6}
    assert heights("x86-64-avx2") == {1: 6, 2: 3, 3: 2, 4: 1}


PAIRS = ((1, 4), (2, 3), (6, 1), (6, 1))
"""Rows and panels of the tiles for one to four rows of bfloat16: none is 3 x 2."""


@pytest.mark.parametrize(
    ("kind", "dtype", "rows"),
    [
        (
            LINEAR,
            "f32",
            [
                *((6 // n, n, SINGLE_PREFETCH) for n in (4, 3, 2)),
                *[(3, 2, SPREAD_PREFETCH)] * 2,
            ],
        ),
        (
            LINEAR,
            "bf16",
            [
                (1, 4, SINGLE_PREFETCH),
                (2, 3, SINGLE_PREFETCH),
                *[(6, 1, SINGLE_PREFETCH)] * 2,
                (6, 1, FAR_PREFETCH),
            ],
        ),
        (SILU, "f32", [*[(3, 2, SINGLE_PREFETCH)] * 3, *[(3, 2, FAR_PREFETCH)] * 2]),
        (SILU, "bf16", [*[(2, 2, SINGLE_PREFETCH)] * 2, *[(2, 2, FAR_PREFETCH)] * 3]),
    ],
)
def test_avx2_rules_stream_few_rows_and_spread_the_fetching_of_more(kind, dtype, rows):
    op, target = GemmOp("x", kind, 256, 2048, dtype), TARGETS["x86-64-avx2"]
    panels = {op.kernel(target, tile): count for count, tile in built_tiles(kind, target).items()}
    found = []
    for m in (1, 2, 3, 4, 8):
        row = default_row(op, target, m, 1, 1 << 25)
        values = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
        found.append((values["m_tile"], panels[row.kernel], values["prefetch"]))
    assert found == rows


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2"])
@pytest.mark.parametrize(("kind", "dtype"), [(LINEAR, "f32"), (LINEAR, "bf16"), (SILU, "bf16")])
def test_weights_come_from_the_second_cache_where_all_of_k_outgrows_the_first(kind, dtype, target):
    op, found = GemmOp("x", kind, 256, 2048, dtype), {}
    for m in (32, 48, 49, 512):
        row = default_row(op, TARGETS[target], m, 1, 1 << 25)
        values = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
        found[m] = values["prefetch"], values["block_k"]
    widened = (kind, dtype, target) == (LINEAR, "bf16", "x86-64-avx2")
    for m, (prefetch, block_k) in found.items():
        near = block_k or (widened and m > 48)
        assert prefetch == (SPREAD_PREFETCH if near else FAR_PREFETCH)
    assert {49} <= {*breakpoints(op, TARGETS[target])}


def test_rounded_rows_in_tile_registers_come_in_blocks():
    """And what is not rounded, float32 or few rows, as on the target without them."""
    amx, plain = TARGETS["x86-64-amx"], TARGETS["x86-64-avx512"]
    for kind, dtype in ((LINEAR, "bf16"), (SILU, "bf16"), (LINEAR, "f32")):
        op = GemmOp("x", kind, 256, 2048, dtype)
        for m in (1, 14, 16, 512):
            row = default_row(op, amx, m, 1, 1 << 25)
            values = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
            if dtype == "bf16" and m >= 16:
                assert (values["block_m"], values["prefetch"]) == (128, SPREAD_PREFETCH)
            else:
                assert row == default_row(op, plain, m, 1, 1 << 25)
        assert 16 in breakpoints(op, amx)
    long = default_row(GemmOp("x", LINEAR, 256, 14336, "bf16"), amx, 512, 1, 1 << 25)
    assert dict(zip(SCHEDULE_VALUES, long.schedule, strict=True))["block_m"] == 256


def slices(op: GemmOp, target: str, *ms: int) -> list[tuple[int, int, int, str]]:
    """Rows and panels of the tile, slice of K and order that the rules give each M."""
    panels = {
        op.kernel(TARGETS[target], t): n for n, t in built_tiles(op.kind, TARGETS[target]).items()
    }
    found = []
    for m in ms:
        row = default_row(op, TARGETS[target], m, 1, 1 << 25)
        values = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
        order = ORDERS[values["order"]]
        found.append((values["m_tile"], panels[row.kernel], values["block_k"], order))
    return found


def test_a_few_tiles_of_rows_take_k_in_slices_innermost():
    op, half = (GemmOp("x", LINEAR, 256, 2048, dtype) for dtype in ("f32", "bf16"))
    sliced, whole = (9, 3, 128, "mnk"), (14, 2, 0, "mkn")
    assert slices(op, "x86-64-avx512", 14, 15, 81, 82) == [whole, sliced, sliced, whole]
    assert slices(half, "x86-64-avx512", 15, 64, 65) == [(9, 3, 512, "mnk")] * 2 + [whole]
    sliced, low, high = (3, 2, 256, "mnk"), (3, 2, 0, "mkn"), (6, 1, 0, "mkn")
    assert slices(op, "x86-64-avx2", 3, 4, 18, 19) == [low, sliced, sliced, high]


def test_many_rows_of_a_long_k_are_cut_into_blocks_with_room_for_their_sums():
    target = TARGETS["x86-64-avx512"]
    long, short = (GemmOp("x", LINEAR, 4096, k, "f32") for k in (14336, 4096))
    assert slices(long, target.name, 81, 82, 512) == [
        (9, 3, values, "mnk") for values in (128, 256, 256)
    ]
    assert slices(short, target.name, 512) == [(14, 2, 0, "mkn")]
    row = default_row(long, target, 512, 1, 1 << 25)
    block = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
    assert 1 < block["block_n"] and block["block_m"] * block["block_n"] * 3 * PANEL <= SUMS
    assert default_gemm_rows(long, target, 1, 1 << 25)[-1].m_lo == 82


@pytest.mark.parametrize("target", sorted(FLOAT_TARGETS))
@pytest.mark.parametrize(("kind", "dtype"), [(LINEAR, "f32"), (LINEAR, "bf16"), (SILU, "f32")])
def test_other_products_take_k_whole(kind: str, dtype: str, target: str) -> None:
    """Gated, of pairs, of 16 bits on AVX2, on other targets; and those that a slice holds."""
    sliced = {("x86-64-avx512bf16", "f32"), ("x86-64-avx512", "f32"), ("x86-64-avx2", "f32")}
    sliced |= {("x86-64-avx512", "bf16"), ("x86-64-amx", "f32")}
    op = GemmOp("x", kind, 256, 2048, dtype)
    assert (default_block(op, TARGETS[target], 16) is not None) == (
        kind == LINEAR and (target, dtype) in sliced
    )
    for m, k in ((16, 128), (256, 2048)):
        op = GemmOp("x", kind, 256, k, dtype)
        assert default_block(op, TARGETS[target], m) is None
        assert default_tile(op, TARGETS[target], m) == rule_tiles(op, TARGETS[target])[0]


def test_rules_may_change_their_mind_where_slices_do():
    op = GemmOp("x", LINEAR, 256, 2048, "f32")
    rows = default_gemm_rows(op, TARGETS["x86-64-avx512"], 1, 1 << 25)
    assert {15, 82} <= {*breakpoints(op, TARGETS["x86-64-avx512"])}
    assert [row.m_lo for row in rows][-2:] == [15, 82]


@given(
    n=st.integers(1, 5000),
    k=st.integers(1, 5000),
    threads=st.integers(1, 64),
    kind=st.sampled_from([LINEAR, SILU]),
    target=st.sampled_from(sorted(FLOAT_TARGETS)),
    l3=st.sampled_from([0, 1 << 20, 1 << 25]),
)
def test_rows_cover_every_m_and_fit_the_threads(n, k, threads, kind, target, l3):
    op = GemmOp("x", kind, n, k, "f32")
    rows = default_gemm_rows(op, TARGETS[target], threads, l3)
    bounds = [row.m_lo for row in rows]
    assert bounds[0] == 1 and bounds == sorted(set(bounds))
    for row in rows:
        values = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
        assert values["grid_m"] * values["grid_n"] <= threads
        assert values["m_tile"] >= 1 and values["grid_k"] == 1


def test_rows_are_shared_out_only_where_panels_run_out():
    wide, narrow = GemmOp("x", LINEAR, 4096, 64, "f32"), GemmOp("x", LINEAR, 32, 64, "f32")
    assert thread_grid(wide, 100, 8) == (1, 8)
    assert thread_grid(narrow, 100, 8) == (4, 2)
    assert thread_grid(narrow, 1, 8) == (1, 2)


def test_merging_keeps_the_first_of_equal_rows():
    rows = [
        Row(m_lo=m, kernel=k, schedule=()) for m, k in ((1, "a"), (5, "a"), (9, "b"), (12, "a"))
    ]
    assert [(r.m_lo, r.kernel) for r in merge_rows(rows)] == [(1, "a"), (9, "b"), (12, "a")]


def test_unknown_schedule_values_are_refused():
    with pytest.raises(ScheduleError, match="m_tiles"):
        make_schedule(m_tiles=4)
