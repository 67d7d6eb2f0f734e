"""The cost model ranks by roofline and traffic; timed programs correct it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dovetail.compiler.schedules import MicroKernel
from dovetail.compiler.search.cost_model import LEAST_SAMPLES, CostModel, fit_cost_model
from dovetail.compiler.search.policy import DEFAULT, PREDICTED, Sample
from dovetail.compiler.search.rules import Rules
from dovetail.compiler.search.space import WHOLE, Scheme, Slice
from tests.compiler.search.landscape import Landscape, task

TASK = task(n=2048, k=2048, points=(1, 4, 16, 64))
MODEL = CostModel()


def programs(m):
    problem = TASK.problem(m)
    return [
        TASK.program(m, tile, part, scheme)
        for tile in problem.tiles()
        for scheme in problem.schemes()
        for part in (WHOLE, Slice(0, 1, 256))
    ]


def samples(points=(1, 4, 16, 64)):
    land = Landscape()
    return [
        Sample(TASK, m, p, land.seconds(TASK.problem(m).case, TASK.problem(m).candidate(p)))
        for m in points
        for p in programs(m)
    ]


def test_more_work_takes_longer():
    tile, scheme = MicroKernel(4, 4), Scheme(1, 2, 1)
    seconds = [MODEL.seconds(TASK, m, TASK.program(m, tile, WHOLE, scheme)) for m in (1, 8, 64)]
    assert all(a < b for a, b in pairwise(seconds))


def test_idle_threads_and_small_tiles_cost():
    m = 64
    good = TASK.program(m, MicroKernel(8, 3), WHOLE, Scheme(1, 2, 1))
    idle = TASK.program(m, MicroKernel(8, 3), WHOLE, Scheme(1, 1, 1))
    flat = TASK.program(m, MicroKernel(1, 1), WHOLE, Scheme(1, 2, 1))
    assert MODEL.best(TASK, m, (idle, flat, good), 1) == [good]


def test_timed_programs_correct_the_ranking():
    known = samples((4, 64))
    fitted = fit_cost_model(known[::2])
    asked = [sample for sample in known[1::2] if sample.m == 64]
    wanted = np.log([s.seconds for s in asked])

    def error(model):
        got = np.log(model.predict(TASK, 64, [s.program for s in asked]))
        return np.std(got - wanted)

    assert error(fitted) < error(MODEL) / 2


def test_few_samples_fit_nothing():
    assert fit_cost_model(samples()[: LEAST_SAMPLES - 1]).correction is None
    assert MODEL.predict(TASK, 4, []) == []


def test_records_of_a_like_machine_serve_the_default_policy():
    assert Rules().search(TASK).choices[4].source == DEFAULT
    choices = Rules(fit_cost_model(samples())).search(TASK).choices
    assert {choice.source for choice in choices.values()} == {PREDICTED}
    land = Landscape()

    def cost(m, program):
        return land.seconds(TASK.problem(m).case, TASK.problem(m).candidate(program))

    assert sum(cost(m, c.program) for m, c in choices.items()) < sum(
        cost(m, TASK.default(m)) for m in choices
    )
