"""Default schedules: total cover, and tiles that fit the registers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.rules.schedules import (
    FAR_PREFETCH,
    HALVED_FROM,
    K_UNIT,
    LINEAR,
    MOST_ROWS,
    NEAR_PREFETCH,
    SILU,
    SINGLE_PREFETCH,
    SPREAD_PREFETCH,
    SUMS,
    GemmOp,
    MicroKernel,
    built_tiles,
    default_gemm_rows,
    default_row,
    default_tile,
    gemm_requests,
    make_schedule,
    merge_rows,
    micro_kernels,
    rule_tiles,
    slices_k,
    takes_tiles,
    thread_grid,
)
from dovetail.ir.model import PANEL
from dovetail.ir.schedule import ORDERS, SCHEDULE_VALUES, Row
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.values import CacheSpec
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


def machine(l1: int = 32 << 10, l2: int = 2 << 20, l3: int = 1 << 25) -> HardwareSpec:
    """A machine of one core whose caches hold so many bytes."""
    spec = read_hardware("core:1 pu:1")
    caches = tuple(
        CacheSpec(level=level, kind="data", bytes=size, line_bytes=64, pus=(0,))
        for level, size in ((1, l1), (2, l2), (3, l3))
        if size
    )
    return msgspec.structs.replace(spec, caches=caches)


HERE = machine()
OF_AVX512 = {(LINEAR, "f32"): ((14, 2), (9, 3), (6, 4)), (SILU, "f32"): ((14, 2), (6, 4))}
OF_AVX512 |= {(LINEAR, "q4_32"): ((6, 2), (12, 1)), (SILU, "q4_32"): ((6, 2),)}
OF_AVX2 = {
    (LINEAR, "f32"): ((6, 1), (3, 2), (2, 3), (1, 4)),
    (LINEAR, "bf16"): ((5, 1), (2, 3), (1, 4)),  # pairs beside weights: 6 x 1 and 3 x 2 spill
    (LINEAR, "q4_32"): ((4, 1), (2, 2)),
    (SILU, "f32"): ((3, 2), (1, 4)),
    (SILU, "bf16"): ((2, 2), (1, 4)),
}


@pytest.mark.parametrize(
    ("target", "kind", "dtype", "tiles"),
    [("x86-64-avx512", *key, tiles) for key, tiles in OF_AVX512.items()]
    + [("x86-64-avx2", *key, tiles) for key, tiles in OF_AVX2.items()]
    + [("generic", LINEAR, "f32", ((2, 1),)), ("generic", SILU, "f32", ((1, 2),))],
)
def test_the_tiles_of_the_rules_follow_from_registers_and_lanes(
    target: str, kind: str, dtype: str, tiles: tuple[tuple[int, int], ...]
) -> None:
    found = rule_tiles(GemmOp("x", kind, 256, 2048, dtype), TARGETS[target])
    assert tuple((tile.rows, tile.panels) for tile in found) == tiles


def told(op: GemmOp, target: str, m: int, hardware: HardwareSpec = HERE) -> dict[str, int]:
    """Schedule values that the rules give M, and the panels of the tile."""
    row = default_row(op, TARGETS[target], m, 1, hardware)
    built = built_tiles(op.kind, TARGETS[target], op.dtype)
    panels = {op.kernel(TARGETS[target], tile): count for count, tile in built.items()}
    values = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
    return {**values, "panels": panels[row.kernel]}


@pytest.mark.parametrize("target", sorted(FLOAT_TARGETS))
@pytest.mark.parametrize(
    ("kind", "dtype"), [(LINEAR, "f32"), (LINEAR, "bf16"), (SILU, "f32"), (LINEAR, "q4_32")]
)
def test_rows_are_cut_into_as_few_parts_as_the_tallest_tile_does_by_the_widest(
    kind: str, dtype: str, target: str
) -> None:
    op, isa = GemmOp("x", kind, 256, 2048, dtype), TARGETS[target]
    tiles = rule_tiles(op, isa)
    for m in range(1, 60):
        tile = default_tile(op, isa, m)
        if slices_k(op, isa, m) or takes_tiles(op, isa, m):
            continue
        if dtype == "q4_32" and m > tiles[0].rows:
            assert tile == tiles[0]
            continue
        parts = -(-m // tiles[0].rows)
        assert -(-m // tile.rows) == parts
        assert all(-(-m // t.rows) > parts for t in tiles if t.panels > tile.panels)


def test_weights_are_fetched_for_one_pass_then_far_ahead() -> None:
    for kind, dtype in ((LINEAR, "f32"), (LINEAR, "bf16"), (SILU, "f32")):
        op = GemmOp("x", kind, 256, 2048, dtype)
        first = rule_tiles(op, TARGETS["x86-64-avx2"])[0].rows
        for m in range(1, 40):
            kept = NEAR_PREFETCH if m <= first else FAR_PREFETCH
            assert told(op, "x86-64-avx2", m)["prefetch"] == kept
        assert told(op, "x86-64-avx512", 1)["prefetch"] == SINGLE_PREFETCH
    quantised = GemmOp("x", LINEAR, 256, 2048, "q4_32")
    assert told(quantised, "x86-64-avx2", 5)["prefetch"] == SPREAD_PREFETCH
    bytes_, wide = GemmOp("x", LINEAR, 2048, 2048, "q8_32"), "x86-64-avx512bf16"
    rows = rule_tiles(bytes_, TARGETS[wide])[0].rows
    for m in range(rows + 1, 3 * rows):
        kept = FAR_PREFETCH if m < 2 * rows else SPREAD_PREFETCH
        assert told(bytes_, wide, m)["prefetch"] == kept
    assert told(quantised, wide, rows + 1)["prefetch"] == SPREAD_PREFETCH


@pytest.mark.parametrize("target", ["x86-64-avx2", "x86-64-avxvnni"])
def test_gated_tiles_of_widened_weights_take_half_of_each_panel_from_many_rows_on(
    target: str,
) -> None:
    op, isa = GemmOp("x", SILU, 256, 2048, "bf16"), TARGETS[target]
    (tall,) = (r for r in gemm_requests(("bf16",), isa, (SILU,)) if r.binding["NP"] == 2)
    assert (tall.binding["MR"], tall.binding["HALVES"]) == (6, 2)
    for m in range(3, 40):
        few = m < HALVED_FROM
        values = told(op, target, m)
        assert (values["m_tile"], values["panels"]) == ((2, 2) if few else (6, 2))
        assert values["prefetch"] == SPREAD_PREFETCH
    others = (*gemm_requests(("f32", "q4_32"), isa), *gemm_requests(("bf16",), isa, (LINEAR,)))
    assert not any("HALVES" in request.binding for request in others)


def test_rounded_rows_in_tile_registers_come_in_blocks() -> None:
    """And what is not rounded, float32 or few rows, as on the target without them."""
    amx, plain = TARGETS["x86-64-amx"], TARGETS["x86-64-avx512bf16"]
    for kind, dtype in ((LINEAR, "bf16"), (SILU, "bf16"), (LINEAR, "f32")):
        op = GemmOp("x", kind, 256, 2048, dtype)
        for m in (1, 14, 16, 512):
            if dtype == "bf16" and m >= 16:
                values = told(op, amx.name, m)
                assert (values["block_m"], values["prefetch"]) == (128, SPREAD_PREFETCH)
            else:
                assert default_row(op, amx, m, 1, HERE) == default_row(op, plain, m, 1, HERE)
    large, none = 4 << 20, 0  # none reported: that of all these CPUs
    for k, l2, rows in ((12288, none, 128), (12289, none, 256), (12289, large, 128)):
        op = GemmOp("x", LINEAR, 256, k, "bf16")
        assert l2 or told(op, amx.name, 512)["block_m"] == rows
        assert told(op, amx.name, 512, machine(l2=l2))["block_m"] == rows


def test_several_tiles_of_rows_take_k_in_equal_slices_of_two_first_caches() -> None:
    op, half = (GemmOp("x", LINEAR, 256, 2048, dtype) for dtype in ("f32", "bf16"))
    for m, values in ((14, 0), (15, 256), (512, 256)):
        found = told(op, "x86-64-avx512", m)
        assert found["block_k"] == values
        assert ORDERS[found["order"]] == ("mnk" if values else "mkn")
        assert not values or (found["m_tile"], found["panels"]) == (6, 4)
    assert told(half, "x86-64-avx512", 15)["block_k"] == 512
    assert told(op, "x86-64-avx512", 15, machine(l1=48 << 10))["block_k"] == 384  # 6 of 384
    short = GemmOp("x", LINEAR, 256, 576, "f32")
    assert told(short, "x86-64-avx512", 15)["block_k"] == 192  # 3 of 192
    assert told(GemmOp("x", LINEAR, 256, 256, "f32"), "x86-64-avx512", 15)["block_k"] == 0


@given(k=st.integers(1, 20000), m=st.integers(1, 600), l1=st.sampled_from([0, 32, 48, 64]))
def test_sums_of_slices_have_room(k: int, m: int, l1: int) -> None:
    op = GemmOp("x", LINEAR, 4096, k, "f32")
    values = told(op, "x86-64-avx512", m, machine(l1=l1 << 10))
    if values["block_k"]:
        assert values["block_m"] * values["block_n"] * values["panels"] * PANEL <= SUMS
        assert values["block_k"] < k and values["block_k"] % K_UNIT == 0


@pytest.mark.parametrize("target", sorted(FLOAT_TARGETS))
@pytest.mark.parametrize(("kind", "dtype"), [(LINEAR, "f32"), (LINEAR, "bf16"), (SILU, "f32")])
def test_other_products_take_k_whole(kind: str, dtype: str, target: str) -> None:
    """Gated ones, those of pairs, and those of tiles that are lower than wide."""
    sliced = {("x86-64-avx512bf16", "f32"), ("x86-64-avx512", "f32"), ("x86-64-avx512", "bf16")}
    sliced |= {("x86-64-amx", "f32")}
    op = GemmOp("x", kind, 256, 2048, dtype)
    assert slices_k(op, TARGETS[target], 64) == (kind == LINEAR and (target, dtype) in sliced)


@given(
    kind=st.sampled_from([LINEAR, SILU]),
    dtype=st.sampled_from(["f32", "bf16", "q4_32"]),
    target=st.sampled_from(sorted(FLOAT_TARGETS)),
    m=st.integers(1, 4000),
)
def test_the_last_row_serves_every_larger_m(kind: str, dtype: str, target: str, m: int) -> None:
    op, isa = GemmOp("x", kind, 512, 2048, dtype), TARGETS[target]
    rows = default_gemm_rows(op, isa, 1, HERE)
    row = [row for row in rows if row.m_lo <= m][-1]
    wanted = default_row(op, isa, m, 1, HERE)
    assert (row.kernel, row.schedule) == (wanted.kernel, wanted.schedule)


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
    rows = default_gemm_rows(op, TARGETS[target], threads, machine(l3=l3))
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
    with pytest.raises(AssertionError, match="m_tiles"):
        make_schedule(m_tiles=4)
