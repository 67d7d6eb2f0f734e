"""The board of workers: shares that all see, who is busy, and threads that move."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.runtime.machine.seat import (
    ENCODER_SLOT,
    ENGINE_SLOT,
    MOST_CPUS,
    SEARCH_SLOT,
    Board,
    Seat,
    take_seat,
)
from dovetail.topology.division import DECODE, ENCODERS, PREFILL, SEARCHES, STAGES

MOVES = """
import json, os, sys, threading
from dovetail.runtime.machine.seat import ENGINE_SLOT, SEARCH_SLOT, Board, MovingSeat, Seat
board, stop = Board(), threading.Event()
board.divide(json.loads(sys.argv[1]))
seat, engine = MovingSeat(board, SEARCH_SLOT), Seat(board, ENGINE_SLOT)
threading.Thread(target=stop.wait).start()
def where():
    threads = map(int, os.listdir("/proc/self/task"))
    return sorted({tuple(sorted(os.sched_getaffinity(thread))) for thread in threads})
engine.take("decode")
seat.take("searches")
seen = [where()]
engine.leave()
seat.take("searches")
print(json.dumps([*seen, where()]))
stop.set()
"""


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(STAGES),
            st.sets(st.integers(0, MOST_CPUS - 1), min_size=1).map(lambda s: tuple(sorted(s))),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_shares_are_seen_by_all_as_they_were_given(
    given_shares: list[dict[str, tuple[int]]],
) -> None:
    board = Board()
    other = Board.join(os.dup(board.memory.fd))
    assert other is not None and Board.join(-1) is None
    for shares in given_shares:
        board.divide(shares)
        assert other.shares == board.shares == shares


def test_a_worker_alone_has_all_and_lends_what_it_does_not_use() -> None:
    board = Board()
    board.divide({PREFILL: (0, 1, 2), DECODE: (0, 1), SEARCHES: (3,), ENCODERS: (4, 5)})
    engine, encoder = Seat(board, ENGINE_SLOT), Seat(board, next(board.slots))
    assert engine.take(DECODE) is None, "alone: as it was planned"
    assert encoder.take(ENCODERS) == (4, 5, 3), "the rest is dealt, in the order of shares"
    assert engine.take(DECODE) == (0, 1, 2)
    assert engine.take(PREFILL) == (0, 1, 2, 3)
    with take_seat(Seat(board, SEARCH_SLOT), SEARCHES) as usable:
        assert usable == (3,)
        assert engine.take(PREFILL) == (0, 1, 2)
    engine.leave()
    assert encoder.take(ENCODERS) is None
    assert board.used[DECODE] > 0 and board.used[SEARCHES] > 0
    assert engine.take(DECODE) == (0, 1, 2)
    board.clear(ENCODER_SLOT)  # it has died
    assert engine.take(DECODE) is None


def test_there_are_places_for_the_encoders_of_a_large_machine() -> None:
    board = Board()
    board.divide({DECODE: (0,), ENCODERS: (1,)})
    seats = [Seat(board, next(board.slots)) for _ in range(3 * 128)]
    for seat in seats:
        seat.take(ENCODERS)
    assert Seat(board, ENGINE_SLOT).take(DECODE) == (0,)


def test_what_was_lent_is_remembered_by_stage_however_many_work() -> None:
    """Nor by who: of some dozens of encoders other ones are busy each time."""
    board, draw = Board(), random.Random(0)
    board.divide({DECODE: (0,), ENCODERS: (1,)})
    engine, seats = Seat(board, ENGINE_SLOT), [Seat(board, next(board.slots)) for _ in range(30)]
    for _ in range(300):
        for seat in seats:
            seat.take(ENCODERS) if draw.random() < 0.5 else seat.leave()
        engine.take(DECODE)
        engine.leave()
    *_, lent = board._read
    assert 1 < len(lent) <= 1 << len(STAGES)


def test_all_threads_of_a_process_move_to_its_share_and_back() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    shares = {"decode": cpus[:1], "searches": cpus[-1:]}
    done = subprocess.run(
        [sys.executable, "-c", MOVES, json.dumps(shares)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [[cpus[-1:]], [cpus]]
