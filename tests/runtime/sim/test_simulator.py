"""The simulator: time, throughput and latencies of traces whose answers are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.model import ModelSpec
from dovetail.runtime.schedule.cost_tables import TablePredictor
from dovetail.runtime.schedule.kv_pool import KvPool
from dovetail.runtime.schedule.plan import Limits
from dovetail.runtime.schedule.request import Home
from dovetail.runtime.schedule.scheduler import Scheduler
from dovetail.runtime.sim.machines import MACHINES, assumed_profile
from dovetail.runtime.sim.simulated_step import Truth
from dovetail.runtime.sim.simulator import Arrival, Simulation, simulate
from dovetail.runtime.timeline import Timeline
from dovetail.topology.presets import preset_model
from tests.timelines import check_timeline

MACHINE = MACHINES["a10g"]
SPEC: ModelSpec = preset_model(MACHINE.model, kv_dtype="bf16")
TABLES = TablePredictor(assumed_profile(MACHINE, SPEC))


def gpu_only(blocks: int, tokens: int = 2048) -> Callable[[Callable[[], float]], Scheduler]:
    limits = Limits(tokens, 64, SPEC.max_context, SPEC.vocab_size)
    return lambda clock: Scheduler(limits, KvPool(blocks), TABLES, clock, home=Home.GPU)


def run(arrivals: list[Arrival], blocks: int = 200, timeline: Timeline | None = None) -> Simulation:
    return simulate(gpu_only(blocks), arrivals, Truth(TABLES, SPEC), timeline)


def prefill(length: int) -> float:
    return SPEC.n_layers * (TABLES.linear(length) + TABLES.prefill([length]))


def decode(stored: int) -> float:
    return SPEC.n_layers * (TABLES.linear(1) + TABLES.gpu_decode(stored))


def test_one_request_takes_its_steps_one_after_the_other() -> None:
    found = run([Arrival(5.0, 100, 3)])
    steps = prefill(100), decode(101), decode(102)
    assert found.seconds == pytest.approx(sum(steps))
    assert found.ttft.p50 == pytest.approx(steps[0])
    assert found.tpot.mean == pytest.approx((steps[1] + steps[2]) / 2)
    assert found.per_token.mean == pytest.approx(sum(steps) / 3)
    assert (found.steps, found.output_tokens, found.requests) == (3, 3, 1)
    assert found.gpu == pytest.approx(1.0)
    assert found.rate == pytest.approx(1 / sum(steps))
    assert found.cpu == found.link == found.two_batch == 0


def test_time_passes_without_work_until_the_next_arrival() -> None:
    found = run([Arrival(0.0, 100, 1), Arrival(50.0, 100, 1)])
    assert found.seconds == pytest.approx(50.0 + prefill(100))
    assert found.gpu < 0.02
    assert found.ttft.p99 == pytest.approx(prefill(100))


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    late = prefill(1000) / 2
    found = run([Arrival(0.0, 1000, 1), Arrival(late, 200, 1)])
    waited = prefill(1000) - late + prefill(200)
    assert found.ttft.mean == pytest.approx((prefill(1000) + waited) / 2)


def test_what_no_pool_holds_is_refused_and_the_others_are_served() -> None:
    found = run([Arrival(0.0, 4000, 10), Arrival(0.0, 100, 2)], blocks=64)
    assert (found.requests, found.refused) == (1, 1)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=30
    ),
    st.integers(22, 60),
)
def test_every_request_gets_all_its_tokens(
    trace: list[tuple[float, int, int]], blocks: int
) -> None:
    found = run([Arrival(*entry) for entry in trace], blocks)
    assert found.requests == len(trace)
    assert found.output_tokens == sum(output for _, _, output in trace)
    assert found.gpu <= 1 + 1e-9
    assert found.ttft.p50 <= found.ttft.p90 <= found.ttft.p99


def test_the_timeline_shows_every_step_and_request(tmp_path: Path) -> None:
    timeline = Timeline()
    found = run([Arrival(0.1 * i, 200, 10) for i in range(12)], timeline=timeline)
    timeline.write(tmp_path / "trace.json")
    facts = check_timeline(tmp_path / "trace.json")
    assert facts.seconds == pytest.approx(found.seconds, rel=1e-3)
    names = [event["name"] for event in timeline.trace()["traceEvents"]]
    assert sum(name.startswith("step ") for name in names) == found.steps
    assert names.count("decode") == 2 * found.requests  # begin and end
    assert "products of batch 0 (31)" in names


def test_nothing_to_serve_is_no_error() -> None:
    found = run([])
    assert (found.requests, found.rate, found.ttft.p50) == (0, 0.0, 0.0)
