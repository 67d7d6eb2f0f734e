"""Tables of a whole model: total cover, one budget, equal products once; once on a real meter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.codegen.library import build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.meter import Meter
from dovetail.compiler.rules.payload import Payload, make_payload
from dovetail.compiler.rules.schedules import gemm_ops
from dovetail.compiler.rules.tables import default_tables
from dovetail.compiler.rules.workload import DEFAULT_WORKLOAD
from dovetail.compiler.search.policy import DEFAULT, MEASURED, Choice, SearchResult
from dovetail.compiler.search.space import WHOLE
from dovetail.compiler.search.tables import (
    EFFORTS,
    heaviest_points,
    search_points,
    search_tables,
    search_tasks,
    tuning_library,
)
from dovetail.topology.hardware import read_hardware
from tests.compiler.rules.test_tables import SPEC, plan
from tests.compiler.search.landscape import TARGET, Landscape, panels_of, task

PAYLOAD = make_payload(SPEC, DEFAULT_WORKLOAD, 64, 8)


def searched(land, target=TARGET, **options):
    options = {"plans": [plan(2, 2)], "hardware": read_hardware(), "measurer": land, **options}
    return search_tables(SPEC, options.pop("payload", PAYLOAD), target=target, **options)


def test_points_reach_the_first_that_serves_the_largest_m():
    assert search_points(512, EFFORTS["fast"].points)[-1] == 512
    assert search_points(65, EFFORTS["fast"].points)[-2:] == (64, 96)
    assert search_points(1, EFFORTS["fast"].points) == (1,)


def test_decode_steps_have_one_row_per_sequence():
    tasks = search_tasks(PAYLOAD, [plan(4, 2)], read_hardware(), TARGET, EFFORTS["fast"])
    largest = {(name, one.op.op): one.points[-1] for name, one in tasks}
    assert largest["prefill", "qkv"] == 64 and largest["decode", "qkv"] == 8
    assert largest["prefill", "head"] == largest["decode", "head"] == 8


@pytest.mark.parametrize("budget", [0.0, 0.3, 2.0])
def test_every_m_is_covered_whatever_the_budget(budget):
    land = Landscape()
    tables = searched(land, budget_seconds=budget, plans=[plan(2, 1)])
    assert land.clock <= 2 * budget + 0.1
    for table in tables:
        bounds = [row.m_lo for row in table.rows]
        assert bounds[0] == 1 and bounds == sorted(set(bounds))
    sources = {row.source for table in tables for row in table.rows if table.n}
    assert (MEASURED in sources) == (budget > 0)
    if budget == 0:
        rules = default_tables(SPEC, TARGET, [plan(2, 1)], read_hardware())
        assert sorted(tables, key=repr) == sorted(rules, key=repr)


def test_equal_products_are_searched_once():
    land = Landscape()
    seen = []
    tables = searched(land, progress=lambda *progress: seen.append(progress))
    shapes = {(case.n, case.k, case.kind) for case, _ in land.asked}
    assert shapes == {(op.n, op.k, op.kind) for op in gemm_ops(SPEC)}
    assert seen == [(done, 5) for done in range(5)]
    count = len(land.asked)
    again = Landscape()
    use = PAYLOAD.uses[0]
    twice = Payload((use, replace(use, gemm=replace(use.gemm, op="other"))))
    tables = searched(again, payload=twice)
    one = Landscape()
    searched(one, payload=Payload((use,)))
    assert len(again.asked) == len(one.asked) < count
    assert tables[0].rows == tables[1].rows and tables[1].op == "other"


class Scripted:
    """A policy whose choices are known; it uses up its seconds, and notes them by columns."""

    def __init__(self, choose=lambda task, m: Choice(task.default(m), DEFAULT)):
        self.choose, self.seconds = choose, {}

    def search(self, task, measurer):
        measurer.clock += task.seconds
        self.seconds[task.op.n] = task.seconds
        return SearchResult({m: self.choose(task, m) for m in task.points}, 0, task.seconds)


def test_larger_products_get_more_of_the_budget_but_not_in_proportion():
    policy, use = Scripted(), PAYLOAD.uses[0]
    uses = tuple(replace(use, gemm=replace(use.gemm, n=n)) for n in (64, 6400))
    searched(
        Landscape(), payload=Payload(uses), budget_seconds=100.0, choose_policy=lambda _: policy
    )
    small, large = policy.seconds[64], policy.seconds[6400]
    assert 2 * small < large < 50 * small
    assert large == pytest.approx((1 - EFFORTS["fast"].loss_share) * (100.0 - small))


def test_a_kernel_that_the_workload_hardly_needs_does_not_serve():
    """One panel is a little faster than the rules at all M but 8, where all the work is."""

    def choose(task, m):
        panels, default = 2 if m == 8 else 1, task.default(m)
        tile = next(tile for tile in task.problem(m).tiles() if tile.panels == panels)
        best = task.program(m, tile, WHOLE, default.scheme)
        by_panels = {panels: (best, 0.9), default.tile.panels: (default, 1.0)}
        return Choice(best, MEASURED, 0.9, by_panels)

    use = replace(PAYLOAD.uses[-1], sizes={8: 1.0})
    table = searched(
        Landscape(lambda *_: 0.1),
        payload=Payload((use,)),
        choose_policy=lambda _: Scripted(choose),
    )[0]
    used = {panels_of(row) for row in table.rows}
    assert table.op == "head" and 2 in used and 1 not in used


def test_sample_points_carry_their_loss():
    tables = searched(Landscape(), effort="fast")
    losses = [row.measured_loss for t in tables for row in t.rows if row.measured_loss is not None]
    assert losses and all(0 <= loss <= 0.05 for loss in losses)


def test_the_heaviest_points_are_those_with_most_rows():
    choices = {m: Choice(task().default(m), MEASURED) for m in (1, 8, 64)}
    choices[128] = Choice(task().default(128), DEFAULT)
    sizes = {1: 0.9, 5: 0.01, 50: 0.09, 128: 0.5}
    assert heaviest_points(choices, sizes, 1) == (64,)
    assert heaviest_points(choices, sizes, 2) == (1, 64)


def test_search_on_a_tiny_model():
    target, hardware = host_target(), read_hardware()
    library = build_library(tuning_library(SPEC, target))
    with Meter(library.path, library.index, pool_bytes=1 << 24) as meter:
        tables = searched(meter, target, plans=[plan(2, 1)], hardware=hardware, budget_seconds=3.0)
    gemm = [t for t in tables if t.n]
    assert {(t.op, t.phase) for t in gemm} == {
        (op.op, phase) for op in gemm_ops(SPEC) for phase in ("prefill", "decode")
    }
    assert any(row.source == MEASURED for t in gemm for row in t.rows)
    names = {kernel.name for kernel in library.index.kernels}
    assert {row.kernel for t in gemm for row in t.rows} <= names
