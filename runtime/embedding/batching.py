"""Which queries run together: by token budget, and by length bucket where a device pads.

In: what waits, most urgent first. Out: the queries of the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

SHORTEST_BUCKET = 16
"""Tokens of the first bucket; each next one is twice as long, so padding stays below half."""


class Sized(Protocol):
    """A query: its model, its length in tokens, and the largest batch it may be in."""

    model: str
    tokens: int
    limit: int


Q = TypeVar("Q", bound=Sized)


def bucket(tokens: int) -> int:
    """Return the length bucket: 0 up to 16 tokens, 1 up to 32, 2 up to 64, ..."""
    return max(0, (tokens - 1) // SHORTEST_BUCKET).bit_length()


def choose_batch(waiting: Sequence[Q], budget: int, most: int, *, pads: bool) -> list[Q]:
    """Return at most `most` queries of one model, the most urgent one always among them.

    pads: every sequence costs as many tokens as the longest of the batch, so only queries of the
    first one's length bucket join it; else sequences are packed and cost their own tokens.
    """
    first = waiting[0]
    chosen = [first]
    total = longest = first.tokens
    most = min(most, first.limit)
    for query in waiting[1:]:
        if len(chosen) >= most:
            break
        longer = max(longest, query.tokens)
        cost = longer * (len(chosen) + 1) if pads else total + query.tokens
        joins = query.model == first.model
        joins &= not pads or bucket(query.tokens) == bucket(first.tokens)
        if joins and cost <= budget and query.limit > len(chosen):
            chosen.append(query)
            total, longest = total + query.tokens, longer
            most = min(most, query.limit)
    return chosen
