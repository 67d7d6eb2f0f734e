"""A recording shows engine, worker and encoder beside each other, and an arrow per workflow."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from dovetail import register_transformation, unregister_transformation
from dovetail.runtime.app import App
from dovetail.runtime.flows.events import Rewritten
from dovetail.runtime.flows.recorder import FIRST_FLOW
from tests.runtime.flows.control.test_transformations import Halve
from tests.runtime.flows.test_service import GRAPHS, question
from tests.timelines import check_timeline


def test_a_recording_has_a_track_for_each_device_and_an_arrow_for_each_workflow(
    app: App, tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    with app.record(path):
        jobs = [app.submit_workflow(GRAPHS["hyde"], question(i)) for i in range(4)]
        for job in jobs:
            job.result()
    facts = check_timeline(path)
    events: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    names = {"engine", "memory", "requests", "workflows", "retrieval worker", "encoder"}
    assert set(tracks.values()) == names and facts.arrows >= 4
    arrows = defaultdict(set)
    for event in events:
        if event["ph"] in "stf" and event["id"] >= FIRST_FLOW:
            arrows[event["id"]].add(tracks[event["pid"], event["tid"]])
    assert list(arrows.values()) == [{"engine", "retrieval worker", "encoder"}] * 4
    lives = [e for e in events if e["ph"] == "b" and tracks[e["pid"], e["tid"]] == "workflows"]
    assert len(lives) == 4 * 3
    assert {e["args"]["kind"] for e in lives} == {"generation", "retrieval"}
    scans = [e for e in events if e["ph"] == "X" and e["name"] == "scan"]
    assert sum(scan["args"]["searches"] for scan in scans) >= 4


def test_what_a_registered_transformation_is_to_gain_is_told(app: App, tmp_path: Path) -> None:
    register_transformation(Halve)
    try:
        with app.record(tmp_path / "timeline.json"):
            job = app.submit_workflow(GRAPHS["one-shot"], question(1))
            told = [(e.transformation, e.gain) for e in job if isinstance(e, Rewritten)]
    finally:
        unregister_transformation("halve")
    result = job.result()
    assert ("halve", 0.25) in told
    assert [rewrite[::2] for rewrite in result.rewrites] == told
    events = msgspec.json.decode((tmp_path / "timeline.json").read_bytes())["traceEvents"]
    (mark,) = [event for event in events if event["name"] == "halve"]
    assert mark["args"] == {"node": "search#0", "gain": 0.25}
    app.run(GRAPHS["one-shot"], question(1))
    assert "halve" not in {
        r.transformation for r in app.run(GRAPHS["one-shot"], question(2)).rewrites
    }
