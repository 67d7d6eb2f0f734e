"""Shares follow what the workers of an app have done."""

from __future__ import annotations

from dovetail.runtime.hosting.division import PERIOD, follow_load
from dovetail.runtime.machine.seat import ENCODER_SLOT, ENGINE_SLOT, Board
from dovetail.topology.division import DECODE, ENCODERS, STAGES, divide
from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters
from tests.topology.test_division import LOAD


def test_a_load_that_changes_changes_the_shares_at_the_next_look() -> None:
    spec, board = read_hardware("core:12"), Board()
    board.divide(divide(spec, default_parameters(spec), LOAD).shares)
    before, nothing = board.shares, dict.fromkeys(STAGES, 0.0)
    assert follow_load(board, spec, nothing) == nothing and board.shares == before
    board.end(ENCODER_SLOT, ENCODERS, 9 * PERIOD)
    board.end(ENGINE_SLOT, DECODE, PERIOD)
    used = follow_load(board, spec, nothing)
    assert used == board.used and len(board.shares[ENCODERS]) > len(before[ENCODERS])
    after = board.shares
    assert follow_load(board, spec, used) == used and board.shares == after, "nothing since"
