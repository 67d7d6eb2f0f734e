"""Shares follow what the workers of an app have done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.graph import Placement
from dovetail.ir.place import place, serving_graph, share_out
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting.division import LoadLook, divide_cpu, follow_load
from dovetail.runtime.machine.seat import ENCODER_SLOT, ENGINE_SLOT, Board, Seat
from dovetail.topology.division import DECODE, ENCODERS, PREFILL, SEARCHES, STAGES, Trend, divide
from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters
from tests.topology.test_division import LOAD

SPEC = read_hardware("core:12")
NOTHING = LoadLook(0.0, dict.fromkeys(STAGES, 0.0))


def make_board() -> Board:
    board = Board()
    board.divide(divide(SPEC, default_parameters(SPEC), LOAD).shares)
    return board


def test_a_load_that_has_changed_changes_the_shares_within_a_second() -> None:
    board = make_board()
    before, look = board.shares, LoadLook(0.5, board.used)
    trend = follow_load(board, SPEC, Trend(), NOTHING, look)
    assert board.shares == before
    for now in (1.0, 1.5):
        assert board.shares == before
        board.end(ENCODER_SLOT, ENCODERS, 4.5)
        board.end(ENGINE_SLOT, DECODE, 0.5)
        look, last = LoadLook(now, board.used), look
        trend = follow_load(board, SPEC, trend, last, look)
    after = board.shares
    assert len(after[ENCODERS]) > len(before[ENCODERS])
    follow_load(board, SPEC, trend, look, LoadLook(2.0, board.used))
    assert board.shares == after, "nothing since"


def test_attention_beside_a_device_has_the_share_of_decode() -> None:
    phase = PhasePlan(threads=1, cpus=(0,))
    graph = serving_graph(["llm"], (), Placement(threads=1, cpus=(1,)))
    graph = place(graph, {"llm": ServicePlan(prefill=phase, decode=phase)})
    shares = {PREFILL: (0,), DECODE: (0,), SEARCHES: (1,)}
    artifact: Any = SimpleNamespace(serve=share_out(graph, shares))
    board = divide_cpu(artifact, EngineOptions(device="cuda:0"), SPEC)
    assert board is not None and board.shares == shares
    assert divide_cpu(artifact, EngineOptions(device="torch:cpu"), SPEC) is None


def test_nothing_is_lent_while_other_programs_use_what_would_be() -> None:
    board, load = make_board(), {**NOTHING.used, DECODE: 3.0, ENCODERS: 3.0}
    engine = Seat(board, ENGINE_SLOT)
    follow_load(board, SPEC, Trend(), NOTHING, LoadLook(1.0, load, others=11.0))
    assert engine.take(DECODE) == board.shares[DECODE]
    alone = {**load, DECODE: 6.0}
    follow_load(board, SPEC, Trend(), LoadLook(1.0, load), LoadLook(2.0, alone, others=11.0))
    assert engine.take(DECODE) is None, "one worker alone has what was planned"
    both = {**alone, DECODE: 9.0, ENCODERS: 6.0}
    follow_load(board, SPEC, Trend(), LoadLook(2.0, alone), LoadLook(3.0, both, others=0.1))
    assert engine.take(DECODE) is None
