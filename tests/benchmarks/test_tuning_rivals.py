"""The rival policies: each chooses by its own rule, from the same micro-kernels."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import replace

import pytest

from dovetail.codegen.library import build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure import Meter
from dovetail.compiler.schedules import MicroKernel, micro_kernels
from dovetail.compiler.search.dietcode import sample_points
from dovetail.compiler.search.policy import DEFAULT, PREDICTED
from dovetail.compiler.search.space import Scheme, Slice
from dovetail.compiler.search.tables import tuning_library
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.schedule import ORDERS
from tests.compiler.search.landscape import Landscape, task
from tests.compiler.search.test_policy import is_default, lognormal
from tests.compiler.test_tables import SPEC
from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from tuning_rivals import (
    POLICIES,
    DietCode,
    MikPoly,
    Roller,
    footprint,
    polymerize,
    scale_out,
    scale_up,
)

POINTS = (1, 4, 16, 64, 256)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_point_from_the_same_tiles(name):
    one, land = task(points=POINTS), Landscape()
    found = POLICIES[name].search(one, land)
    tiles = set(micro_kernels(one.op.kind, one.target))
    assert found.choices.keys() == set(POINTS)
    for m, choice in found.choices.items():
        assert MicroKernel(choice.program.tile.rows, choice.program.tile.panels) in tiles
        scheme = choice.program.scheme
        assert scheme.m * scheme.n * scheme.k <= 2
        assert one.problem(m).candidate(choice.program)
    assert found.trials == len(land.asked)
    assert POLICIES[name].search(one, Landscape()) == found


@pytest.mark.parametrize("name", POLICIES)
def test_without_budget_every_policy_still_answers(name):
    one, land = task(points=POINTS, seconds=0.0), Landscape()
    found = POLICIES[name].search(one, land)
    assert found.choices.keys() == set(POINTS) and not land.asked


def test_sandwich_is_ahead_where_slice_and_scheme_depend_on_each_other():
    one = task(points=POINTS)

    def total(name):
        land = Landscape()
        choices = POLICIES[name].search(one, land).choices
        return sum(
            math.log(land.seconds(one.problem(m).case, one.problem(m).candidate(c.program)))
            for m, c in choices.items()
        )

    ours = total("sandwich")
    assert all(ours <= total(name) + 1e-9 for name in POLICIES)


def test_model_based_policies_take_fewer_trials():
    one = task(points=tuple(range(1, 65, 3)))
    trials = {name: POLICIES[name].search(one, Landscape()).trials for name in POLICIES}
    assert trials["default"] == 0
    assert max(trials["dietcode"], trials["mikpoly"]) < trials["sandwich"]


def test_roller_fills_the_cache_of_one_core_and_may_idle_others():
    one, tile = task(n=64, k=4096, threads=8), MicroKernel(14, 2)
    part = scale_up(one, 256, tile)
    half = one.hardware.cache_bytes(2) // 2
    assert footprint(one, tile, part) <= half
    assert scale_out(one, 256, tile, part).k == 1
    small = scale_up(one, 14, tile)
    assert scale_out(one, 14, tile, Slice(small.m, 99, small.k)) == Scheme(1, 1, 1)
    assert len(Roller().search(task(points=(64,)), land := Landscape()).choices) == 1
    assert len({c for _, c in land.asked}) <= Roller().measured + 1


def test_roller_tries_its_slices_in_every_order():
    one, land = task(n=4096, k=8192, points=(512,)), Landscape()
    Roller(measured=1000).search(one, land)
    nests = defaultdict(set)
    for _, candidate in land.asked:
        nests[candidate.kernel, candidate.schedule[:-1]].add(candidate.schedule[-1])
    assert set(range(len(ORDERS))) in nests.values()


def test_dietcode_measures_a_few_shapes_and_predicts_the_others():
    one, land = task(points=tuple(range(1, 65))), Landscape()
    found = DietCode(samples=3).search(one, land)
    assert {case.m for case, _ in land.asked} == set(sample_points(one.points, 3))
    assert sample_points(one.points, 3) == (1, 33, 64)
    assert {choice.source for choice in found.choices.values()} == {PREDICTED}


def test_mikpoly_measures_tiles_on_one_core_and_adds_them_up():
    one, land = task(points=POINTS), Landscape()
    MikPoly().search(one, land)
    assert {case.threads for case, _ in land.asked} == {1}
    assert {case.m for case, _ in land.asked} <= {
        t.rows for t in micro_kernels("linear", one.target)
    }
    costs = {MicroKernel(4, 1): 1.0, MicroKernel(8, 1): 1.5}
    assert polymerize(one, 8, costs).program.tile.rows == 8
    assert polymerize(one, 4, costs).program.tile.rows == 4
    assert polymerize(one, 4, {}).program == one.default(4)


def test_rules_measure_nothing():
    one, land = task(points=POINTS), Landscape()
    found = POLICIES["default"].search(one, land)
    assert not land.asked and {c.source for c in found.choices.values()} == {DEFAULT}
    assert all(found.choices[m].program == one.default(m) for m in POINTS)


@pytest.mark.parametrize("name", POLICIES)
def test_on_a_real_meter(name):
    target = host_target()
    library = build_library(tuning_library(SPEC, target))
    one = task(n=96, k=80, points=(1, 20), seconds=2.0)
    op, phase = replace(one.op, dtype=SPEC.weight_dtype), PhasePlan(threads=2, cpus=())
    one = replace(one, op=op, target=target, phase=phase, rounds=2)
    with Meter(library.path, library.index, pool_bytes=1 << 20) as meter:
        found = POLICIES[name].search(one, meter)
        programs = [(m, choice.program) for m, choice in found.choices.items()]
        for m, program in programs:
            problem = one.problem(m)
            (measured,) = meter.measure(
                problem.case, [problem.candidate(program)], rounds=2, seconds=1
            )
            assert measured.status == "ok"


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_noise_alone_does_not_displace_the_default_of_roller(spread):
    one, worse = task(points=(1, 2, 4, 8, 16, 64)), 0

    def cost(case, panels, values):
        best = panels == one.default(case.m).tile.panels and is_default(one, case, values)
        return 1e-4 if best else 1.02e-4

    for seed in range(2):
        land = Landscape(cost, noise=lognormal(spread, seed))
        for m, choice in Roller().search(one, land).choices.items():
            problem = one.problem(m)
            worse += land.seconds(problem.case, problem.candidate(choice.program)) > 1.01e-4
    assert worse <= (1 if spread > 0.1 else 0)  # of 12
