"""The KV pool: reference counts, sharing by content and the free list under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.ir.errors import CapacityError
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for, hash_blocks
from tests.runtime.schedule.integrity import check_integrity


def holders(pool: KvPool, block: int) -> int:
    """How many sequences hold a block."""
    return sum(block in pool.table(sequence) for sequence in pool._tables)


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet, so that beginnings are often equal."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(12)
        self.tokens: dict[int, list[int]] = {}
        self.stored: dict[int, int] = {}
        self.content: dict[int, tuple[int, int]] = {}  # of each block: first token, place
        self.next_id = 0

    @initialize(keep=st.booleans())
    def start(self, keep: bool) -> None:
        self.pool = KvPool(12, keep=keep)

    @rule(beginning=st.integers(0, 1), length=st.integers(1, 80))
    def open(self, beginning: int, length: int) -> None:
        tokens = [beginning] * length
        shared = self.pool.open(self.next_id, hash_blocks(tokens))
        assert shared % 16 == 0 and shared < length
        for i, block in enumerate(self.pool.table(self.next_id)):
            assert self.content[block] == (beginning, i), "what it shares was overwritten"
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
        for i, block in enumerate(self.pool.table(number)):
            if holders(self.pool, block) == 1:
                self.content[block] = (tokens[0], i)
        self.stored[number] = max(length, self.stored[number])
        self.pool.publish(number, tokens, self.stored[number])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.close(number)
        del self.tokens[number], self.stored[number]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        blocks = set(self.pool.table(number))
        self.pool.close(number, sound=False)
        tokens = self.tokens.pop(number)
        del self.stored[number]
        self.pool.open(-1, hash_blocks([tokens[0]] * 90))
        assert not blocks & set(self.pool.table(-1))
        self.pool.close(-1)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        if not self.tokens:
            assert self.pool.open(-1, hash_blocks([0] * 90)) == 0
            self.pool.close(-1)

    @invariant()
    def sound(self) -> None:
        check_integrity(self.pool)

    @invariant()
    def shared_blocks_hold_equal_tokens(self) -> None:
        seen: dict[tuple[int, int], int] = {}
        for number, tokens in self.tokens.items():
            for i, block in enumerate(self.pool.table(number)):
                assert seen.setdefault((block, i), tokens[0]) == tokens[0]

    def teardown(self) -> None:
        for number in list(self.tokens):
            self.pool.close(number)
        check_integrity(self.pool)
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
    assert holders(pool, first) == 4
    for name in "abcde":
        pool.close(name)
    assert pool.open("f", hash_blocks(tokens)) == 0  # nobody holds them any more
    check_integrity(pool)


def test_a_pool_keeps_what_free_blocks_hold_until_it_needs_them() -> None:
    pool = KvPool(6, keep=True)
    first, second = list(range(40)), list(range(100, 140))
    for name, tokens in (("a", first), ("b", second)):
        pool.open(name)
        pool.grow(name, 40)
        pool.publish(name, tokens, 40)
        pool.close(name)
    assert pool.free_blocks == 6
    assert pool.open("c", hash_blocks(second)) == 32 and pool.free_blocks == 4
    pool.open("d")
    pool.grow("d", 48)  # the two that never were full, then the end of the one that ended first
    assert pool.open("e", hash_blocks(first)) == 16
    for name in "cde":
        pool.close(name)
    pool.forget()
    assert pool.open("f", hash_blocks(second)) == 0
    check_integrity(pool)


def store(pool: KvPool, name: str, tokens: list[int]) -> int:
    """Run a sequence from its beginning to its end; return how many tokens it shared."""
    shared = pool.open(name, hash_blocks(tokens))
    pool.grow(name, len(tokens))
    pool.publish(name, tokens, len(tokens))
    return shared


def test_blocks_that_were_shared_stay_longest_but_not_for_ever() -> None:
    pool = KvPool(8, keep=True)
    common, once = [1] * 33, [2] * 64
    for name, tokens in (("a", common), ("b", common), ("c", once)):
        shared = store(pool, name, tokens)
        pool.close(name)
    store(pool, "d", [3] * 64)  # as new as it is, the end of c goes before what a and b shared
    pool.close("d")
    assert pool.open("e", hash_blocks(common)) == 32 and shared == 0
    pool.close("e")
    assert pool.open("f", hash_blocks([3] * 64)) == 48, "shared blocks took more than their half"
    pool.close("f")
    store(pool, "g", [4] * 128)  # needs all
    pool.close("g")
    assert pool.open("h", hash_blocks(common)) == 0
    check_integrity(pool)


def test_a_beginning_outlasts_its_ends_though_two_stored_it_at_once() -> None:
    pool = KvPool(8, keep=True)
    tails = {name: [*[1] * 16, *[token] * 17] for name, token in (("a", 2), ("b", 3))}
    for name in tails:
        pool.open(name)
    for name, tokens in tails.items():
        pool.grow(name, len(tokens))
        pool.publish(name, tokens, len(tokens))
    for name in tails:
        pool.close(name)
        check_integrity(pool)
    store(pool, "c", [9] * 112)  # leaves one block
    pool.close("c")
    assert pool.open("d", hash_blocks(tails["a"])) == 16
    check_integrity(pool)


@pytest.mark.parametrize("name", ["a", "a" * 16, "é"])
def test_kv_of_an_adapter_is_shared_by_its_own_sequences_alone(name: str) -> None:
    tokens, pool = list(range(40)), KvPool(30, keep=True)
    for shared in (0, 32):
        for adapter in ("", name, name + "b"):
            assert pool.open(0, hash_blocks(tokens, adapter), adapter) == shared
            pool.grow(0, 40)
            pool.publish(0, tokens, 40)
            pool.close(0)
    check_integrity(pool)
