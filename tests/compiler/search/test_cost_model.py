"""The cost model ranks by roofline and traffic."""

from __future__ import annotations

from itertools import pairwise

from dovetail.compiler.rules.schedules import MicroKernel
from dovetail.compiler.search.cost_model import CostModel, estimate_work
from dovetail.compiler.search.space import WHOLE, Scheme, Slice
from tests.compiler.search.landscape import task

TASK = task(n=2048, k=2048, points=(1, 4, 16, 64))
MODEL = CostModel()


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


def test_nothing_to_predict():
    assert MODEL.predict(TASK, 4, []) == []


def test_a_block_that_stays_in_the_caches_costs_less_than_one_that_passes_by_again():
    """Of C, where K is inside; of the weight, where rows are."""

    def reads(one, m, part):
        problem = one.problem(m)
        program = one.program(m, MicroKernel(14, 2), part, Scheme(1, 2, 1))
        return {p.order: estimate_work(one, m, p).traffic[3] for p in problem.orders(program)}

    wide = reads(task(n=65536, k=1024, points=(512,)), 512, Slice(0, 8, 64))
    assert wide["mnk"] < wide["mkn"]
    tall = reads(task(n=65536, k=1024, points=(2048,)), 2048, Slice(14, 8, 0))
    assert tall["nmk"] < tall["mkn"]
