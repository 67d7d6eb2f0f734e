"""The KV pool: reference counts, sharing by content and the free list under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dovetail.ir.errors import CapacityError
from dovetail.runtime.kv_pool import KvPool, blocks_for, hash_blocks


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet, so that beginnings are often equal."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(12)
        self.tokens: dict[int, list[int]] = {}
        self.stored: dict[int, int] = {}
        self.next_id = 0

    @rule(beginning=st.integers(0, 1), length=st.integers(1, 80))
    def open(self, beginning: int, length: int) -> None:
        tokens = [beginning] * length
        shared = self.pool.open(self.next_id, hash_blocks(tokens))
        assert shared % 16 == 0 and shared < length
        self.tokens[self.next_id], self.stored[self.next_id] = tokens, shared
        self.next_id += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 40))
    def grow(self, data: st.DataObject, more: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = self.tokens[number]
        length = min(len(tokens), self.stored[number] + more)
        before, free = list(self.pool.table(number)), self.pool.free_blocks
        missing = self.pool.missing(number, length)
        if missing > free:
            with pytest.raises(CapacityError):
                self.pool.grow(number, length)
            assert (list(self.pool.table(number)), self.pool.free_blocks) == (before, free)
            return
        self.pool.grow(number, length)
        assert self.pool.free_blocks == free - missing
        assert len(self.pool.table(number)) >= blocks_for(length)
        self.stored[number] = max(length, self.stored[number])
        self.pool.publish(number, tokens, self.stored[number])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.close(number)
        del self.tokens[number], self.stored[number]

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def shared_blocks_hold_equal_tokens(self) -> None:
        seen: dict[tuple[int, int], int] = {}
        for number, tokens in self.tokens.items():
            for i, block in enumerate(self.pool.table(number)):
                assert seen.setdefault((block, i), tokens[0]) == tokens[0]

    def teardown(self) -> None:
        for number in list(self.tokens):
            self.pool.close(number)
        self.pool.check_integrity()
        assert self.pool.free_blocks == 12


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_only_full_live_blocks_before_the_last_token_are_shared() -> None:
    pool = KvPool(10)
    tokens = list(range(40))
    assert pool.open("a", hash_blocks(tokens)) == 0
    pool.grow("a", 40)
    pool.publish("a", tokens, 31)  # one full block stored
    assert pool.open("b", hash_blocks(tokens)) == 16
    pool.publish("a", tokens, 40)
    assert pool.open("c", hash_blocks(tokens)) == 32
    assert pool.open("d", hash_blocks(tokens[:32])) == 16  # its last token is left to compute
    assert pool.open("e", hash_blocks([9, *tokens[1:]])) == 0
    first = pool.table("a")[0]
    assert pool.references(first) == 4
    for name in "abcde":
        pool.close(name)
    assert pool.open("f", hash_blocks(tokens)) == 0  # nobody holds them any more
    pool.check_integrity()
