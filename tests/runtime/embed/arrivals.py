"""When queries arrive, for tests of the embedding service on a virtual clock."""

from __future__ import annotations

import random

from tests.runtime.embed.virtual_queues import Burst


def poisson_calls(rate: float, seconds: float, tokens: int, seed: int = 0) -> list[Burst]:
    """Return single queries that arrive at random, `rate` a second."""
    draw, at, calls = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        calls.append(Burst(at, (tokens,)))
    return calls
