"""Memory between KV cache and hot clusters: against trying every size, and at the edges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import SpecError
from dovetail.runtime.retrieval.memory_plan import (
    GpuMemoryPlan,
    MemoryProblem,
    Throughput,
    plan_gpu_memory,
)


def up_to(rate: float, *done_by_size: tuple[int, float]) -> Throughput:
    """Of each size so many stages at most, else those that arrive."""
    sizes, done = zip(*done_by_size, strict=True)
    return Throughput(sizes, tuple(min(rate, most) for most in done))


GENERATION = (0, 0.0), (100, 8.0), (200, 12.0), (400, 14.0)
RETRIEVAL = (0, 5.0), (100, 15.0), (300, 25.0)


def plan(generations: float, retrievals: float, rate: float, **more: int) -> GpuMemoryPlan:
    """Divide 400 bytes by the figures above."""
    problem = MemoryProblem(
        budget=400,
        generation=up_to(rate * generations, *GENERATION),
        retrieval=up_to(rate * retrievals, *RETRIEVAL),
        generations=generations,
        retrievals=retrievals,
        rate=rate,
        **more,
    )
    return plan_gpu_memory(problem, step=1)


def test_throughput_is_exact_where_given_between_neighbours_inside_and_held_outside() -> None:
    generation = up_to(40, *GENERATION)
    assert generation.at(100) == 8 and generation.at(150) == 10
    assert generation.at(10**9) == 14 and up_to(1, *RETRIEVAL).at(-5) == 1


def test_both_sides_are_balanced_by_the_stages_of_a_workflow() -> None:
    even = plan(1, 1, 40)
    assert even.kv_bytes == 318 and even.workflows > 13
    assert abs(even.generation - even.retrieval) < 1.5
    many = plan(1, 4, 10)
    assert many.cluster_bytes > even.cluster_bytes and many.limited_by == "retrieval"
    alone = plan(1, 0, 40)
    assert alone.kv_bytes == 400 and alone.limited_by == "generation"


def test_light_loads_leave_memory_to_the_kv_cache() -> None:
    light = plan(1, 1, 1)
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
    generated = [(i * 130, sum(gains[: i + 1])) for i in range(4)]
    retrieved = [(i * 120, 1 + sum(helps[: i + 1])) for i in range(3)]
    generation = up_to(rate * stages[0], *generated)
    retrieval, budget = up_to(rate * stages[1], *retrieved), 400
    problem = MemoryProblem(
        budget=budget,
        generation=generation,
        retrieval=retrieval,
        generations=stages[0],
        retrievals=stages[1],
        rate=rate,
        least_kv=least,
        most_clusters=most,
    )
    plan = plan_gpu_memory(problem, step=1)
    assert plan.kv_bytes + plan.cluster_bytes == budget
    assert plan.kv_bytes >= least and plan.cluster_bytes <= most
    for kv in range(max(least, budget - most), budget + 1):
        sides = (
            generation.at(kv) / stages[0],
            retrieval.at(budget - kv) / stages[1],
        )
        assert min(sides) <= plan.workflows + 1e-9


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot hold"):
        plan(1, 1, 1, least_kv=401)
    with pytest.raises(SpecError, match="cannot be negative"):
        plan(-1, 1, 1)
