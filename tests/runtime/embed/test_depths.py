"""Depths from lines: the published pairs, Eq. 11, and what is reported."""

from __future__ import annotations

import pytest

from dovetail.ir.errors import SpecError
from dovetail.runtime.embed.depths import decide_depths
from dovetail.runtime.embed.devices import DevicePlan, EmbeddingPlan
from dovetail.runtime.embed.line import FittedLine, Line

PLAN = EmbeddingPlan((DevicePlan("npu", "npu"), DevicePlan("cpu", "cpu")), True)


def lines(npu: Line, cpu: Line, length: int = 75) -> dict[str, dict[int, FittedLine]]:
    return {"npu": {length: FittedLine(npu, ())}, "cpu": {length: FittedLine(cpu, ())}}


def test_closed_depths_are_those_of_the_paper() -> None:
    found = decide_depths(PLAN, lines(Line(0.018, 0.27), Line(0.085, 0.32)), 1.0, "closed")
    assert {name: each[0].depth for name, each in found.devices.items()} == {"npu": 40, "cpu": 8}
    assert found.heterogeneous and not found.notes


def test_a_cpu_that_misses_the_slo_alone_gets_no_queue_and_is_reported() -> None:
    found = decide_depths(PLAN, lines(Line(0.018, 0.27), Line(0.2, 0.9)), 1.0, "closed")
    assert found.devices["cpu"][0].depth == 0
    assert not found.heterogeneous
    assert "Eq. 11" in found.notes[0] and "1.1 s" in found.notes[0]
    assert "heterogeneous mode is off" in found.notes[1]
    specs = found.queue_specs(PLAN)
    assert [(s.name, s.accelerator, s.depths) for s in specs] == [
        ("npu", True, (40,)), ("cpu", False, (0,)),
    ]  # fmt: skip


def test_a_class_that_is_too_long_for_the_cpu_leaves_the_short_ones_to_it() -> None:
    short, long = Line(0.01, 0.1), Line(0.5, 0.8)
    both = {
        "npu": {75: FittedLine(short, ()), 500: FittedLine(long.scaled(0.2), ())},
        "cpu": {75: FittedLine(short, ()), 500: FittedLine(long, ())},
    }
    found = decide_depths(PLAN, both, 1.0, "closed")
    assert [each.depth for each in found.devices["cpu"]] == [90, 0]
    assert found.heterogeneous and len(found.notes) == 1


def test_tested_depths_count() -> None:
    both = lines(Line(0.018, 0.27), Line(0.085, 0.32))
    found = decide_depths(PLAN, both, 1.0, "closed")
    tested = decide_depths(PLAN, both, 1.0, "closed", tested={("npu", 75): 44})
    assert tested.devices["npu"][0].depth == 44
    assert tested.devices["cpu"] == found.devices["cpu"]


def test_what_makes_no_sense_is_refused() -> None:
    good = lines(Line(0.018, 0.27), Line(0.085, 0.32))
    with pytest.raises(SpecError, match="SLO"):
        decide_depths(PLAN, good, 0.0)
