"""When queries arrive, for tests of the embedding service on a virtual clock."""

from __future__ import annotations

import random

from dovetail.runtime.sim.queries import Call


def poisson_calls(rate: float, seconds: float, tokens: int, seed: int = 0) -> list[Call]:
    """Return single queries that arrive at random, `rate` a second."""
    draw, at, calls = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        calls.append(Call(at, (tokens,)))
    return calls
