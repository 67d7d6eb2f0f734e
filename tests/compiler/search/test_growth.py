"""Slices grow in doubling steps, are rolled back, and stop where threads would run out of work."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.search.growth import distance, drive, fast_start, finetune, room_for
from dovetail.compiler.search.space import Slice


def run(growth, cost):
    """Return the result and all slices that were timed, in order."""
    seen = []

    def time(asked):
        seen.extend(part for _, part in asked)
        return [cost(part) for _, part in asked]

    return drive({"only": growth}, time)["only"], seen


def test_the_limits_of_the_paper():
    """(M, N, K) = (128, 64, 64) and two threads: the slice stops at (64, 32, 32), Sandwich §6."""
    room = room_for(Slice(1, 1, 1), Slice(128, 64, 64), 2)
    best, _ = run(fast_start(room.unit, room), lambda part: 1 / (part.m * part.n * part.k))
    assert best == Slice(64, 32, 32)


def test_steps_double():
    room = room_for(Slice(4, 1, 64), Slice(1000, 1, 64), 1)
    _, seen = run(fast_start(room.unit, room), lambda part: 1 / part.m)
    assert [part.m for part in seen] == [4, 8, 16, 32, 64, 128, 256, 512, 1000]


def test_a_side_that_does_not_pay_is_rolled_back():
    room = room_for(Slice(1, 1, 1), Slice(100, 100, 100), 1)
    best, seen = run(
        fast_start(room.unit, room), lambda part: abs(part.m - 8) + 90 / part.k + part.n
    )
    assert (best.m, best.n, best.k) == (8, 1, 100)
    assert [part.n for part in seen if part.n > 1] == [2]  # tried once, never again


def test_equal_times_do_not_grow():
    room = room_for(Slice(1, 1, 1), Slice(64, 64, 64), 1)
    best, seen = run(fast_start(room.unit, room), lambda part: 1.0)
    assert best == Slice(1, 1, 1) and len(seen) == 4


@given(
    best=st.tuples(*[st.integers(1, 12)] * 3),
    start=st.tuples(*[st.integers(1, 12)] * 3),
)
def test_finetune_walks_to_the_bottom_of_a_valley(best, start):
    room = room_for(Slice(1, 1, 1), Slice(99, 99, 99), 1)

    def cost(part):
        sides = zip((part.m, part.n, part.k), best, strict=True)
        return 1 + sum(abs((side or 99) - wanted) for side, wanted in sides)

    found, _ = run(finetune(Slice(*start), room), cost)
    assert found == Slice(*best)


def test_finetune_jumps_to_the_whole_side():
    room = room_for(Slice(1, 1, 64), Slice(4, 4, 4096), 1)
    found, seen = run(finetune(Slice(1, 1, 64), room), lambda part: 1.0 if part.k == 0 else 2.0)
    assert found.k == 0 and len(seen) < 30


def test_growths_run_side_by_side():
    room = room_for(Slice(1, 1, 1), Slice(8, 1, 1), 1)
    steps = []

    def time(asked):
        steps.append([key for key, _ in asked])
        return [1 / part.m if key == "a" else 1.0 for key, part in asked]

    done = drive({key: fast_start(room.unit, room) for key in "ab"}, time)
    assert done == {"a": Slice(8, 1, 1), "b": Slice(1, 1, 1)}
    assert steps[:3] == [["a", "b"], ["a", "b"], ["a"]]


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (Slice(0, 1, 0), Slice(0, 1, 0), 0),
        (Slice(8, 1, 0), Slice(4, 1, 0), 1),
        (Slice(0, 1, 0), Slice(4, 1, 0), math.inf),
    ],
)
def test_distance(a, b, wanted):
    assert distance(a, b) == wanted
