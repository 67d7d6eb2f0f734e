"""A recording of a device: two batches lie beside each other, and the link has a track."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from dovetail.runtime.accel.sub_batch import ATTENTION, DEVICE, LINK
from tests.runtime.accel.engines import ASKED, PROMPTS, TwoPools, make_artifact
from tests.timelines import check_timeline

Spans = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("recording"))


def read_tracks(path: Path) -> Spans:
    """Return a recording's spans by the names of their tracks, in order of time."""
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: Spans = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(names[event["tid"]], []).append(event)
    return found


def test_attention_of_one_batch_lies_beside_the_other_ones_products(
    artifact: Path, tmp_path: Path, two_pools: TwoPools
) -> None:
    path = tmp_path / "timeline.json"
    # products cost so much that the planner splits what the CPU decodes
    with two_pools(artifact, 1, 200, slow=True, offload="full") as (app, plans):
        with app.record(path):
            app.generate(PROMPTS, **ASKED)
        app.generate(PROMPTS[:1], **ASKED)  # nobody records any longer
    assert any(len(plan.batches) == 2 for plan in plans)
    assert check_timeline(path).spans
    tracks = read_tracks(path)
    assert {DEVICE, ATTENTION, LINK} <= tracks.keys()
    names = {span["name"] for span in tracks[DEVICE]}
    assert {f"batch {i}: {part}" for i in (0, 1) for part in ("products", "attention")} <= names
    assert {"batch 0: qkv", "batch 0: attention", "batch 0: KV out"} <= {
        span["name"] for span in tracks[LINK]
    }
    # Between giving a batch's queries to the CPU and taking its attention back, the device is
    # given the other batch's work: so it is drawn, however long either takes
    beside = 0
    taken = [s for s in tracks[LINK] if s["name"].startswith("batch 1: ")]
    for out, back in pairwise(taken):
        if out["name"].endswith("qkv") and back["name"].endswith("attention"):
            inside = [
                s
                for s in tracks[DEVICE]
                if out["ts"] <= s["ts"] and s["ts"] + s["dur"] <= back["ts"]
            ]
            beside += any(s["name"] == "batch 0: products" for s in inside)
    assert beside >= 1
    attended = sum(s["name"] == "batch 1: attention" for s in tracks[ATTENTION])
    assert attended == sum(s["name"] == "batch 1: qkv" for s in taken)
