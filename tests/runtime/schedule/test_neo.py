"""Two devices under one scheduler: both inequalities, bounded waits, no offload without gain."""

from __future__ import annotations

import itertools
import random

import pytest

from dovetail.ir.errors import CapacityError, SpecError
from dovetail.runtime.schedule import neo
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.neo import NeoScheduler
from dovetail.runtime.schedule.offload import Demand, OffloadDecision, weigh_offload
from dovetail.runtime.schedule.pipeline import LayerTimes, Pipeline
from dovetail.runtime.schedule.plan import Limits, SchedulerSettings, StepPlan
from dovetail.runtime.schedule.request import Home, Request, SamplingParams
from dovetail.runtime.schedule.scheduler import Scheduler
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.two_pools import (
    H200,
    T4,
    Memory,
    Noise,
    PlannedClock,
    Roofline,
    check_hidden,
    check_plan,
    make,
    report,
    submit,
)

MOST_KNOWN = 64
"""Steps that are remembered, at most."""


def pipeline_of(
    scheduler: NeoScheduler,
    plan: StepPlan,
    *,
    cpu: bool = True,
    late: float = 0.0,
    pace: float = 1.0,
) -> Pipeline:
    """Return the stages of a plan, with or without its CPU decodes."""
    requests, first = scheduler.requests, plan.batches[0]
    gpu = [len(requests[i].tokens) for i in first.gpu_decode]
    pipeline = Pipeline(LayerTimes(scheduler.predictor, late, pace), first.prefill, gpu)
    for index, batch in enumerate(plan.batches if cpu else ()):
        stored = sum(len(requests[i].tokens) for i in batch.cpu_decode)
        pipeline.add(index, stored, len(batch.cpu_decode))
    return pipeline


@pytest.mark.parametrize("seed", range(4))
def test_both_inequalities_and_the_greedy_choice_on_random_queues_and_times(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pays = OffloadDecision(2.0, 80, 2.0)  # as with a long queue: not all start at once
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: pays)
    rng = random.Random(seed)
    plans = hidden = beyond = 0
    for round_ in range(6):
        predictor = rng.choice([Noise(round_), T4, Roofline(cpu_bytes=rng.choice([2e9, 2e10]))])
        sizes = {"gpu": rng.choice([20, 54, 200]), "tokens": rng.choice([300, 832])}
        scheduler = make(**sizes, predictor=predictor, sequences=64)
        for _ in range(80):
            submit(scheduler, rng.randint(5, 250), rng.randint(5, 60))
        for _ in range(40):
            plan = scheduler.plan()
            late = [r for r in scheduler.running[Home.CPU] if scheduler.overdue(r)]
            check_plan(scheduler, plan)
            check_hidden(scheduler, plan)
            if not late:
                chosen = pipeline_of(scheduler, plan).rate
                assert chosen >= pipeline_of(scheduler, plan, cpu=False).rate * (1 - 1e-9)
            plans += 1
            hidden += bool(not plan.forced and any(b.cpu_decode for b in plan.batches))
            beyond += bool(plan.forced)
            report(scheduler, plan)
    assert hidden > plans / 20 and beyond  # both kinds have been seen


def serve(scheduler: NeoScheduler, steps: int = 100_000) -> tuple[float, list[StepPlan]]:
    """Run to the end on a clock of predicted seconds; return the time and the plans."""
    plans: list[StepPlan] = []
    while scheduler.busy:
        plans.append(scheduler.plan())
        check_plan(scheduler, plans[-1])
        report(scheduler, plans[-1])
        assert len(plans) < steps
    check_integrity(scheduler)
    return sum(plan.predicted_seconds for plan in plans), plans


def load_up(scheduler: NeoScheduler, count: int, prompt: int, answer: int) -> None:
    rng = random.Random(1)
    for _ in range(count):
        length = rng.randint(prompt * 9 // 10, prompt * 11 // 10)
        tokens = [rng.randrange(1000) for _ in range(length)]
        scheduler.submit(tokens, SamplingParams(max_tokens=answer + rng.randint(-4, 4)))


def test_where_offload_does_not_pay_the_plans_are_those_without_it() -> None:
    slow = Roofline(T4.weights, T4.kv, T4.gpu_bytes, T4.gpu_flops, T4.cpu_bytes / 1000)
    found = {}
    for offload in ("auto", "off"):
        scheduler = make(predictor=slow, offload=offload)
        load_up(scheduler, 20, 330, 45)
        found[offload] = serve(scheduler)[1]
        assert scheduler.decision.cpu_requests == 0
    assert found["auto"] == found["off"]


def test_a_small_accelerator_is_several_times_faster_with_the_cpu() -> None:
    seconds = {}
    for offload in ("auto", "off", "full"):
        scheduler = make(predictor=T4, offload=offload)
        load_up(scheduler, 100, 330, 45)
        seconds[offload], plans = serve(scheduler)
        shared = sum(any(b.cpu_decode for b in plan.batches) for plan in plans) / len(plans)
        assert offload == "full" or (shared > 0.9 if offload == "auto" else shared == 0)
    assert seconds["off"] > 4 * seconds["auto"] and seconds["full"] >= seconds["auto"]


@pytest.mark.parametrize("blocks", [100, 200, 1650])
def test_a_large_accelerator_is_never_slower_with_the_cpu(blocks: int) -> None:
    seconds = {}
    for offload in ("auto", "off", "full"):
        scheduler = make(blocks, 8000, H200, tokens=20480, offload=offload)
        load_up(scheduler, 60, 1000, 40)
        seconds[offload] = serve(scheduler)[0]
    assert (
        seconds["auto"] <= seconds["off"] * 1.0001 and seconds["auto"] <= seconds["full"] * 1.0001
    )


@pytest.mark.parametrize("late", [0.0, 1e-4])
def test_what_steps_take_beyond_the_tables_is_learnt_and_weighed(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    def follow(demand: Demand, limits: Limits, times: LayerTimes, least: float) -> OffloadDecision:
        told.append(times.late)
        found = weigh_offload(demand, limits, times, least)
        sooner = weigh_offload(demand, limits, LayerTimes(times.predictor), least)
        assert (found.gain < sooner.gain) == (times.late > 0.0)
        return found

    monkeypatch.setattr(neo, "weigh_offload", follow)
    scheduler = make(100, 8000, H200, tokens=20480)
    load_up(scheduler, 300, 1000, 40)
    for _ in range(120):
        plan = scheduler.plan()
        seconds = pipeline_of(scheduler, plan, late=late).layer_seconds * 32
        assert isinstance(scheduler.clock, PlannedClock)
        scheduler.clock.seconds += max(0.0, seconds - plan.predicted_seconds)
        report(scheduler, plan)
    assert max(told) == pytest.approx(late, rel=0.1, abs=1e-9)


@pytest.mark.parametrize("told", [False, True])
def test_attention_that_is_slower_than_its_table_is_hidden_once_it_has_been_seen(
    told: bool,
) -> None:
    scheduler = make(100, 8000, H200, tokens=20480)
    load_up(scheduler, 300, 1000, 40)
    hidden = []
    for _ in range(120):
        plan = scheduler.plan()
        truth = pipeline_of(scheduler, plan, pace=1.3)
        if any(b.cpu_decode for b in plan.batches) and not plan.forced:
            hidden.append(truth.hidden)
        if told:
            scheduler.note_attention(1.3 * truth.attention)
        report(scheduler, plan)
    assert scheduler.pace.factor == pytest.approx(1.3 if told else 1.0)
    assert len(hidden) > 30 and all(hidden) == told


def learn_slowness(scheduler: NeoScheduler, teacher: str) -> None:
    """Have a scheduler believe that the CPU is far too slow, from as many steps as it remembers."""
    for _ in range(MOST_KNOWN):
        if teacher == "pace":
            scheduler.pace.learn(1e-3, 1.0)
        else:
            scheduler.lateness.learn(((1.0, 1.0),), 3.0)


@pytest.mark.parametrize("teacher", ["pace", "lateness"])
def test_the_cpu_is_tried_again_after_it_was_found_too_slow(teacher: str) -> None:
    scheduler = make(predictor=T4, weigh_every=1)
    learn_slowness(scheduler, teacher)
    load_up(scheduler, 100, 330, 45)
    paid = []
    for _ in range(2 * MOST_KNOWN):
        report(scheduler, scheduler.plan())
        paid.append(scheduler.pays)
    assert not paid[0] and paid[-1]
    assert scheduler.pace.factor == 1.0 and scheduler.lateness.seconds == 0.0


@pytest.mark.parametrize(
    ("doubted", "asked", "gains", "paid"),
    [
        (False, 1.05, (1.01, 1.03, 1.01, 0.99), [False, True, True, False]),
        (True, 1.05, (1.03, 1.06, 1.01, 0.99), [False, True, True, False]),
        (True, 1.02, (1.01, 1.03, 1.01, 0.99), [False, True, True, False]),
        (True, 1.50, (1.06, 1.49, 1.51, 1.01), [False, False, True, True]),
    ],
)
def test_a_doubted_gain_begins_at_the_whole_margin_and_what_is_begun_goes_on(
    doubted: bool,
    asked: float,
    gains: tuple[float, ...],
    paid: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = iter([OffloadDecision(gain, 9, gain, True, doubted=doubted) for gain in gains])
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: next(verdicts))
    scheduler = make(predictor=T4, weigh_every=1, min_gain=asked)
    load_up(scheduler, 60, 330, 45)
    found = []
    for _ in gains:
        report(scheduler, scheduler.plan())
        found.append(scheduler.pays)
        submit(scheduler, 330, 45)  # what runs at once is weighed anew when others come
    assert found == paid


def test_starting_the_cpu_costs_something_until_steps_or_tables_tell() -> None:
    silent = Roofline(H200.weights, H200.kv, H200.gpu_bytes, H200.gpu_flops, start=0.0)
    unknown = make(100, 8000, silent, tokens=20480)
    assert unknown.lateness.seconds == unknown.settings.first_lateness > 0
    assert make(100, 8000, H200).lateness.seconds == 0.0  # its tables have it
    load_up(unknown, 100, 1000, 40)
    serve(unknown)
    assert unknown.lateness.seconds == 0.0


def test_steps_are_weighed_with_what_the_cpu_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    pays = OffloadDecision(2.0, 1000, 2.0)
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: pays)
    silent = Roofline(H200.weights, H200.kv, H200.gpu_bytes, H200.gpu_flops, start=0.0)
    scheduler = make(100, 8000, silent, tokens=20480, first_lateness=1e-3)
    load_up(scheduler, 60, 1000, 40)
    with_cpu = 0
    for _ in range(120):
        plan, late = scheduler.plan(), scheduler.lateness.seconds
        if late and not any(scheduler.overdue(r) for r in scheduler.running[Home.CPU]):
            alone = pipeline_of(scheduler, plan, cpu=False)
            chosen = pipeline_of(scheduler, plan, late=late)
            assert chosen.rate >= alone.rate * (1 - 1e-9)
            with_cpu += any(chosen.sequences)
        report(scheduler, plan)
    assert with_cpu


def test_a_step_that_failed_teaches_nothing() -> None:
    scheduler = make(100, 8000, H200, tokens=20480, offload="full")
    load_up(scheduler, 60, 1000, 40)
    for step in range(120):
        plan = scheduler.plan()
        if step % 2:
            report(scheduler, plan)
        else:  # nothing is reported, and much time passes
            assert isinstance(scheduler.clock, PlannedClock)
            scheduler.clock.seconds += 100.0
    assert scheduler.lateness.seconds == 0.0


def test_a_request_larger_than_the_gpu_runs_on_the_cpu() -> None:
    scheduler = make(gpu=4, cpu=20, predictor=Roofline(cpu_bytes=1e3))
    (large,) = submit(scheduler, 100, 30)
    (grows,) = submit(scheduler, 60, 30)  # 6 blocks in the end
    small = [submit(scheduler, 20, 30)[0] for _ in range(6)]
    serve(scheduler)
    assert all(r.finish_reason == "length" for r in (large, grows, *small))
    with pytest.raises(CapacityError, match="336 tokens of KV, the pool holds 320") as refused:
        submit(scheduler, 300, 30)
    assert refused.value.retry_after is None  # waiting does not help


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    now = [0.0]
    limits = Limits(64, 2, 500, 1000)
    options = SchedulerSettings(offload="off", max_waiting=1)
    scheduler = Scheduler(limits, KvPool(20), Predictor(), lambda: now[0], settings=options)
    for _ in range(2):
        submit(scheduler, 10, 21)
        for _ in range(4):
            report(scheduler, scheduler.plan())
            now[0] += 0.5
    submit(scheduler, 10, 21)
    with pytest.raises(CapacityError, match="1 requests are waiting") as refused:
        submit(scheduler, 10, 21)
    assert refused.value.retry_after == pytest.approx(0.5 * 13)  # steps that the first one lacks
    scheduler.finish(scheduler.requests[0], "abort")
    report(scheduler, scheduler.plan())
    assert submit(scheduler, 10, 21)


def test_who_is_refused_comes_back_when_half_of_a_long_queue_has_gone() -> None:
    now = [0.0]
    limits = Limits(64, 2, 500, 1000)
    options = SchedulerSettings(offload="off", max_waiting=12)
    scheduler = Scheduler(limits, KvPool(90), Predictor(), lambda: now[0], settings=options)
    for length in (4, 4, 5, 5):  # steps of half a second; the first two run
        submit(scheduler, 10, length)
    while scheduler.busy:
        report(scheduler, scheduler.plan())
        now[0] += 0.5
    for _ in range(2):
        submit(scheduler, 10, 5)
    report(scheduler, scheduler.plan())
    for _ in range(12):
        submit(scheduler, 10, 5)
    with pytest.raises(CapacityError) as refused:
        submit(scheduler, 10, 5)
    assert scheduler.answer_tokens is not None
    turns = 12 / 2 / 2  # of two at a time, each as long as answers were of late
    wanted = 0.5 * turns * scheduler.answer_tokens
    assert refused.value.retry_after == pytest.approx(wanted) and wanted > 0.5 * 5


def test_where_nothing_runs_a_step_of_those_who_wait_will() -> None:
    now = [0.0]
    limits = Limits(64, 4, 500, 1000)
    options = SchedulerSettings(offload="off", max_waiting=12)
    scheduler = Scheduler(limits, KvPool(90), Predictor(), lambda: now[0], settings=options)
    for _ in range(4):
        submit(scheduler, 10, 5)
    for _ in range(3):  # steps of half a second
        report(scheduler, scheduler.plan())
        now[0] += 0.5
    for request in list(scheduler.requests.values()):
        scheduler.finish(request, "length")
    for _ in range(12):
        submit(scheduler, 10, 5)
    assert not any(scheduler.running.values()) and scheduler.answer_tokens == 3
    turns = 12 / 2 / 4
    assert scheduler.estimate_wait() == pytest.approx(0.5 * turns * 3)


def test_priority_overtakes_a_bounded_number() -> None:
    scheduler = make(sequences=1, tokens=64, priority_span=3, offload="off")
    first = [submit(scheduler, 10, 2)[0] for _ in range(5)]
    urgent = submit(scheduler, 10, 2, priority=-1)[0]
    order = [c.request for p in serve(scheduler)[1] for b in p.batches for c in b.prefill]
    assert order == [*(r.id for r in first[:3]), urgent.id, *(r.id for r in first[3:])]


def test_a_slow_cpu_request_waits_no_longer_than_it_may() -> None:
    scheduler = make(gpu=40, cpu=60, predictor=Roofline(cpu_bytes=1e3), patience=5)
    (large,) = submit(scheduler, 700, 30)
    for _ in range(30):
        submit(scheduler, 60, 40)
    gaps, last = [], 0
    for index in itertools.count():
        if not scheduler.busy:
            break
        plan = scheduler.plan()
        if any(large.id in batch.cpu_decode for batch in plan.batches):
            assert large.id in plan.forced
            gaps.append(index - last)
            last = index
        report(scheduler, plan)
    assert len(gaps) == 29 and max(gaps[1:]) == 6


def test_a_burst_that_has_waited_long_is_still_started_in_order_and_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pays = OffloadDecision(2.0, 1000, 2.0)
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: pays)
    scheduler = make(100, 8000, H200, tokens=20480, patience=5)
    load_up(scheduler, 120, 1000, 40)
    started: list[list[int]] = []
    for _ in range(60):
        plan = scheduler.plan()
        started.append([c.request for b in plan.batches for c in b.prefill if not c.start])
        report(scheduler, plan)
    flat = [number for step in started for number in step]
    assert flat == sorted(flat) and len(flat) > 50
    assert all(1 <= len(step) < 8 for step in started[6:50])


@pytest.mark.parametrize("offload", ["auto", "full", "off"])
def test_what_moves_and_what_is_shared_is_read_where_it_was_stored(offload: str) -> None:
    scheduler = make(gpu=30, cpu=90, tokens=100, predictor=T4, offload=offload, min_tokens=4)
    memory, rng = Memory(scheduler), random.Random(7)
    seen = {"out": 0, "in": 0, "dropped": 0, "shared": 0}
    requests: list[Request] = []
    for step in itertools.count():
        if step % 9 == 0 and step < 500:
            requests += submit(scheduler, rng.randint(1, 60), rng.randint(1, 250), n=2)
        plan = scheduler.plan()
        check_plan(scheduler, plan)
        memory.run(plan)
        check_integrity(scheduler)
        seen["out"] += len(plan.swap_out)
        seen["in"] += len(plan.swap_in)
        seen["dropped"] += len(plan.preempt)
        if not scheduler.busy and step > 500:
            break
    seen["shared"] = sum(r.metrics.cached_tokens for r in requests)
    assert all(r.generated == r.max_tokens for r in requests)
    assert seen["shared"] and (seen["dropped"] or offload != "off")
    assert (seen["in"] > 0 and seen["out"] > 0) == (offload == "auto")


def test_moved_blocks_map_to_blocks_and_are_shared_there() -> None:
    scheduler = make(gpu=20, cpu=40)
    tokens = list(range(70))
    requests = scheduler.submit(tokens, SamplingParams(max_tokens=30, n=2))
    for _ in range(3):
        report(scheduler, scheduler.plan())
    first, second = requests
    move = scheduler.move(first, Home.CPU)
    assert len(move.source) == blocks_for(first.computed)
    assert move.target == tuple(scheduler.pools[Home.CPU].table(first.id)[: len(move.source)])
    again = scheduler.move(second, Home.CPU)
    assert len(again.source) == len(move.source) - 4  # four full blocks are there already
    assert scheduler.pools[Home.GPU].free_blocks == 20
    check_integrity(scheduler)
    back = scheduler.move(first, Home.GPU)
    assert back.source == move.target
    check_integrity(scheduler)


def test_settings_are_checked() -> None:
    with pytest.raises(SpecError, match="offload"):
        make(offload="some")
    with pytest.raises(SpecError, match="patience"):
        make(patience=0)
