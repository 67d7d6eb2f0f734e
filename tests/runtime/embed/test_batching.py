"""Batches by token budget, in order of urgency."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.embed.device_queue import EmbedQuery, choose_batch


def sizes(tokens: list[int], budget: int, most: int = 100) -> list[int]:
    waiting = [EmbedQuery(number, n) for number, n in enumerate(tokens)]
    return [query.tokens for query in choose_batch(waiting, budget, most)]


def test_packed_sequences_cost_their_own_tokens() -> None:
    assert sizes([100, 10, 200, 30], 150) == [100, 10, 30]


def test_the_most_urgent_query_always_runs() -> None:
    assert sizes([500, 20], 100) == [500]


def test_a_query_that_failed_in_a_batch_runs_in_a_smaller_one() -> None:
    waiting = [EmbedQuery(number, 10) for number in range(4)]
    waiting[2].limit = 2
    assert len(choose_batch(waiting, 1000, 100)) == 3  # passes the limited one by
    assert len(choose_batch(waiting[2:], 1000, 100)) == 2


@given(
    tokens=st.lists(st.integers(1, 600), min_size=1, max_size=40),
    budget=st.integers(1, 4000),
    most=st.integers(1, 50),
)
def test_no_batch_is_over_its_budget(tokens: list[int], budget: int, most: int) -> None:
    chosen = sizes(tokens, budget, most)
    assert chosen[0] == tokens[0] and len(chosen) <= most
    assert sum(chosen) <= budget or len(chosen) == 1


def test_a_batch_is_of_the_most_urgent_one_s_model() -> None:
    waiting = [EmbedQuery(n, n, model="ab"[n % 2]) for n in range(1, 7)]
    assert [query.tokens for query in choose_batch(waiting, 100, 100)] == [1, 3, 5]
