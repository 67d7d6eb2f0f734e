"""Batches by token budget and length bucket, in order of urgency."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.embedding.batching import bucket, choose_batch


@dataclass
class Text:
    tokens: int
    limit: int = 1 << 30
    model: str = ""


def sizes(tokens: list[int], budget: int, *, pads: bool, most: int = 100) -> list[int]:
    chosen = choose_batch([Text(n) for n in tokens], budget, most, pads=pads)
    return [text.tokens for text in chosen]


def test_packed_sequences_cost_their_own_tokens() -> None:
    assert sizes([100, 10, 200, 30], 150, pads=False) == [100, 10, 30]


def test_padded_sequences_join_their_bucket_and_cost_the_longest() -> None:
    assert sizes([100, 10, 120, 70, 90], 480, pads=True) == [100, 120, 70, 90]
    assert sizes([100, 10, 120, 70, 90], 479, pads=True) == [100, 120, 70]


def test_the_most_urgent_query_always_runs() -> None:
    assert sizes([500, 20], 100, pads=False) == [500]
    assert sizes([500], 100, pads=True) == [500]


def test_a_query_that_failed_in_a_batch_runs_in_a_smaller_one() -> None:
    waiting = [Text(10), Text(10), Text(10, limit=2), Text(10)]
    assert len(choose_batch(waiting, 1000, 100, pads=False)) == 3  # passes the limited one by
    assert len(choose_batch(waiting[2:], 1000, 100, pads=False)) == 2


def test_buckets_double() -> None:
    edges = [1, 16, 17, 32, 33, 64, 65, 512]
    assert [bucket(n) for n in edges] == [0, 0, 1, 1, 2, 2, 3, 5]


@given(
    tokens=st.lists(st.integers(1, 600), min_size=1, max_size=40),
    budget=st.integers(1, 4000),
    most=st.integers(1, 50),
    pads=st.booleans(),
)
def test_no_batch_is_over_its_budget(tokens: list[int], budget: int, most: int, pads: bool) -> None:
    chosen = sizes(tokens, budget, pads=pads, most=most)
    assert chosen[0] == tokens[0] and len(chosen) <= most
    cost = max(chosen) * len(chosen) if pads else sum(chosen)
    assert cost <= budget or len(chosen) == 1
    if pads:
        assert max(chosen) <= max(16, 2 * min(chosen))


def test_a_batch_is_of_the_most_urgent_one_s_model() -> None:
    waiting = [Text(n, model="ab"[n % 2]) for n in range(1, 7)]
    chosen = choose_batch(waiting, 100, 100, pads=False)
    assert [text.tokens for text in chosen] == [1, 3, 5]
