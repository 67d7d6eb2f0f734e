"""Timelines: what is recorded comes out in the trace format, and what breaks it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import SpecError
from dovetail.runtime.timeline import Timeline
from tests.timelines import TimelineFacts, check_timeline


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def record() -> Timeline:
    clock = Clock()
    timeline = Timeline(clock)
    cpu, gpu = timeline.track("engine", "cpu"), timeline.track("engine", "gpu")
    assert timeline.track("engine", "cpu") == cpu != gpu
    requests = timeline.track("requests", "all")
    with timeline.measure(cpu, "step", tokens=3):
        clock.seconds += 0.5
        timeline.span(cpu, "attention", 100.1, 100.2)
        timeline.span(gpu, "linear", 100.0, 100.4)
    timeline.life(requests, "request 0", 0, 99.0, 101.0, prompt=7)
    timeline.life(requests, "request 1", 1, 99.5, 101.5)
    timeline.count(cpu, "free blocks", 100.0, blocks=9)
    timeline.mark(cpu, "cancelled", 100.3)
    timeline.arrow(0, gpu, 100.2)
    timeline.arrow(0, cpu, 100.45)
    timeline.arrow(1, cpu, 100.45)  # leads nowhere, so it is not drawn
    return timeline


def test_what_was_recorded_comes_out(tmp_path: Path) -> None:
    record().write(tmp_path / "t.json")
    facts = check_timeline(tmp_path / "t.json")
    assert facts == TimelineFacts(spans=5, tracks=3, arrows=1, seconds=2.5)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert named == {"engine", "cpu", "gpu", "requests", "all"}
    (step,) = [e for e in events if e["name"] == "step"]
    assert (step["ts"], step["dur"], step["args"]) == (1e6, 0.5e6, {"tokens": 3})
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)


def test_an_empty_timeline_is_one_too(tmp_path: Path) -> None:
    Timeline().write(tmp_path / "t.json")
    assert check_timeline(tmp_path / "t.json") == TimelineFacts(0, 0, 0, 0.0)


def test_events_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    timeline = Timeline(max_events=2)
    track = timeline.track("a", "b")
    timeline.span(track, "x", 0, 1)
    timeline.arrow(1, track, 0)
    timeline.arrow(1, track, 1)
    timeline.span(track, "y", 1, 2)
    timeline.write(tmp_path / "t.json")
    assert check_timeline(tmp_path / "t.json").spans == 1
    assert json.loads((tmp_path / "t.json").read_text())["otherData"] == {"dropped": 2}


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(1e-9, 10)),
        max_size=30,
    ),
    st.floats(-1e6, 1e6),
)
def test_any_steps_that_follow_each_other_are_well_formed(
    tmp_path: Path, steps: list[tuple[int, float, float, float]], origin: float
) -> None:
    timeline = Timeline()
    now = origin
    for request, head, gap, length in steps:
        track = timeline.track("engine", "steps")
        timeline.span(track, "step", now, now + head + length)
        timeline.span(track, "kernel", now + head, now + head + length)
        timeline.arrow(request, track, now + head)
        now += head + length + gap
    timeline.write(tmp_path / "t.json")
    assert check_timeline(tmp_path / "t.json").spans == 2 * len(steps)


SPAN = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 10}
ARROW = {"cat": "request", "id": 1, "name": "r", "pid": 1, "tid": 1}


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([{"name": "a"}], "phase"),
        ([7], "phase"),
        ([{**SPAN, "ph": "Z"}], "phase"),
        ([{k: v for k, v in SPAN.items() if k != "dur"}], "lacks dur"),
        ([{k: v for k, v in SPAN.items() if k != "name"}], "a name"),
        ([{**SPAN, "dur": -1}], "dur"),
        ([{**SPAN, "ts": "0"}], "ts"),
        ([SPAN, {**SPAN, "ts": 5}], "overlap"),
        ([{**SPAN, "ph": "E"}], "without a begin"),
        ([{**SPAN, "ph": "B"}], "without an end"),
        ([{**SPAN, **ARROW, "ph": "b", "ts": 1}], "without an end"),
        ([{**SPAN, **ARROW, "ph": "e", "ts": 1}], "without a begin"),
        ([SPAN, {**ARROW, "ph": "s", "ts": 1}], "goes s"),
        ([SPAN, {**ARROW, "ph": "f", "ts": 1}, {**ARROW, "ph": "s", "ts": 2}], "goes fs"),
        ([SPAN, {**ARROW, "ph": "s", "ts": 1}, {**ARROW, "ph": "f", "ts": 11}], "no span"),
    ],
)
def test_what_breaks_the_format_is_named(tmp_path: Path, events: list[Any], words: str) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(SpecError, match=words):
        check_timeline(tmp_path / "t.json")


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": 3}', "3"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(SpecError, match=r"t\.json"):
        check_timeline(tmp_path / "t.json")


def test_begins_and_ends_and_bare_lists_are_read(tmp_path: Path) -> None:
    events = [{**SPAN, "ph": "B"}, {**SPAN, "ph": "E", "ts": 4}, {**SPAN, "ts": 1, "dur": 2}]
    (tmp_path / "t.json").write_text(json.dumps(events))
    assert check_timeline(tmp_path / "t.json").spans == 2
