"""Memory between KV cache and hot clusters: against trying every size, and at the edges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import SpecError
from dovetail.runtime.retrieval.memory_plan import (
    Demand,
    GpuMemoryPlan,
    MemoryProblem,
    ThroughputRow,
    ThroughputTable,
    plan_gpu_memory,
)

RATES = (1.0, 10.0, 40.0)


def table(*done_by_size: tuple[int, float]) -> ThroughputTable:
    """Of each size so many stages at most, else those that arrive."""
    return ThroughputTable(
        ThroughputRow(size, rate, min(rate, most)) for size, most in done_by_size for rate in RATES
    )


GENERATION = table((0, 0.0), (100, 8.0), (200, 12.0), (400, 14.0))
RETRIEVAL = table((0, 5.0), (100, 15.0), (300, 25.0))


def plan(demand: Demand, rate: float, **more: int) -> GpuMemoryPlan:
    """Divide 400 bytes by the tables above."""
    problem = MemoryProblem(
        budget=400, generation=GENERATION, retrieval=RETRIEVAL, demand=demand, rate=rate, **more
    )
    return plan_gpu_memory(problem, step=1)


def test_tables_are_exact_at_rows_between_neighbours_inside_and_held_outside() -> None:
    assert GENERATION.done(100, 40) == 8 and GENERATION.done(150, 40) == 10
    assert GENERATION.done(100, 5.5) == pytest.approx((1 + 8) / 2)
    assert GENERATION.done(10**9, 10**9) == 14 and RETRIEVAL.done(-5, 0.1) == 1


def test_both_sides_are_balanced_by_the_stages_of_a_workflow() -> None:
    even = plan(Demand(1, 1), 40)
    assert even.kv_bytes == 318 and even.workflows > 13
    assert abs(even.generation - even.retrieval) < 1.5
    many = plan(Demand(1, 4), 10)
    assert many.cluster_bytes > even.cluster_bytes and many.limited_by == "retrieval"
    alone = plan(Demand(1, 0), 40)
    assert alone.kv_bytes == 400 and alone.limited_by == "generation"


def test_light_loads_leave_memory_to_the_kv_cache() -> None:
    light = plan(Demand(1, 1), 1)
    assert light.workflows == pytest.approx(1) and light.kv_bytes == 400


@settings(max_examples=60)
@given(
    gains=st.lists(st.floats(0, 9), min_size=4, max_size=4),
    helps=st.lists(st.floats(0, 9), min_size=3, max_size=3),
    stages=st.tuples(st.floats(0.3, 3), st.floats(0.3, 5)),
    rate=st.floats(0.5, 50),
    least=st.integers(0, 300),
    most=st.integers(0, 600),
)
def test_no_other_size_is_better(
    gains: list[float],
    helps: list[float],
    stages: tuple[float, float],
    rate: float,
    least: int,
    most: int,
) -> None:
    generation = table(*((i * 130, sum(gains[: i + 1])) for i in range(4)))
    retrieval = table(*((i * 120, 1 + sum(helps[: i + 1])) for i in range(3)))
    demand, budget = Demand(*stages), 400
    problem = MemoryProblem(
        budget=budget,
        generation=generation,
        retrieval=retrieval,
        demand=demand,
        rate=rate,
        least_kv=least,
        most_clusters=most,
    )
    plan = plan_gpu_memory(problem, step=1)
    assert plan.kv_bytes + plan.cluster_bytes == budget
    assert plan.kv_bytes >= least and plan.cluster_bytes <= most
    for kv in range(max(least, budget - most), budget + 1):
        sides = (
            generation.done(kv, stages[0] * rate) / stages[0],
            retrieval.done(budget - kv, stages[1] * rate) / stages[1],
        )
        assert min(sides) <= plan.workflows + 1e-9


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [ThroughputRow(1, 1, 1), ThroughputRow(2, 2, 1)],
        [ThroughputRow(1, 1, 1), ThroughputRow(1, 1, 2)],
        [ThroughputRow(-1, 1, 1)],
        [ThroughputRow(1, 0, 1)],
    ],
)
def test_tables_with_holes_are_refused(rows: list[ThroughputRow]) -> None:
    with pytest.raises(SpecError):
        ThroughputTable(rows)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot hold"):
        plan(Demand(1, 1), 1, least_kv=401)
    with pytest.raises(SpecError, match="fewer than no"):
        plan(Demand(-1, 1), 1)
