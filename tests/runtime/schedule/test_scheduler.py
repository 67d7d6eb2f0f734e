"""The scheduler as a pure function of requests and blocks, on a clock that counts."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import CapacityError, RequestError
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.kv_pool import KvPool
from dovetail.runtime.schedule.plan import Batch, Limits, PrefillChunk, SchedulerSettings, StepPlan
from dovetail.runtime.schedule.request import Request, SamplingParams, TokenLogprob
from dovetail.runtime.schedule.scheduler import Scheduler
from tests.runtime.schedule.integrity import check_integrity


def make_scheduler(
    blocks: int = 64, tokens: int = 32, sequences: int = 4, context: int = 200, **options: Any
) -> Scheduler:
    ticks = itertools.count()
    limits = Limits(tokens, sequences, context, 1000)
    chosen = SchedulerSettings(offload="off", **options)
    clock, pool = lambda: float(next(ticks)), KvPool(blocks, keep=chosen.keep_prefixes)
    return Scheduler(limits, pool, Predictor(), clock, settings=chosen)


def submit(scheduler: Scheduler, length: int, answer: int = 8, n: int = 1) -> list[Request]:
    params = SamplingParams(max_tokens=answer, n=n)
    return scheduler.submit([random.Random(length).randrange(1000)] * length, params)


def apply(scheduler: Scheduler, plan: StepPlan) -> None:
    """Do what the executor does, with token 1 as every answer."""
    for batch in plan.batches:
        for request in scheduler.complete(batch):
            scheduler.append(request, 1, scheduler.clock())


def only(plan: StepPlan) -> Batch:
    assert len(plan.batches) == 1
    return plan.batches[0]


def test_prompts_are_cut_to_the_step_and_decodes_come_along() -> None:
    scheduler = make_scheduler()
    a, b = submit(scheduler, 40)[0], submit(scheduler, 10)[0]
    first = only(scheduler.plan())
    assert first.prefill == (PrefillChunk(a.id, 0, 32),) and first.cpu_decode == ()
    apply(scheduler, StepPlan((first,)))
    second = only(scheduler.plan())
    assert second.prefill == (PrefillChunk(a.id, 32, 8), PrefillChunk(b.id, 0, 10))
    apply(scheduler, StepPlan((second,)))
    assert only(scheduler.plan()) == Batch(cpu_decode=(a.id, b.id))


def test_prompts_beside_others_are_bounded_and_decodes_are_not() -> None:
    scheduler = make_scheduler(sequences=9, prompt_tokens=10)
    alone = submit(scheduler, 29)[0]
    assert only(scheduler.plan()).prefill == (PrefillChunk(alone.id, 0, 29),)
    apply(scheduler, StepPlan((Batch((PrefillChunk(alone.id, 0, 29),)),)))
    others = [submit(scheduler, 4)[0] for _ in range(5)]
    rows = []
    while any(other.generated == 0 for other in others):
        batch = only(scheduler.plan())
        rows.append(sum(chunk.length for chunk in batch.prefill))
        assert len(batch.cpu_decode) == sum(r.generated > 0 for r in (alone, *others))
        apply(scheduler, StepPlan((batch,)))
    assert rows == [10, 10]
    whole = make_scheduler(prompt_tokens=10, chunked=False)
    submit(whole, 15), submit(whole, 15)
    assert [chunk.length for chunk in only(whole.plan()).prefill] == [15, 15]


def test_a_crowd_of_prompts_gets_larger_steps_than_few() -> None:
    """The more rows wait, the more a step takes; the more is left to decode, the fewer."""

    def rows(waiting: int, length: int, decodes: int, answer: int) -> int:
        scheduler = make_scheduler(2000, 1000, 64, 400, prompt_tokens=10, crowd_tokens=100)
        for _ in range(decodes):
            submit(scheduler, 1, answer)
        while any(request.generated == 0 for request in scheduler.requests.values()):
            apply(scheduler, scheduler.plan())
        for _ in range(waiting):
            submit(scheduler, length)
        return sum(chunk.length for chunk in only(scheduler.plan()).prefill)

    assert rows(30, 300, 0, 0) == rows(30, 300, 4, 10) == 100  # at most crowd_tokens
    assert rows(8, 40, 4, 10) == 16  # sqrt(8 * 8 * 320 / (2 * 4 * 9 + 8))
    assert rows(2, 40, 4, 60) == 10  # at least prompt_tokens


def test_what_is_scored_takes_a_place_for_each_row() -> None:
    scheduler = make_scheduler(sequences=6)
    submit(scheduler, 40)  # leaves its blocks to those that begin alike
    while scheduler.busy:
        apply(scheduler, scheduler.plan())
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    same = [random.Random(40).randrange(1000)] * 40
    (scored,) = scheduler.submit(same, params)
    taken, plan = [], only(scheduler.plan())
    taken.append(plan.prefill[0])
    assert plan.prefill == (PrefillChunk(scored.id, 0, 6, range(0, 6)),)  # nothing is shared
    (other,) = submit(scheduler, 9)
    while scheduler.busy:
        scheduler.complete(plan)
        for chunk in plan.prefill:
            if chunk.request == scored.id:
                scheduler.score(scored, [TokenLogprob(1, 0.0)] * len(chunk.scores), 0.0)
        if scored.finished:
            break
        plan = only(scheduler.plan())
        taken += [chunk for chunk in plan.prefill if chunk.request == scored.id]
        assert sum(chunk.places for chunk in plan.prefill) + len(plan.cpu_decode) <= 6
    assert [at for chunk in taken for at in chunk.scores] == [*range(39)]
    assert scored.finish_reason == "length" and other.computed == 9  # in the last of these steps


def test_short_prompts_pass_a_bounded_number_of_long_ones() -> None:
    scheduler = make_scheduler(tokens=16, short_first=2)
    long = submit(scheduler, 100)[0]  # 7 blocks: 14 places; a short one gives way by 2
    shorts = [submit(scheduler, 3)[0] for _ in range(20)]
    assert scheduler.waiting == [*shorts[:11], long, *shorts[11:]]


def test_first_come_first_served_and_sequence_limit() -> None:
    scheduler = make_scheduler(sequences=2)
    ids = [submit(scheduler, 3)[0].id for _ in range(4)]
    assert [c.request for c in only(scheduler.plan()).prefill] == ids[:2]


def test_the_latest_arrival_gives_way_and_comes_back_first() -> None:
    scheduler = make_scheduler(blocks=5, tokens=64)
    a, b = submit(scheduler, 30, 40)[0], submit(scheduler, 15, 20)[0]
    for _ in range(3):
        apply(scheduler, scheduler.plan())
    c = submit(scheduler, 2, 5)[0]
    preempted: list[int] = []
    order = []
    while scheduler.busy:
        plan = scheduler.plan()
        preempted += plan.preempt
        order += [chunk.request for chunk in only(plan).prefill]
        apply(scheduler, plan)
        check_integrity(scheduler)
    assert preempted and a.id not in preempted
    assert a.generated == 40 and b.generated == 20 and c.generated == 5
    assert all(r.finished for r in (a, b, c))


def test_what_a_request_finds_again_after_it_gave_way_was_not_cached_for_it() -> None:
    scheduler = make_scheduler(tokens=64)
    request = submit(scheduler, 40)[0]
    apply(scheduler, scheduler.plan())
    scheduler.preempt(request)
    assert only(scheduler.plan()).prefill[0].start == 32, "its blocks are there still"
    assert request.metrics.cached_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(4, 30),
    tokens=st.integers(1, 40),
    sequences=st.integers(1, 6),
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 90), st.integers(1, 40), st.integers(1, 3)),
        max_size=12,
    ),
)
def test_every_request_finishes_within_limits(
    blocks: int, tokens: int, sequences: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    scheduler = make_scheduler(blocks, tokens, sequences)
    waiting = sorted(arrivals)
    accepted: list[Request] = []
    for step in itertools.count():
        while waiting and waiting[0][0] <= step:
            _, length, answer, n = waiting.pop(0)
            try:
                accepted += submit(scheduler, length, answer, n)
            except CapacityError:
                assert length + answer > blocks * 16
        if not waiting and not scheduler.busy:
            break
        batch = only(plan := scheduler.plan())
        assert batch.tokens <= tokens
        assert len(batch.prefill) + len(batch.cpu_decode) <= sequences
        assert batch.tokens or plan.preempt or not scheduler.busy
        apply(scheduler, plan)
        check_integrity(scheduler)
        assert step < 40_000
    assert all(r.finished and r.generated == r.max_tokens for r in accepted)
    assert scheduler.pool.free_blocks == blocks and not scheduler.requests


def test_refusals_come_on_arrival() -> None:
    scheduler = make_scheduler(blocks=4, context=200)
    with pytest.raises(CapacityError, match="80 tokens of KV, the pool holds 64"):
        submit(scheduler, 60, 6)
    submit(scheduler, 60, 5)  # the last token is never stored
    with pytest.raises(RequestError, match="context"):
        submit(scheduler, 200)
    with pytest.raises(RequestError, match="empty"):
        scheduler.submit([], SamplingParams())


def test_finish_works_in_every_state() -> None:
    scheduler = make_scheduler(sequences=1)
    running, waiting = submit(scheduler, 5)[0], submit(scheduler, 5)[0]
    apply(scheduler, scheduler.plan())
    for request in (waiting, running):
        scheduler.finish(request, "abort")
        assert request.finish_reason == "abort"
    assert not scheduler.busy and scheduler.pool.free_blocks == 64


def test_predicted_seconds_come_from_the_predictor() -> None:
    class Counting(Predictor):
        def linear(self, tokens: int) -> float:
            return tokens * 0.5

    scheduler = Scheduler(Limits(32, 4, 200, 10), KvPool(8), Counting(), lambda: 0.0)
    scheduler.submit([1, 2, 3], SamplingParams())
    assert scheduler.plan().predicted_seconds == 1.5


def test_whole_prompts_where_cutting_is_off() -> None:
    limits, unchunked = Limits(32, 4, 200, 1000), SchedulerSettings(offload="off", chunked=False)
    clock = itertools.count()
    scheduler = Scheduler(
        limits, KvPool(64), Predictor(), lambda: float(next(clock)), settings=unchunked
    )
    lengths = [20, 21, 70, 5]
    ids = [submit(scheduler, length)[0].id for length in lengths]
    seen: list[tuple[int, int]] = []
    while scheduler.busy:
        plan = scheduler.plan()
        seen += [(c.request, c.length) for c in only(plan).prefill]
        apply(scheduler, plan)
    assert seen[:2] == [(ids[0], 20), (ids[1], 21)]  # not 20 and 12 in one step
    assert sum(length for number, length in seen if number == ids[2]) == 70  # longer than a step
    assert seen[-1] == (ids[3], 5)


def test_priorities_have_bounds() -> None:
    with pytest.raises(RequestError, match="priority"):
        make_scheduler().submit([1], SamplingParams(), priority=101)


class Weighing(Predictor):
    """Knows nothing either, but is asked."""


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(4, 24), sequences=st.integers(1, 5))
def test_steps_without_a_decision_are_those_that_all_decisions_give(
    seed: int, blocks: int, sequences: int
) -> None:
    quick, slow = (
        Scheduler(
            Limits(32, sequences, 60, 1000),
            KvPool(blocks),
            predictor,
            lambda: 0.0,
            settings=SchedulerSettings(offload="off"),
        )
        for predictor in (Predictor(), Weighing())
    )
    draw, steady, turn = random.Random(seed), 0, -1
    while turn < 80 or quick.busy:
        turn += 1
        if turn == 0 or (turn < 80 and draw.random() < 0.1):
            length, answer = draw.randint(1, 30), draw.randint(3, 30)
            for scheduler in (quick, slow):
                submit(scheduler, length, answer)
        plans = [scheduler.plan() for scheduler in (quick, slow)]
        assert plans[0] == plans[1]
        steady += bool(plans[0].batches[0].cpu_decode) and not quick.waiting
        for scheduler, plan in zip((quick, slow), plans, strict=True):
            apply(scheduler, plan)
            check_integrity(scheduler)
    assert steady > 0
