"""The bench times programs once more before it trusts them."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from dovetail.compiler.search.policy import CONFIRM_ROUNDS, FINALISTS, Bench
from dovetail.compiler.search.space import WHOLE, Scheme
from tests.compiler.search.landscape import Landscape, task

M = 64


class Lucky(Landscape):
    """Brief timings flatter some candidates; the rounds of a confirmation do not."""

    flattered: tuple = ()

    def measure(self, case, candidates, *, rounds, seconds):
        found = super().measure(case, candidates, rounds=rounds, seconds=seconds)
        if rounds >= CONFIRM_ROUNDS:
            return found
        return tuple(
            replace(f, low=f.low / 100) if f.candidate in self.flattered else f for f in found
        )


@pytest.mark.parametrize("seconds", [math.inf, 1e4])
def test_a_lucky_program_does_not_hide_a_good_one(seconds):
    one, land = task(points=(M,)), Lucky(cost=lambda case, panels, values: values["m_tile"] / 100)
    bench = Bench(one, land, M, seconds)
    programs = [
        one.program(M, tile, WHOLE, Scheme(1, 2, 1))
        for tile in one.problem(M).tiles()
        if tile.panels == 2
    ]
    slow = [p for p in programs if p.tile.rows > bench.default.tile.rows][: FINALISTS - 1]
    land.flattered = tuple(one.problem(M).candidate(p) for p in slow)
    bench.time(programs)
    assert bench.best() in slow
    assert bench.choice().program == min(programs, key=lambda p: p.tile.rows)
    timed = [candidate for _, candidate in land.asked]
    assert all(timed.count(candidate) == 2 for candidate in land.flattered)
