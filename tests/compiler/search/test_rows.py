"""Rows cover every M: measured ones, the rules between and beyond; losses against the optimum."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compiler.rules.schedules import default_gemm_rows
from dovetail.compiler.search.policy import DEFAULT, MEASURED, Choice
from dovetail.compiler.search.rows import find_alone, make_rows, measure_losses
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.compiler.search.space import WHOLE, Program, Scheme, Slice
from dovetail.ir.schedule import SCHEDULE_VALUES
from tests.compiler.search.landscape import Landscape, bowl, task

POINTS = (1, 2, 4, 8, 16, 32, 64, 128)
TASK = task(points=POINTS)
RULES = default_gemm_rows(TASK.op, TASK.target, 2, TASK.hardware)


def serving(rows, m):
    return [row for row in rows if row.m_lo <= m][-1]


def some(m, source=MEASURED):
    tile = TASK.problem(m).tiles()[0]
    return Choice(Program(tile, WHOLE, Scheme(1, 2, 1), 0), source, 1.0)


@settings(max_examples=25)
@given(measured=st.sets(st.sampled_from(POINTS)))
def test_choices_serve_up_to_their_point_and_rules_the_rest(measured):
    choices = {m: some(m) if m in measured else Choice(TASK.default(m), DEFAULT) for m in POINTS}
    rows = make_rows(TASK, choices)
    bounds = [row.m_lo for row in rows]
    assert bounds[0] == 1 and bounds == sorted(set(bounds))
    for m in range(1, 200):
        point = next((p for p in POINTS if p >= m), POINTS[-1])
        row = serving(rows, m)
        if point in measured:
            assert row.schedule == TASK.problem(point).candidate(choices[point].program).schedule
            assert row.source == MEASURED
        else:
            rule = serving(RULES, m)
            assert (row.kernel, row.schedule) == (rule.kernel, rule.schedule)


def test_a_default_that_was_measured_leaves_the_other_M_to_the_rules():
    found = {m: Choice(TASK.default(m), MEASURED, 1.0) for m in (1, 64)}
    rows = make_rows(TASK, found)
    assert [(row.m_lo, row.kernel, row.schedule) for row in rows] == [
        (row.m_lo, row.kernel, row.schedule) for row in RULES
    ]
    assert (serving(rows, 64).source, serving(rows, 10).source) == (MEASURED, DEFAULT)


@pytest.mark.parametrize("good_at", [(8,), (5, 6, 7, 8)])
def test_a_choice_that_loses_where_it_would_serve_first_serves_its_point_alone(good_at):
    """The program of M = 8 is searched at 8; whether it is good at 5 is another question."""
    best = TASK.problem(8).tiles()[0]

    def cost(case, panels, values):
        mine = (values["m_tile"], panels) == (best.rows, best.panels)
        return 1e-4 * ((0.5 if case.m in good_at else 1.5) if mine else 1)

    land = Landscape(cost)
    choices = {m: Choice(TASK.default(m), MEASURED) for m in POINTS} | {8: some(8)}
    alone = find_alone(TASK, land, choices)
    assert alone == (frozenset() if 5 in good_at else {8})
    assert {case.m for case, _ in land.asked} == {5}
    rows = make_rows(TASK, choices, alone=alone)
    program = TASK.problem(8).candidate(choices[8].program)
    served = [m for m in range(1, 200) if serving(rows, m).schedule == program.schedule]
    assert served == ([5, 6, 7, 8] if 5 in good_at else [8])
    assert find_alone(TASK, land, choices, seconds=0.0) == {8}


def test_beyond_a_single_row_tile_the_rules_answer():
    rows = make_rows(TASK, {m: some(m) for m in (1, 8)})
    assert serving(rows, 8).source == MEASURED and serving(rows, 9).source == DEFAULT
    assert serving(make_rows(TASK, {64: some(64)}), 5000).source == MEASURED


def test_split_k_rows_name_what_adds_up_their_parts():
    split = Choice(Program(TASK.problem(8).tiles()[0], WHOLE, Scheme(1, 1, 2), 0), MEASURED, 1.0)
    rows = make_rows(TASK, {8: split}, {8: 0.02})
    assert rows[0].reduce_kernel == "gemm_linear_reduce_f32" and rows[0].measured_loss == 0.02


def test_equal_rows_are_one_with_the_largest_loss():
    same = some(64)
    rows = make_rows(TASK, {32: same, 64: same, 128: same}, {32: 0.01, 128: 0.03})
    assert [(row.m_lo, row.measured_loss) for row in rows] == [(1, 0.03)]


def test_losses_are_those_of_the_landscape():
    land = Landscape()
    found = Sandwich().search(TASK, land).choices
    assert max(measure_losses(TASK, land, found, (8, 64)).values()) <= 0.03
    whole = {m: Choice(TASK.default(m), DEFAULT) for m in POINTS}
    worse = measure_losses(TASK, land, whole, (8, 64))
    for m, loss in worse.items():
        case, default = TASK.problem(m).case, TASK.problem(m).candidate(whole[m].program)
        here = land.seconds(case, default)
        best = min(
            bowl(case, t.panels, dict(zip(SCHEDULE_VALUES, candidate.schedule, strict=True)))
            for t in TASK.problem(m).tiles()
            for scheme in TASK.problem(m).schemes()
            for part in (Slice(0, 1, 0), TASK.default(m).slice)
            for candidate in [TASK.problem(m).candidate(TASK.program(m, t, part, scheme))]
        )
        assert abs(loss - (here / best - 1)) < 1e-9
    assert not measure_losses(TASK, land, whole, (8,), seconds=0.0)
