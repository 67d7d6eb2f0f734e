"""A recorded timeline as a picture: every track with its spans, rows without overlaps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("matplotlib")

from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.app import load
from tests.repository import ROOT
from tests.runtime.conftest import make_artifact, toy_library

sys.path.insert(0, str(ROOT / "benchmarks"))

from draw_timeline import Span, draw, pack_rows, read_arrows, read_spans

__all__ = ["make_artifact", "toy_library"]  # fixtures


def test_what_was_recorded_is_drawn(make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    with load(make_artifact()) as app:
        with app.record(tmp_path / "trace.json"):
            found = app.generate([[1, 2, 3], [4]], max_tokens=5, ignore_eos=True)
    events = msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"]
    spans = list(read_spans(events))
    steps = [span for span in spans if span.track == "engine"]
    assert {span.name for span in steps} == {"forward"} and len(steps) >= 5
    assert len([span for span in spans if span.track == "requests"]) == len(found)
    assert len(read_arrows(events)) == len(found)
    draw(events, tmp_path / "all.svg", (0.0, max(span.end for span in spans)))
    text = (tmp_path / "all.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("engine", "requests", "prefill", "decode"))
    draw(events, tmp_path / "none.svg", (1e6, 1e6 + 1))
    assert "<!-- engine -->" not in (tmp_path / "none.svg").read_text()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_rows_hold_spans_that_do_not_overlap(places: list[tuple[int, int]]) -> None:
    spans = [Span("track", str(i), start, start + n) for i, (start, n) in enumerate(places)]
    rows = pack_rows(spans)
    assert sorted(s.name for row in rows for s in row) == sorted(s.name for s in spans)
    for row in rows:
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
