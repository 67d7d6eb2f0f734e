"""Shares follow what the workers of an app have done."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.graph import Placement
from dovetail.ir.place import place, serving_graph, share_out
from dovetail.ir.plans import MEASURED, Figure, PlanChoice
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting.division import (
    PERIOD,
    LoadLook,
    divide_cpu,
    find_figures,
    follow_load,
)
from dovetail.runtime.machine.seat import ENCODER_SLOT, ENGINE_SLOT, Board, Seat
from dovetail.topology.division import (
    DECODE,
    ENCODERS,
    PREFILL,
    SEARCHES,
    STAGES,
    Trend,
    divide,
    redivide,
)
from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters
from tests.topology.test_division import LOAD

SPEC = read_hardware("core:12")
NOTHING = LoadLook(0.0, dict.fromkeys(STAGES, 0.0))


def make_board() -> Board:
    board = Board()
    board.divide(divide(SPEC, default_parameters(SPEC), LOAD).shares)
    return board


@pytest.mark.parametrize("phase", [0.0, 0.5, 0.99])
def test_each_of_two_changes_of_the_load_changes_the_shares_within_a_second(phase: float) -> None:
    """phase: of a look, when the load changes; each load is there for two seconds."""
    board, trend, look, found = make_board(), Trend(), NOTHING, list[tuple[float, int]]()
    changes = [phase * PERIOD, phase * PERIOD + 2.0, phase * PERIOD + 4.0]
    embedding, decoding = {ENCODERS: 9.0, DECODE: 1.0}, {ENCODERS: 1.0, DECODE: 9.0}
    for number in range(1, int(changes[-1] / PERIOD) + 1):
        now, before = number * PERIOD, board.shares
        for load, begin, end in zip((embedding, decoding), changes, changes[1:], strict=False):
            seconds = max(0.0, min(now, end) - max(now - PERIOD, begin))
            for slot, stage in ((ENCODER_SLOT, ENCODERS), (ENGINE_SLOT, DECODE)):
                board.end(slot, stage, load[stage] * seconds)
        look, last = LoadLook(now, board.used), look
        trend = follow_load(board, SPEC, trend, last, look)
        if board.shares != before:
            found.append((now, len(board.shares[ENCODERS]) - len(before[ENCODERS])))
    (first, more), (second, fewer) = found
    assert first < changes[0] + 1 and second < changes[1] + 1 and more > 0 > fewer
    follow_load(board, SPEC, trend, look, LoadLook(look.now + PERIOD, board.used))
    assert board.changes == 2, "nothing since"


def test_attention_beside_a_device_has_the_share_of_decode() -> None:
    phase = PhasePlan(threads=1, cpus=(0,))
    graph = serving_graph(["llm"], (), Placement(threads=1, cpus=(1,)))
    graph = place(graph, {"llm": ServicePlan(prefill=phase, decode=phase)})
    shares = {PREFILL: (0,), DECODE: (0,), SEARCHES: (1,)}
    artifact: Any = SimpleNamespace(serve=share_out(graph, shares), machine=None, choice=None)
    board = divide_cpu(artifact, EngineOptions(device="cuda:0"), SPEC)
    assert board is not None and board.shares == shares
    assert divide_cpu(artifact, EngineOptions(device="torch:cpu"), SPEC) is None


def test_a_changed_load_is_priced_by_what_was_measured_on_this_machine() -> None:
    figures = {"core_bandwidth": Figure(1e9, "measured here")}
    choice = PlanChoice(source=MEASURED, prefill=(), decode=(), pairs=(), figures=figures)
    found = [
        find_figures(cast("Artifact", SimpleNamespace(machine=machine, choice=choice)), SPEC)
        for machine in (SPEC, read_hardware("core:6"), None)
    ]
    assert [each.core_bandwidth for each in found] == [
        figures["core_bandwidth"],
        *[default_parameters(SPEC).core_bandwidth] * 2,
    ]


def test_memory_that_is_measured_slower_leaves_more_cores_to_those_who_compute() -> None:
    shares = divide(SPEC, default_parameters(SPEC), LOAD).shares
    seen = {PREFILL: 0.0, DECODE: 6.0, SEARCHES: 0.0, ENCODERS: 6.0}
    fast, slow = (
        replace(default_parameters(SPEC), package_bandwidth=Figure(bytes_, "measured here"))
        for bytes_ in (1e12, 2e10)
    )
    found = [redivide(SPEC, shares, seen, 1.0, figures) for figures in (fast, slow)]
    decoding = [len((each or shares)[DECODE]) for each in found]
    assert decoding[1] < decoding[0]


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
