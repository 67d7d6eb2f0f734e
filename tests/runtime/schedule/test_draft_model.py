"""A draft model reads what requests have, and passes are made where they pay: without any model."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from dovetail.ir.errors import DeviceError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule import experience
from dovetail.runtime.schedule.draft_model import NEW_ROWS, PLAIN, Drafter
from dovetail.runtime.schedule.kv_pool import KvPool
from dovetail.runtime.schedule.plan import Batch, Limits
from dovetail.runtime.schedule.request import Request, SamplingParams
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.schedule.test_speculation import Replies


def follows(tokens: Sequence[int]) -> int:
    """What is said after `tokens`: depends on all of them, and seldom repeats."""
    return sum(token * (place + 3) for place, token in enumerate(tokens)) % 997 + 1


class Small:
    """A draft model whose KV is the token at each slot; `think` says what follows a text."""

    def __init__(self, replies: Replies, *, blocks: int = 64, context: int = 400) -> None:
        self.replies, self.kv, self.rows = replies, dict[int, int](), list[int]()
        self.think: Callable[[Sequence[int]], int] = follows
        self.sure = math.log(0.9)
        self.seconds: Callable[[int], float] = lambda rows: 0.1
        self.drafter = Drafter(
            Limits(100, 8, context, 1000), KvPool(blocks, keep=True), self.read, lambda: replies.now
        )
        speculation = replies.scheduler.speculation
        assert speculation is not None
        speculation.drafter = self.drafter

    def read(
        self, batch: Batch, texts: Mapping[int, Request], table: Callable[[int], array[int]]
    ) -> Sequence[tuple[int, float]]:
        parts = [(chunk.request, chunk.start, chunk.length) for chunk in batch.prefill]
        parts += [(number, texts[number].computed, 1) for number in batch.cpu_decode]
        found = []
        for number, start, length in parts:
            text, blocks = texts[number].tokens, table(number)
            for place in range(start, start + length):
                slot = blocks[place // KV_BLOCK] * KV_BLOCK + place % KV_BLOCK
                self.kv[slot] = text[place]
            stored = [
                self.kv.get(blocks[place // KV_BLOCK] * KV_BLOCK + place % KV_BLOCK)
                for place in range(start + length)
            ]
            assert stored == text[: start + length], "it attends to other tokens than the text's"
            if start + length == len(text):
                found.append((self.think(text), self.sure))
        self.rows.append(batch.tokens)
        self.replies.now += self.seconds(batch.tokens)
        check_integrity(self.drafter.pool)
        return found


def run(replies: Replies, *requests: Request) -> int:
    """Step until all have ended, each said what `follows`; return how many steps that took."""
    scheduler, steps = replies.scheduler, 0
    while any(not request.finished for request in requests):
        steps += 1
        assert steps < 2000
        (batch,) = scheduler.plan().batches
        members = (*batch.gpu_decode, *batch.cpu_decode)
        replies.rows.append(len(members))
        replies.now += replies.seconds(batch.tokens)
        for request in scheduler.complete(batch):
            for _ in range(max(1, members.count(request.id))):
                token = follows(request.tokens)
                scheduler.append(request, token, replies.now)
                if not (request.drafted and scheduler.confirm(request, token)):
                    break
        check_integrity(scheduler)
    for request in requests:
        for at in range(request.prompt_length, len(request.tokens)):
            assert request.tokens[at] == follows(request.tokens[:at])
    return steps


def ask(replies: Replies, prompt: Sequence[int], answer: int = 60, **options: Any) -> Request:
    params = SamplingParams(max_tokens=answer, **options)
    return replies.scheduler.submit(list(prompt), params)[0]


def counts(replies: Replies) -> Mapping[str, int]:
    assert replies.scheduler.speculation is not None
    return replies.scheduler.speculation.counts


def test_what_a_good_model_thinks_takes_fewer_steps() -> None:
    replies = Replies(lambda rows: 1.0)
    small = Small(replies)
    steps = run(replies, replies.ask(100))
    assert steps < 45
    found = counts(replies)
    assert found["accepted_tokens"] > 60
    assert found["accepted_tokens"] > 0.95 * found["draft_tokens"]
    assert 24 < small.rows[0] < 32 and max(small.rows[1:]) < 5, "the prompt is read once"


@pytest.mark.parametrize("blocks", [12, 20, 64])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
def test_whatever_it_thinks_the_answers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, blocks: int, right: float
) -> None:
    """And what it attends to is what the requests have, after any mistake: see `Small.read`."""
    monkeypatch.setattr(experience, "PRIOR", 1e9)  # no experience makes it give up
    rng = random.Random(7)
    replies = Replies(lambda rows: 1.0, blocks=40)  # so that some are preempted
    small = Small(replies, blocks=blocks)
    small.think = lambda text: follows(text) if rng.random() < right else rng.randrange(1000)
    shared = [rng.randrange(1000) for _ in range(40)]
    for _ in range(3):
        requests = [
            ask(replies, [*shared[:length], rng.randrange(1000)], rng.randrange(1, 90))
            for length in rng.choices(range(5, 40), k=6)
        ]
        dropped = ask(replies, shared, 60)
        replies.step(lambda place: 3)
        replies.scheduler.finish(dropped, "abort")
        for request in requests:
            if not request.finished:
                replies.scheduler.finish(request, "abort")
        again = [ask(replies, request.tokens[:50], 40) for request in requests]
        run(replies, *again)
    assert counts(replies)["draft_tokens"] > counts(replies)["accepted_tokens"] + 20


def test_passes_that_cost_what_they_bring_are_tried_and_left() -> None:
    replies = Replies(lambda rows: 1.0)
    small = Small(replies)
    small.seconds = lambda rows: 1.2
    for _ in range(4):
        run(replies, replies.ask(150))
    assert sum(rows > 1 for rows in replies.rows) < len(replies.rows) / 20


def test_passes_that_took_long_once_are_tried_again() -> None:
    replies = Replies(lambda rows: 1.0)
    small = Small(replies)
    small.seconds = lambda rows: 3.0
    run(replies, replies.ask(150))
    assert sum(rows > 1 for rows in replies.rows[-50:]) < 3
    small.seconds = lambda rows: 0.1
    replies.rows.clear()
    run(replies, replies.ask(350))
    assert len(replies.rows) < 250


def test_it_is_left_out_where_it_is_wrong_and_tried_again() -> None:
    replies = Replies(lambda rows: 1.0)
    small = Small(replies)
    small.seconds = lambda rows: 0.4
    small.think = lambda text: 998
    run(replies, ask(replies, [1, 2, 3], 300))
    drafted = replies.rows
    assert 0 < sum(rows > 1 for rows in drafted) < len(drafted) / 10
    small.think = follows
    replies.rows.clear()
    for _ in range(3):
        run(replies, ask(replies, [4, 5, 6], 300))
    assert len(replies.rows) < 600


def test_what_drawn_answers_did_says_nothing_of_greedy_ones() -> None:
    """A token that is drawn is seldom the likeliest one, however right the model is."""
    replies = Replies(lambda rows: 1.0)
    drafter = Small(replies).drafter
    drawn, greedy = (ask(replies, [7, 2, 3], temperature=heat) for heat in (1.0, 0.0))
    usual = drafter.chance(greedy)
    for _ in range(20):
        if not drafter.draft({drawn: 1}, [1.0] * 9, 1):
            assert drafter.chance(drawn) < 0.2
            break
        drafter.learn(drawn, held=False)
    assert drafter.chance(drawn) < usual / 2 and drafter.chance(greedy) == usual


def test_what_is_looked_up_says_nothing_of_it() -> None:
    """Also where a step before did not try all that it drafted."""
    replies = Replies(lambda rows: 1.0)
    drafter, request = Small(replies).drafter, replies.ask(60)
    while not replies.step():
        pass
    assert drafter.draft({request: 4}, [1.0] * 9, 1)
    known = drafter.chance(request)
    assert replies.step() and drafter.chance(request) == known


def test_requests_of_a_batch_share_passes() -> None:
    """A pass brings each of them a token, and costs as much as for one, which would not pay."""
    replies = Replies(lambda rows: 0.9 + 0.02 * rows)
    small = Small(replies)
    small.seconds = lambda rows: 0.4
    requests = [ask(replies, [i, 2, 3, 4], 200) for i in range(1, 7)]
    assert run(replies, *requests) < 140


def test_a_long_text_is_not_read_for_a_short_answer() -> None:
    replies = Replies(lambda rows: 1.0, blocks=200)
    small = Small(replies, blocks=200)
    small.seconds = lambda rows: 0.1 * rows
    run(replies, ask(replies, range(1, 301), 30))  # nothing is known of reading yet
    read = sum(small.rows)
    run(replies, ask(replies, range(301, 601), 30))
    assert sum(small.rows) == read
    small.seconds = lambda rows: 0.1
    small.drafter._row_seconds.clear()
    small.rows.clear()
    run(replies, ask(replies, range(601, 901), 60))
    assert sum(small.rows) >= 300 and max(small.rows) <= NEW_ROWS + 16


def test_a_text_that_others_shared_is_not_read_again() -> None:
    replies = Replies(lambda rows: 1.0, blocks=100)
    small = Small(replies, blocks=100)
    prompt = list(range(1, 161))
    run(replies, ask(replies, prompt, 60))
    small.rows.clear()
    run(replies, ask(replies, prompt, 60))
    assert max(small.rows) <= KV_BLOCK


def test_a_context_or_vocabulary_that_is_too_small_ends_drafts_alone() -> None:
    replies = Replies(lambda rows: 1.0)
    small = Small(replies, context=50)
    run(replies, ask(replies, [1, 2, 3], 150))
    assert counts(replies)["accepted_tokens"] > 20
    assert sum(rows > 1 for rows in replies.rows[-80:]) < 3  # looked up
    narrow = Replies(lambda rows: 1.0)
    small = Small(narrow)
    object.__setattr__(small.drafter.limits, "vocab_size", 3)
    run(narrow, ask(narrow, [4, 5], 60))
    assert counts(narrow)["draft_tokens"] == 0 and not small.rows


def test_what_a_grammar_refuses_is_not_drafted() -> None:
    replies = Replies(lambda rows: 1.0)
    Small(replies)
    request = ask(replies, [1, 2, 3], 60)
    request.accepts = lambda tokens: min(2, len(tokens))
    run(replies, request)
    assert max(replies.rows) == 3


def test_one_step_in_many_has_no_draft() -> None:
    replies = Replies(lambda rows: 1.0)
    drafter, request = Small(replies).drafter, ask(replies, [1, 2, 3])
    found = [bool(drafter.draft({request: 4}, [1.0] * 9, 1)) for _ in range(2 * PLAIN)]
    assert found.count(False) == 2


def test_a_model_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    replies = Replies(lambda rows: 1.0)
    small = Small(replies)

    def think(text: Sequence[int]) -> int:
        if len(text) > 40:
            raise DeviceError("it is gone")
        return follows(text)

    small.think = think
    run(replies, replies.ask(60))
    assert "not used any more: it is gone" in caplog.text
    assert counts(replies)["accepted_tokens"] > 0
