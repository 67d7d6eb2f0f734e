"""Plans of skinny products cover C once and are predicted no slower than any single tile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import ScheduleError
from dovetail.runtime.native.polymerize import (
    LANES,
    PANEL_TILES,
    TILES,
    CostTable,
    GpuSpec,
    Region,
    SkinnyPlan,
    Tile,
    TileCost,
    assumed_costs,
    assumed_panel_costs,
    cut_columns,
    makespan,
    plan_cover,
    plan_skinny,
    row_covers,
    usable_splits,
)

H100 = assumed_costs(GpuSpec(132, 1.75e9, 3.35e12), 2)
SHAPES = {"m": st.integers(1, 64), "n": st.integers(1, 300), "k": st.integers(1, 9000)}


def covered(plan: SkinnyPlan, m: int, n: int) -> np.ndarray:
    """How often each element of C is computed."""
    hits = np.zeros((m, n), int)
    for r in plan.regions:
        rows, columns = r.row_tiles * r.tile.rows, r.column_tiles * r.tile.columns
        assert r.m + rows <= m and r.n + columns <= n
        hits[r.m : r.m + rows, r.n : r.n + columns] += 1
    return hits


@settings(max_examples=60, deadline=None, derandomize=True)
@given(**SHAPES)
def test_every_element_is_computed_once(m: int, n: int, k: int) -> None:
    plan = plan_skinny(m, n, k, H100)
    assert (covered(plan, m, n) == 1).all()
    assert all(region.tile in TILES for region in plan.regions)
    assert plan.splits in usable_splits(k)
    table = plan.table()
    assert table.shape == (len(plan.regions), 7)
    assert plan.warps == plan.splits * (table[-1, 6] + table[-1, 2] * table[-1, 3])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(**SHAPES)
def test_no_single_tile_is_predicted_faster(m: int, n: int, k: int) -> None:
    """Heights that divide M, alone and unsplit, are among what the planner may choose."""
    best = plan_skinny(m, n, k, H100).seconds
    steps = -(-k // LANES)
    for tile in TILES:
        if m % tile.rows == 0:
            regions = tuple(cut_columns(0, n, m // tile.rows, tile))
            assert best <= makespan(regions, 1, steps, H100) + H100.launch + 1e-12


def flat(cheap: dict[Tile, float], slots: int = 64) -> CostTable:
    """A table where a step of a tile costs 1 s per element of C, or what `cheap` says."""
    tiles = {t: TileCost(0, 0, cheap.get(t, float(t.rows * t.columns))) for t in TILES}
    return CostTable(slots, 0.0, 0.0, tiles)


def test_the_mix_follows_the_cost_table() -> None:
    plan = plan_skinny(13, 1024, 64, flat({Tile(2, 3): 1.0, Tile(0, 2): 0.5}))
    assert {(r.m, r.tile) for r in plan.regions} == {(0, Tile(2, 3)), (12, Tile(0, 2))}
    plan = plan_skinny(13, 1024, 64, flat({Tile(0, 3): 0.1}))
    assert {r.tile for r in plan.regions} == {Tile(0, 3)}


def test_columns_left_over_get_narrower_tiles() -> None:
    regions = list(cut_columns(3, 29, 2, Tile(1, 3)))
    assert regions == [
        Region(3, 0, 2, 3, Tile(1, 3)),
        Region(3, 24, 2, 1, Tile(1, 2)),
        Region(3, 28, 2, 1, Tile(1, 0)),
    ]


def test_k_is_split_where_columns_do_not_fill_the_gpu() -> None:
    assert plan_skinny(1, 256, 8192, H100).splits > 1
    assert plan_skinny(1, 32000, 4096, H100).splits == 1
    assert plan_skinny(1, 256, 64, H100).splits == 1


def test_row_covers_are_all_the_stacks_of_falling_heights() -> None:
    assert set(row_covers(3)) == {((3, 0),), ((1, 1), (1, 0))}
    for m in (1, 7, 16, 33, 64):
        for cover in row_covers(m):
            assert sum(count << e for count, e in cover) == m
            heights = [e for _, e in cover]
            assert heights == sorted(heights, reverse=True)


def test_makespan_deals_tiles_as_the_kernel_does() -> None:
    costs = flat({}, slots=5)
    regions = [Region(0, 0, 1, 7, Tile(0, 1)), Region(0, 14, 1, 4, Tile(0, 0))]
    spent = [0.0] * 5
    for item in range(2 * 7):
        spent[item % 5] += 3 * 2.0
    for item in range(14, 14 + 2 * 4):
        spent[item % 5] += 3 * 1.0
    assert makespan(regions, 2, 3, costs) == max(spent)


def test_splitting_pays_for_its_merge() -> None:
    costs = H100
    one, two = (plan_cover(1, 64, 8192, ((1, 0),), s, costs) for s in (1, 2))
    steps = 8192 // LANES // 2
    assert two.seconds == pytest.approx(
        makespan(two.regions, 2, steps, costs) + 2 * costs.launch + costs.merge * 5 * 64
    )
    assert one.seconds == pytest.approx(makespan(one.regions, 1, 2 * steps, costs) + costs.launch)


@pytest.mark.parametrize("shape", [(0, 4, 4), (65, 4, 4), (1, 0, 4), (1, 4, 0)])
def test_shapes_that_are_not_skinny_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match="1 to 64 rows"):
        plan_skinny(*shape, H100)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**SHAPES)
def test_panels_are_covered_two_at_a_time(m: int, n: int, k: int) -> None:
    """A column of the plan is 32 of C; tiles are as high as those of rows, and never wider."""
    columns = -(-n // 32)
    costs = assumed_panel_costs(GpuSpec(132, 1.75e9, 3.35e12), 0.5625)
    plan = plan_skinny(m, n, k, costs)
    assert (covered(plan, m, columns) == 1).all()
    assert all(region.tile in PANEL_TILES for region in plan.regions)


def test_merging_panels_counts_all_their_columns() -> None:
    costs = assumed_panel_costs(GpuSpec(132, 1.75e9, 3.35e12), 0.5625)
    plan = plan_cover(1, 2, 8192, ((1, 0),), 2, costs)
    stretch = makespan(plan.regions, 2, 8192 // LANES // 2, costs)
    assert plan.seconds == pytest.approx(stretch + 2 * costs.launch + costs.merge * 5 * 64)
