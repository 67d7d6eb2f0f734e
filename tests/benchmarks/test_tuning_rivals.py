"""The rivals: each chooses as its paper says, from the same micro-kernels, and never our rules."""

from __future__ import annotations

import math
import random
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import TARGETS, host_target
from dovetail.compiler.measure.child import WeightPool
from dovetail.compiler.measure.meter import Meter
from dovetail.compiler.rules.schedules import LINEAR, MicroKernel, gemm_requests, micro_kernels
from dovetail.compiler.search.dietcode import sample_points
from dovetail.compiler.search.space import WHOLE, Scheme, Slice
from dovetail.compiler.search.tables import tuning_library
from dovetail.runtime.machine.library import KernelLibrary
from tests.compiler.rules.test_tables import SPEC
from tests.compiler.search.landscape import TARGET, Landscape, task
from tests.extras import need
from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import Patience
from rivals import POLICIES
from rivals.ansor import Ansor, Space
from rivals.dietcode import DietCode, full_tiles, programs
from rivals.mikpoly import MikPoly, TileCost, fit, learn, polymerize, tile_counts
from rivals.result import Region, as_found, whole
from rivals.roller import (
    CACHES,
    Roller,
    footprint,
    reuse_score,
    scale_out,
    scale_up,
    shrink,
    traffic,
)
from tuning_regions import Product, make_team, region_candidate, time_in_turns

need("sklearn")  # DietCode and Ansor learn with it
POINTS = (1, 4, 16, 64, 256)
RIVALS = {name: p for name, p in POLICIES.items() if name not in ("sandwich", "default")}
SMALL = {"dietcode": DietCode(lessons=3), "ansor": Ansor(trials=48, population=32)}
"""Of the policies that learn: fewer lessons."""


def search(name, one, land):
    return as_found(one, SMALL.get(name, POLICIES[name]).search(one, land))


def covered(one, m, regions):
    """Return how often each element of C is computed."""
    count = np.zeros((m, one.op.n), int)
    for r in regions:
        count[r.row : r.row + r.rows, r.column : r.column + r.columns] += 1
    return count


def seconds(one, m, program):
    problem = one.problem(m)
    return Landscape().seconds(problem.case, problem.candidate(program))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_covers_every_product_from_the_same_tiles(name):
    one, land = task(points=POINTS), Landscape()
    found = search(name, one, land)
    tiles = set(micro_kernels(one.op.kind, one.target))
    assert list(found.picks) == list(POINTS)
    for m, regions in found.picks.items():
        assert (covered(one, m, regions) == 1).all()
        for region in regions:
            assert region.program.tile in tiles
            scheme = region.program.scheme
            assert scheme.m * scheme.n * scheme.k <= 2
            assert region_candidate(one, m, region)
    assert found.trials == len(land.asked)
    assert search(name, one, Landscape()) == found


@pytest.mark.parametrize("name", RIVALS)
def test_without_budget_no_rival_takes_our_rules(name):
    one, land = task(points=POINTS, seconds=0.0), Landscape()
    found = search(name, one, land)
    assert not land.asked and list(found.picks) == list(POINTS)
    if name != "roller":  # whose model ranks without a time
        assert not any(found.picks.values())


# ---- roller ----


def test_roller_grows_the_side_that_saves_most_traffic_per_byte_of_cache():
    one, tile, part = task(n=32, k=64), MicroKernel(4, 1), Slice(4, 1, 64)
    taller, wider = replace(part, m=8), replace(part, n=2)
    weight, rows = 4 * 32 * 64, 4 * 8 * 64
    assert traffic(one, 8, tile, part) - traffic(one, 8, tile, taller) == weight
    assert footprint(one, tile, taller) - footprint(one, tile, part) == 4 * 4 * 64 + 4 * 4 * 16
    assert reuse_score(one, 8, tile, part, taller) == weight / 1280
    assert reuse_score(one, 8, tile, part, wider) == rows / (4 * 16 * 64 + 4 * 4 * 16)


@pytest.mark.parametrize("level", CACHES)
def test_roller_fills_half_of_a_cache(level):
    one, tile = task(n=4096, k=4096), MicroKernel(6, 4)
    part = scale_up(one, 512, tile, level)
    assert footprint(one, tile, part) <= one.hardware.cache_bytes(level) // 2
    assert part.m % 6 == 0 and part.k % 16 == 0
    wider = [replace(part, m=part.m + 6), replace(part, n=part.n + 1)]
    assert all(footprint(one, tile, w) > one.hardware.cache_bytes(level) // 2 for w in wider)


def test_roller_has_every_core_at_work_where_tiles_are_enough():
    one, tile = task(n=1024, k=512, threads=8), MicroKernel(14, 2)
    part = shrink(one, 14, tile, Slice(14, 32, 512))
    assert -(-32 // part.n) >= 8
    assert scale_out(one, 14, tile, part) == Scheme(1, 8, 1)
    tiny = task(n=32, k=512, threads=8)
    assert shrink(tiny, 14, tile, Slice(14, 1, 512)) == Slice(14, 1, 512)


def test_roller_takes_no_tile_that_is_mostly_padding():
    one, roller = task(n=512), Roller()
    assert {tile.rows for tile in roller.aligned_tiles(one, 1)} == {1}
    heights = {tile.rows for tile in roller.aligned_tiles(one, 9)}
    assert 9 in heights and heights.isdisjoint({4, 6, 7, 8, 14})
    assert all(-(-9 // rows) * rows <= 1.25 * 9 for rows in heights)


def test_roller_says_that_no_tile_is_aligned():
    one, land = task(n=24, points=(1, 8)), Landscape()  # 16 columns pad a third
    assert Roller().search(one, land).picks == {1: (), 8: ()}
    assert not land.asked


def test_roller_serves_what_it_constructed_even_where_the_rules_are_faster():
    one, roller = task(points=(63,)), Roller()
    rules = one.problem(63).candidate(one.default(63))

    def cost(case, panels, values):
        return 1e-5 if tuple(values.values()) == rules.schedule else 2e-4 - 1e-6 * panels

    land = Landscape(cost)
    found = roller.search(one, land)
    (region,) = found.picks[63]
    built = roller.programs(one, 63)
    assert region.program in built and one.default(63) not in built
    assert rules not in [candidate for _, candidate in land.asked]
    assert found.trials == roller.measured < len(built)
    timed = [Landscape(cost).seconds(*each) for each in land.asked]
    problem = one.problem(63)
    assert land.seconds(problem.case, problem.candidate(region.program)) == min(timed)


# ---- mikpoly ----

TILES = micro_kernels(LINEAR, TARGET)
PLANES = st.lists(st.floats(1e-7, 1e-3), min_size=4, max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 90),
    n=st.integers(1, 300),
    threads=st.integers(1, 3),
    costs=st.dictionaries(st.sampled_from(TILES), PLANES.map(TileCost), min_size=1, max_size=6),
)
def test_mikpoly_s_regions_cover_each_product_once(m, n, threads, costs):
    one = task(n=n, k=64, threads=threads)
    regions = polymerize(one, m, costs)
    assert (covered(one, m, regions) == 1).all()
    assert 1 <= len(regions) <= 4
    assert all(r.column % 16 == 0 and r.program.tile in costs for r in regions)


def test_mikpoly_mixes_micro_kernels_where_one_would_pad():
    """11 rows: a tile of 8 and one of 3, rather than two of 8 or four of 3."""
    one = task(n=64, k=64, threads=1)
    tall, low = MicroKernel(8, 1), MicroKernel(3, 1)
    costs = {tall: TileCost((0, 0, 1.0, 0)), low: TileCost((0, 0, 0.5, 0))}
    upper, lower = polymerize(one, 11, costs)
    assert [(r.row, r.rows, r.program.tile) for r in (upper, lower)] == [(0, 8, tall), (8, 3, low)]
    assert (upper.columns, lower.columns) == (64, 64)
    (only,) = polymerize(one, 16, costs)
    assert only.program.tile == tall


def test_mikpoly_cuts_columns_behind_whole_groups_of_panels():
    one = task(n=7 * 16, k=64, threads=1)
    wide, narrow = MicroKernel(4, 3), MicroKernel(4, 1)
    costs = {wide: TileCost((0, 0, 1.5, 0)), narrow: TileCost((0, 0, 1.0, 0))}
    left, right = polymerize(one, 4, costs)
    assert (left.columns, left.program.tile) == (6 * 16, wide)
    assert (right.column, right.columns, right.program.tile) == (6 * 16, 16, narrow)
    assert polymerize(one, 4, {}) == ()


def test_mikpoly_s_costs_are_learnt_off_line_whatever_the_shape():
    asked = []
    for n, k, points in ((512, 1024, (1, 8)), (96, 4096, (64,))):
        one, land = task(n=n, k=k, points=points), Landscape()
        MikPoly().search(one, land)
        asked.append(land.asked)
    assert asked[0] == asked[1]
    assert {case.threads for case, _ in asked[0]} == {1}


def test_mikpoly_s_plane_goes_through_what_was_timed():
    def cost(case, panels, values):
        tiles = -(-case.m // values["m_tile"])
        return 48 / panels * (1e-6 + 2e-9 * case.k + 3e-6 * tiles + 4e-9 * tiles * case.k)

    one = task(points=(64,))
    costs, trials = learn(one, Landscape(cost), math.inf, rounded=False)
    assert costs.keys() == set(TILES) and trials == 4 * len(TILES)
    expected = 1e-6 + 2e-9 * 768 + 3e-6 * 3 + 4e-9 * 3 * 768
    assert costs[MicroKernel(6, 4)].seconds(3, 768) == pytest.approx(expected)
    assert fit([(1, 512, 1.0), (1, 2048, 4.0)]).seconds(1, 1024) == pytest.approx(2.0)


def test_mikpoly_s_plane_promises_no_bargain_below_what_was_timed():
    cost = fit([(4, 512, 2.0), (4, 2048, 8.0), (8, 512, 6.0), (8, 2048, 24.0)])
    assert cost.seconds(6, 512) == pytest.approx(4.0)
    assert cost.seconds(2, 512) == pytest.approx(1.0)  # the plane has nothing left there


def test_mikpoly_times_few_rows_and_rounded_ones_apart():
    assert tile_counts(6, 0, rounded=False) == (1, 5)
    assert tile_counts(6, 16, rounded=False) == (1, 2)
    assert tile_counts(9, 16, rounded=False) == (1,)
    assert tile_counts(16, 16, rounded=False) == ()
    assert tile_counts(6, 16, rounded=True) == (3, 7)
    pairs = TARGETS["x86-64-avx512bf16"]
    one = replace(task(points=(8, 64)), target=pairs)
    one, land = replace(one, op=replace(one.op, dtype="bf16")), Landscape()
    MikPoly().search(one, land)
    assert {case.m >= 16 for case, _ in land.asked} == {False, True}
    region = Region(16, 4, 0, 512, one.program(4, MicroKernel(4, 1), WHOLE, Scheme()))
    assert region_candidate(one, 20, region).schedule[0] == -4  # rounded as the other 16 rows are
    assert region_candidate(one, 4, region).schedule[0] == 4


# ---- dietcode and ansor ----


def rank(one, m, program, others):
    """Return the share of others that are faster on the made-up machine."""
    mine = seconds(one, m, program)
    return sum(seconds(one, m, other) < mine for other in others) / len(others)


def test_dietcode_measures_a_few_shapes_and_predicts_the_others():
    one, land = task(points=(1, 4, 9, 16, 33, 64)), Landscape()
    found = DietCode(samples=3).search(one, land)
    sampled = sample_points(one.points, 3)
    assert {case.m for case, _ in land.asked} == set(sampled) and sampled == (1, 9, 64)
    for m in set(one.points) - set(sampled):
        (region,) = found.picks[m]
        best = min(seconds(one, m, program) for program in programs(one, m))
        assert seconds(one, m, region.program) < 1.3 * best


def test_dietcode_counts_padded_tiles_of_the_busiest_thread():
    one = task(n=5 * 16, threads=2)
    assert full_tiles(one, 13, MicroKernel(6, 1), Scheme(1, 2, 1)) == 3 * 3
    assert full_tiles(one, 13, MicroKernel(6, 4), Scheme(2, 1, 1)) == 2 * 2


def test_ansor_evolves_towards_fast_programs():
    one, land = task(n=2048, k=4096, points=(64,)), Landscape()
    found = Ansor(trials=96, batch=16, population=64).search(one, land)
    assert found.trials == 96 == len({candidate for _, candidate in land.asked})
    space, draw = Space(one, 64), random.Random(7)
    ((region,),) = found.picks.values()
    assert rank(one, 64, region.program, [space.draw(draw) for _ in range(1000)]) < 0.02


def test_model_based_rivals_take_fewer_trials_than_evolution():
    one = task(points=tuple(range(1, 33, 3)))
    trials = {
        name: search(name, one, Landscape()).trials for name in ("mikpoly", "roller", "ansor")
    }
    assert max(trials["mikpoly"], trials["roller"]) < trials["ansor"]


# ---- on this machine ----


@pytest.fixture(scope="module")
def built():
    return build_library(tuning_library(SPEC, host_target()))


def cut_in_three(one):
    """20 rows: 16 over columns of two kernels, and 4 beneath."""
    tiles = {t.panels: t for t in micro_kernels(LINEAR, one.target, one.op.dtype)}

    def region(row, rows, column, columns, panels):
        program = one.program(rows, tiles[panels], WHOLE, Scheme())
        return Region(row, rows, column, columns, program)

    return region(0, 16, 0, 64, 2), region(0, 16, 64, 36, 1), region(16, 4, 0, 100, 1)


def check_regions(built, dtype):
    one = task(n=100, k=96, threads=1)
    one = replace(one, op=replace(one.op, dtype=dtype), target=host_target())
    library, cut = KernelLibrary(built.path, built.index), cut_in_three(one)
    with closing(make_team(library, one)) as team:
        product = Product(library, team, one, 20, WeightPool(dtype, 1 << 20))
        plain = whole(one, 20, replace(cut[2].program, slice=WHOLE))
        times = time_in_turns(product, [plain, cut], 3, 1.0, Patience(0))
        assert all(len(each) == 3 and min(each) > 0 for each in times)
        assert not product.right(cut[:2])  # the last rows are missing


def test_regions_compute_the_product(built):
    check_regions(built, SPEC.weight_dtype)


@pytest.mark.long
def test_regions_round_their_rows_as_the_whole_product_does():
    requests = gemm_requests(("bf16",), host_target(), (LINEAR,))
    kernels = tuple(r for r in requests if r.binding.get("NP", 1) <= 2)
    spec = LibrarySpec(host_target(), kernels, name="rivals", tvm_ffi=False)
    check_regions(build_library(spec), "bf16")


@pytest.mark.parametrize("name", RIVALS)
def test_on_a_real_meter(built, name):
    one = task(n=96, k=128, points=(1, 20), threads=1)
    one = replace(one, op=replace(one.op, dtype=SPEC.weight_dtype), target=host_target(), rounds=2)
    few = {"ansor": Ansor(trials=12, batch=6, population=16), "dietcode": DietCode(lessons=2)}
    library = KernelLibrary(built.path, built.index)
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = few.get(name, POLICIES[name]).search(one, meter)
    assert found.trials and any(found.picks.values())
    with closing(make_team(library, one)) as team:
        for m, regions in found.picks.items():
            pool = WeightPool(SPEC.weight_dtype, 1 << 20)
            assert not regions or Product(library, team, one, m, pool).right(regions)
