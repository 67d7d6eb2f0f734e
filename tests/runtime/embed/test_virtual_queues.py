"""The service on a virtual clock: SLOs hold under overload, nothing is left behind."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.runtime.embed.depths import ClassDepth, Depths, make_manager
from dovetail.runtime.embed.device_queue import QueryBatch, QueueSpec, length_classes
from dovetail.runtime.embed.devices import DevicePlan, EmbeddingPlan
from dovetail.runtime.embed.drift import DriftWatch
from dovetail.runtime.embed.fit_latency import profile_lines
from dovetail.runtime.embed.line import Arrival, FittedLine, Line
from dovetail.runtime.embed.queue import QueueManager
from tests.runtime.embed.arrivals import poisson_calls
from tests.runtime.embed.integrity import check_integrity
from tests.runtime.embed.virtual_queues import Burst, simulate

SLO = 1.0
ANY = length_classes([512])
NPU, CPU = Line(0.002, 0.008), Line(0.0095, 0.0095)


def manager(arrival: Arrival, npu: Line = NPU, cpu: Line = CPU) -> QueueManager:
    specs = [
        QueueSpec("npu", True, (npu.depth(SLO, arrival),), (npu,)),
        QueueSpec("cpu", False, (cpu.depth(SLO, arrival),), (cpu,)),
    ]
    return QueueManager(specs, ANY, arrival=arrival)


def truth(npu: Line = NPU, cpu: Line = CPU) -> dict[str, tuple[Line, ...]]:
    return {"npu": (npu,), "cpu": (cpu,)}


def test_a_closed_call_as_large_as_the_depths_is_in_time_and_one_more_is_busy() -> None:
    depth = NPU.depth(SLO, "closed") + CPU.depth(SLO, "closed")
    exact = simulate(manager("closed"), truth(), [Burst(0.0, (75,) * depth)], SLO)
    assert exact.accepted == depth and exact.busy == 0
    assert exact.percentile(1.0) <= SLO
    more = simulate(manager("closed"), truth(), [Burst(0.0, (75,) * (depth + 1))], SLO)
    assert more.accepted == 0 and more.busy == depth + 1


def test_under_ten_times_the_capacity_all_accepted_meet_the_slo_at_nearly_full_rate() -> None:
    capacity = sum(1 / line.alpha for line in (NPU, CPU))
    queues = manager("open")
    calls = poisson_calls(10 * capacity, 10.0, 75, seed=1)
    found = simulate(queues, truth(), calls, SLO)
    assert found.percentile(1.0) <= SLO * (1 + 1e-9)
    assert found.rate >= 0.9 * capacity
    assert found.accepted + found.busy == len(calls)
    assert len(queues._alive) == 0
    check_integrity(queues)


@settings(max_examples=25, deadline=None)
@given(
    npu=st.builds(Line, st.floats(0.005, 0.05), st.floats(0.0, 0.3)),
    slower=st.floats(2.0, 10.0),
    load=st.floats(0.2, 5.0),
    seed=st.integers(0, 1000),
)
def test_open_arrivals_never_miss_the_slo_when_the_lines_are_true(
    npu: Line, slower: float, load: float, seed: int
) -> None:
    cpu = npu.scaled(slower)
    queues = manager("open", npu, cpu)
    calls = poisson_calls(load / npu.alpha, 5.0, 75, seed)
    found = simulate(queues, truth(npu, cpu), calls, SLO)
    assert found.percentile(1.0) <= SLO * (1 + 1e-9)
    assert found.accepted + found.busy == len(calls)
    if calls and npu.seconds(1) <= SLO:
        assert found.accepted > 0
    check_integrity(queues)
    assert len(queues._alive) == 0


def test_the_cpu_raises_what_is_accepted() -> None:
    calls = poisson_calls(2000, 5.0, 75)
    both = simulate(manager("open"), truth(), calls, SLO)
    specs = [QueueSpec("npu", True, (NPU.depth(SLO, "open"),), (NPU,))]
    alone = simulate(QueueManager(specs, ANY), truth(), calls, SLO)
    gain = both.accepted / alone.accepted - 1
    assert gain == pytest.approx(NPU.alpha / CPU.alpha, rel=0.15)


def measured(truth: Mapping[str, Line], noise: float, seed: int) -> QueueManager:
    """Queues sized by profiling devices whose every run takes a little more or less."""
    draw, specs = random.Random(seed), []
    for name, line in truth.items():
        fitted = profile_lines(
            lambda counts, n=name, t=line: {
                n: t.seconds(counts[n]) * math.exp(draw.gauss(0, noise))
            },
            [name],
            SLO,
        )[name]
        depth = fitted.line.depth(SLO, "open")
        specs.append(QueueSpec(name, name == "npu", (depth,), (fitted.line,), margin=fitted.margin))
    return QueueManager(specs, ANY)


PACES: dict[str, Callable[[float], float]] = {
    "steady": lambda _: 1.0,
    "slower and slower": lambda now: 1 + 0.2 * now / 100,
    "to and fro": lambda now: 1 + 0.08 * math.sin(now / 5),
}


@pytest.mark.parametrize(
    ("noise", "pace"), [(0.05, "steady"), (0.02, "slower and slower"), (0.02, "to and fro")]
)
def test_accepted_queries_meet_the_slo_at_p99_on_devices_that_vary(noise: float, pace: str) -> None:
    """Batches vary, the machine changes, and 20 ms pass from each batch to the next."""
    lines = {"npu": Line(0.02, 0.01), "cpu": Line(0.095, 0.04)}
    calls = poisson_calls(200, 100.0, 75, seed=3)
    queues = measured(lines, noise, seed=2)
    true = {name: (line,) for name, line in lines.items()}
    found = simulate(queues, true, calls, SLO, noise=noise, pause=0.02, pace=PACES[pace], seed=1)
    assert found.percentile(0.99) <= SLO
    slower = statistics.fmean(map(PACES[pace], range(100)))
    assert found.rate >= 0.9 * sum(1 / line.alpha for line in lines.values()) / slower


class Refitted:
    """Queues of devices with these lines, which get new ones when they drift."""

    def __init__(self, lines: Mapping[str, Line]) -> None:
        kinds = {"npu": DevicePlan("npu", "cuda"), "cpu": DevicePlan("cpu", "cpu")}
        self.plan = EmbeddingPlan(tuple(kinds[name] for name in lines), True)
        classes = {n: ClassDepth(512, FittedLine(t, ()), t.depth(SLO)) for n, t in lines.items()}
        self.depths = Depths(SLO, "open", {name: (each,) for name, each in classes.items()}, True)
        self.queues, self.drift, self.fits = make_manager(self.plan, self.depths), DriftWatch(), 0

    def watch(self, batch: QueryBatch, seconds: float) -> None:
        if self.drift.observe(batch, seconds):
            self.depths, self.fits = self.drift.refit(batch.device, self.depths), self.fits + 1
            specs = self.depths.queue_specs(self.plan)
            (spec,) = (s for s in specs if s.name == batch.device)
            self.queues.set_queue(spec)


@pytest.mark.parametrize("seed", range(3))
def test_lines_that_are_fitted_anew_do_not_fill_queues_too_deep(seed: int) -> None:
    """Of a machine that is slower for some seconds and then not, each time it gets a new line."""
    lines = {"npu": Line(0.075, 0.08), "cpu": Line(0.044, 0.08)}
    kept = Refitted(lines)
    calls = poisson_calls(10 * sum(1 / line.alpha for line in lines.values()), 60.0, 75, seed)
    given = {"noise": 0.07, "pause": 0.01, "pace": lambda now: 1.2 if now % 16 < 8 else 1.6}
    true = {name: (line,) for name, line in lines.items()}
    found = simulate(kept.queues, true, calls, SLO, watch=kept.watch, seed=seed, **given)
    assert kept.fits > 4
    known = sorted(s for each in found.latencies.values() for s in each[len(each) // 10 :])
    assert known[int(0.99 * len(known))] <= 1.03 * SLO  # a pace that changes at once is felt
    check_integrity(kept.queues)


def test_a_device_that_was_too_slow_for_a_while_serves_again() -> None:
    """For some time one query alone takes longer than the limit."""
    line = Line(0.044, 0.08)
    kept = Refitted({"cpu": line})
    calls = poisson_calls(2 / line.alpha, 600.0, 75, seed=5)
    slow = {"pace": lambda now: 10.0 if 20 <= now < 120 else 1.0}
    slowest = list[tuple[int, ...]]()

    def watch(batch: QueryBatch, seconds: float) -> None:
        kept.watch(batch, seconds)
        slowest[:] = [min([*slowest, kept.queues.depths()["cpu"]])]

    found = simulate(kept.queues, {"cpu": (line,)}, calls, SLO, watch=watch, **slow)
    assert slowest == [(1,)] and kept.depths.devices["cpu"][0].line.seconds(1) < 0.2
    assert found.accepted >= 0.8 * (600 - 300) / line.alpha
    check_integrity(kept.queues)


def test_short_batches_leave_time_for_a_machine_that_stops_now_and_then() -> None:
    """Where a batch costs little beside its queries, P99 holds at hardly less throughput."""
    npu, cpu = Line(0.02, 0.002), Line(0.095, 0.004)
    calls = poisson_calls(200, 100.0, 75, seed=3)
    given = {"noise": 0.05, "pause": 0.02, "seed": 4}
    stops = {"pace": lambda now: 1.0 if now % 7 < 6.6 else 1.9}
    found = simulate(manager("open", npu, cpu), truth(npu, cpu), calls, SLO, **stops, **given)
    assert found.percentile(0.99) <= 0.95 * SLO
    steady = simulate(manager("open", npu, cpu), truth(npu, cpu), calls, SLO, **given)
    assert steady.rate >= 0.9 * (1 / npu.alpha + 1 / cpu.alpha)
