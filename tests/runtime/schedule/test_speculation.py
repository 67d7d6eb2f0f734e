"""When rows are drafted: a pure function of texts and of how long steps took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.experience import FEW, STALE, RowTimes
from dovetail.runtime.schedule.kv_pool import KvPool
from dovetail.runtime.schedule.plan import Limits, SchedulerSettings
from dovetail.runtime.schedule.request import Request, SamplingParams
from dovetail.runtime.schedule.scheduler import Scheduler
from dovetail.runtime.schedule.speculation import DRAFTED, read_speculation
from tests.runtime.schedule.integrity import check_integrity

TURN = [7, 8, 9, 4, 5, 6]


class Replies:
    """A scheduler whose steps take as long as `seconds` of their rows says; it says `TURN`."""

    def __init__(self, seconds: Any, *, blocks: int = 64, sequences: int = 16, most: int = 8):
        self.now, self.seconds, self.rows = 0.0, seconds, list[int]()
        settings = SchedulerSettings(offload="off", num_speculative_tokens=most)
        limits = Limits(64, sequences, 400, 1000)
        self.scheduler = Scheduler(
            limits, KvPool(blocks), Predictor(), lambda: self.now, settings=settings
        )

    def ask(self, answer: int = 40, prompt: Sequence[int] = TURN * 4, **options: Any) -> Request:
        params = SamplingParams(max_tokens=answer, **options)
        return self.scheduler.submit(list(prompt), params)[0]

    def step(self, say: Any = lambda place: TURN[place % len(TURN)]) -> int:
        """Run a step; return how many tokens were drafted."""
        scheduler = self.scheduler
        (batch,) = scheduler.plan().batches
        assert batch.sequences <= scheduler.limits.max_step_sequences
        members = (*batch.gpu_decode, *batch.cpu_decode)
        self.rows.append(len(members))
        self.now += self.seconds(batch.tokens)
        for request in scheduler.complete(batch):
            for _ in range(max(1, members.count(request.id))):
                token = say(len(request.tokens))
                scheduler.append(request, token, self.now)
                if not (request.drafted and scheduler.confirm(request, token)):
                    break
        check_integrity(scheduler)
        return len(members) - len(set(members))


def test_a_text_that_repeats_takes_few_steps() -> None:
    replies = Replies(lambda rows: 1.0)
    request = replies.ask()
    while not request.finished:
        replies.step()
    assert request.output == (TURN * 8)[:40] and request.finish_reason == "length"
    assert len(replies.rows) < 15 and max(replies.rows) == 9
    speculation = replies.scheduler.speculation
    assert speculation is not None
    assert speculation.counts["accepted_tokens"] == 40 - len(replies.rows)


@pytest.mark.parametrize("beside", [True, False])
def test_an_answer_that_quotes_what_is_beside_its_prompt_takes_few_steps(beside: bool) -> None:
    replies, text = Replies(lambda rows: 1.0), list(range(200, 240))
    request = replies.ask(prompt=[1, 2, 3])
    request.beside = tuple(text) if beside else ()
    while not request.finished:
        replies.step(lambda place: text[place - 3])
    assert request.output == text
    assert len(replies.rows) < 15 if beside else len(replies.rows) == 40


@pytest.mark.parametrize("seconds", [lambda rows: 1.0 * rows, lambda rows: rows**1.5])
def test_rows_that_cost_what_they_bring_are_tried_and_left(seconds: Any) -> None:
    replies = Replies(seconds)
    for _ in range(3):
        request = replies.ask(80)
        while not request.finished:
            replies.step()
    assert sum(rows > 1 for rows in replies.rows) < len(replies.rows) / 8


def test_a_request_whose_drafts_do_not_hold_gets_none() -> None:
    replies = Replies(lambda rows: 1.0 + 0.05 * rows)
    replies.ask(200)
    for step in range(200):
        replies.step(lambda place, step=step: [7, 8][place % 2] if place % 3 else 100 + step)
    assert sum(rows - 1 for rows in replies.rows[-50:]) < 25


@pytest.mark.parametrize("blocks", [4, 5, 8])
def test_drafts_take_no_block_from_others(blocks: int) -> None:
    alone = Replies(lambda rows: 1.0, blocks=blocks, most=64)
    requests = [alone.ask(answer=20) for _ in range(4)]
    while any(not request.finished for request in requests):
        alone.step()
    assert all(request.output == (TURN * 4)[:20] for request in requests)


def test_steps_without_room_have_none() -> None:
    full = Replies(lambda rows: 1.0, sequences=2)
    requests = [full.ask() for _ in range(2)]
    while any(not request.finished for request in requests):
        full.step()
    assert max(full.rows) == 2


def test_steps_that_read_prompts_draft_too() -> None:
    """Each request is answered while the prompts of the next ones are read."""
    replies = Replies(lambda rows: 1.0, sequences=16, blocks=200)
    settings = replies.scheduler.settings
    object.__setattr__(settings, "prompt_tokens", 3)
    requests = [replies.ask(60) for _ in range(3)]
    requests += [replies.scheduler.submit([100 + i] * 200, requests[0].params)[0] for i in range(2)]
    beside = 0
    while any(not request.finished for request in requests):
        computed = [request.computed for request in requests[3:]]
        drafts = replies.step()
        read = [request.computed for request in requests[3:]] != computed
        beside += drafts * (read and not any(request.generated for request in requests[3:]))
    assert beside > 20
    assert all(request.output == (TURN * 10)[:60] for request in requests[:3])


def test_what_a_grammar_forces_is_drafted_at_once_and_nothing_that_it_refuses() -> None:
    replies = Replies(lambda rows: 1.0 + 0.05 * rows)
    request = replies.ask(60)
    while request.generated < 8:
        replies.step(lambda place: 100 + place)  # nothing stood before
    request.forced = [200 + len(request.tokens) + i for i in range(20)]
    assert replies.step(lambda place: 200 + place) == 8 == request.generated - 8 - 1
    request.forced = []
    request.accepts = lambda tokens: 1
    while not request.finished:
        assert replies.step() <= 1


def test_times_are_medians_of_late_and_lines_between_them() -> None:
    times = RowTimes(8)
    for seconds in (9.0, 1.0, 1.0, 1.0):
        assert times.line == []
        times.learn(2, seconds)
    for _ in range(FEW):
        times.learn(4, 3.0)
    assert times.line[:5] == [1.0, 1.0, 1.0, 2.0, 3.0] and len(times.line) == 9
    assert 3.0 < times.line[5] < times.line[8] < 6.0
    for _ in range(STALE + 8):
        times.learn(2, 5.0)
    assert times.line[2] == 5.0 < times.line[4]


def test_options_are_checked() -> None:
    assert read_speculation(None) == 0
    assert read_speculation('{"num_speculative_tokens": 0}') == 0
    assert read_speculation({"method": "suffix"}) == DRAFTED
    for wrong in (
        "{",
        "[]",
        "[" * 100_000,
        {"method": "eagle"},
        {"depth": 1},
        {"num_speculative_tokens": 65},
    ):
        with pytest.raises(RequestError, match=r"speculative_config|num_speculative_tokens"):
            read_speculation(wrong)  # type: ignore[arg-type]
