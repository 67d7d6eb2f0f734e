"""The cost model ranks by roofline and traffic."""

from __future__ import annotations

from itertools import pairwise

from dovetail.compiler.schedules import MicroKernel
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.space import WHOLE, Scheme
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
