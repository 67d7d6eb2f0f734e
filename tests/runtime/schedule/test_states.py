"""States of sequences: whose a slot is, what prefixes share, and that copies come in order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.ir.errors import CapacityError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.kv_pool import KvPool, hash_blocks
from dovetail.runtime.schedule.scheduler import STATE_TOKENS, cut_at_block
from dovetail.runtime.schedule.states import StateSlots
from tests.runtime.schedule.integrity import check_integrity

Tokens = list[int]


class StatesMachine(RuleBasedStateMachine):
    """Steps of sequences that begin alike; a slot's content is the tokens that made its state."""

    @initialize(keep=st.booleans(), count=st.integers(1, 5))
    def start(self, keep: bool, count: int) -> None:
        self.states = StateSlots(count)
        self.pool = KvPool(16, keep=keep, states=self.states)
        self.content: dict[int, Tokens] = {}
        self.tokens: dict[int, Tokens] = {}
        self.stored: dict[int, int] = {}
        self.shared = 0
        self.next_id = 0

    @rule(beginning=st.integers(0, 1), length=st.integers(1, 70))
    def open(self, beginning: int, length: int) -> None:
        tokens = [beginning] * length
        if self.pool.states is not None and not self.pool.states.free:
            with pytest.raises(CapacityError):
                self.states.open(self.next_id)
            return
        shared = self.pool.open(self.next_id, hash_blocks(tokens))
        if self.pool.missing(self.next_id, length) > self.pool.free_blocks:
            self.pool.close(self.next_id)
            return
        self.pool.grow(self.next_id, length)
        self.tokens[self.next_id], self.stored[self.next_id] = tokens, shared
        self.next_id += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), blocks=st.integers(0, 2), more=st.integers(0, 20), decoding=st.booleans())
    def step(self, data: st.DataObject, blocks: int, more: int, decoding: bool) -> None:
        """Compute so many blocks, or so many tokens, of one of the sequences."""
        for source, target in self.states.take_copies():
            self.content[target] = self.content[source]
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, stored, slot = self.tokens[number], self.stored[number], self.pool.slot(number)
        if stored:
            assert self.content[slot] == tokens[:stored], "a state is not that of its tokens"
        end = (stored // KV_BLOCK + blocks) * KV_BLOCK if blocks else stored + more
        end = max(stored, min(end, len(tokens)))
        if end == stored:
            return
        self.content[slot], self.stored[number] = tokens[:end], end
        self.pool.publish(number, tokens, end)
        self.pool.keep_state(number, end, decoding=decoding)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), sound=st.booleans())
    def close(self, data: st.DataObject, sound: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.close(number, sound=sound)
        del self.tokens[number], self.stored[number]

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "pool"):
            check_integrity(self.pool)


StatesMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
test_states_are_those_of_their_tokens = StatesMachine.TestCase


def run_through(pool: KvPool, number: int, tokens: Tokens, ends: list[int]) -> int:
    """Store `tokens` as far as each of `ends`; return how many were shared."""
    shared = pool.open(number, hash_blocks(tokens))
    pool.grow(number, len(tokens))
    for end in ends:
        pool.publish(number, tokens, end)
        pool.keep_state(number, end, decoding=False)
    return shared


def test_a_prefix_is_shared_as_far_as_its_last_state() -> None:
    pool = KvPool(32, keep=True, states=StateSlots(4))
    tokens = list(range(100))
    assert run_through(pool, 0, tokens, [32, 50, 64, 100]) == 0
    assert run_through(pool, 1, tokens[:60], []) == 32  # blocks go further, the state at 64 also
    assert run_through(pool, 2, [*tokens[:90], 7, 8], []) == 64
    for number in range(3):
        pool.close(number)


def test_the_state_that_was_used_last_stays() -> None:
    states = StateSlots(3)
    pool = KvPool(32, keep=True, states=states)
    first, second = list(range(40)), list(range(50, 90))
    for number, tokens in enumerate((first, second)):
        run_through(pool, number, tokens, [32, 40])
        pool.close(number)
    assert run_through(pool, 2, first, []) == 32
    pool.close(2)
    run_through(pool, 3, list(range(100, 140)), [32, 40])  # its state takes the one of `second`
    pool.close(3)
    assert run_through(pool, 4, first, []) == 32
    pool.close(4)
    assert run_through(pool, 5, second, []) == 0


def test_a_state_that_was_lost_with_its_blocks_is_kept_anew() -> None:
    states = StateSlots(4)
    pool = KvPool(32, keep=True, states=states)
    for number in range(2):
        assert run_through(pool, number, list(range(40)), [32, 40]) == 0
        assert len(states.take_copies()) == 1
        pool.close(number)
        pool.forget()  # as a profile overwrites the memory of both


def test_the_only_slot_becomes_the_sequence_it_was_kept_for() -> None:
    states = StateSlots(1)
    states.open("a")
    states.keep("a", b"1")
    assert states.take_copies() == [] and not states.holds(b"1")  # there was no slot for it
    states.close("a")
    states = StateSlots(2)
    states.open("a")
    states.keep("a", b"1")
    states.open("b", b"1")  # no third: it takes over what was kept
    assert states.take_copies() == [(0, 1)] and not states.holds(b"1")
    assert states.slot("b") == 1


@pytest.mark.parametrize(
    ("start", "length", "tokens", "taken"),
    [
        (0, 500, 500, 496),  # the last block boundary that may be shared
        (0, 512, 512, 496),  # the last token is never shared
        (496, 4, 500, 4),
        (0, 192, 500, 192),
        (0, 200, 500, 192),  # a step that is cut ends at a block
        (0, 9, 500, 9),  # less than a block
        (3, 13, 500, 13),
        (0, STATE_TOKENS, STATE_TOKENS, STATE_TOKENS),
        (0, STATE_TOKENS + 1, STATE_TOKENS + 1, STATE_TOKENS),
        (0, 30, 30, 30),
    ],
)
def test_prompts_are_cut_where_a_state_may_be_kept(
    start: int, length: int, tokens: int, taken: int
) -> None:
    assert cut_at_block(start, length, tokens) == taken
