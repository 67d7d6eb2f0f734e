"""The mixed benchmark: its load, its ways, the clock of its client, and what is made of turns."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import App, load
from dovetail.runtime.hosting.generator import Job
from dovetail.tiny_world import LLAMA
from tests.repository import ROOT


@pytest.fixture(scope="module")
def mixed() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("mixed")


def test_a_load_is_drawn_once_in_order_at_its_rates(mixed: Any) -> None:
    load_ = mixed.arrivals(4.0, 500.0, seed=1)
    assert load_ == mixed.arrivals(4.0, 500.0, seed=1) != mixed.arrivals(4.0, 500.0, seed=2)
    assert [one.at for one in load_] == sorted(one.at for one in load_) and load_[-1].at < 500.0
    for kind, each in mixed.REQUESTS.items():
        count = sum(one.kind == kind for one in load_)
        assert count == pytest.approx(4.0 * each * 500.0, rel=0.15)


@pytest.mark.parametrize("there", [True, False])
def test_ways_share_out_all_cpus_and_peers_come_where_they_are(
    mixed: Any, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(mixed.mixed_peers, "there", lambda: there)
    for count in (2, 8):
        cpus = list(range(count))
        ways = mixed.ways(cpus)
        assert (mixed.SEPARATE in ways) == there and ways[mixed.JOINT] is None
        for name, shares in ways.items():
            if name.startswith(mixed.SPLIT):
                assert all(shares.values()) and {c for s in shares.values() for c in s} <= {*cpus}


def test_turns_are_compared_in_pairs(mixed: Any) -> None:
    names = (mixed.JOINT, mixed.UNPINNED, "split a", "split b")
    rates = ((8.0, 4.0, 2.0, 8.0), (2.0, 4.0, 2.0, 8.0), (9.0, 3.0, 1.0, 1.0))
    rows = [
        {"turn": turn, "way": name, "goodput": rate}
        for turn, each in enumerate(rates)
        for name, rate in zip(names, each, strict=True)
    ]
    rows = rows[:-4] + rows[-4:-3]  # the last turn was not ended
    found = mixed.summarise(rows)
    assert found["turns"] == 2 and found["joint_vs_unpinned"] == pytest.approx(1.0)
    assert found["joint_vs_split a"] == pytest.approx(2.0)
    assert found["joint_vs_best_static"] == found["joint_vs_split b"] == pytest.approx(0.5)


class Seen:
    """An app whose jobs are kept."""

    def __init__(self, app: App) -> None:
        self.app, self.jobs = app, list[Job]()

    def submit(self, prompt: str, **options: Any) -> Job:
        self.jobs.append(self.app.submit(prompt, **options))
        return self.jobs[-1]


def test_a_chat_is_timed_by_the_clock_of_who_asks(mixed: Any, tmp_path: Path) -> None:
    """As that of services of others is: what the engine says of itself leaves out the way to it."""
    compile_model(LLAMA, output=tmp_path / "app.dove", effort="none", threads=1)
    with load(tmp_path / "app.dove") as app:
        seen = Seen(app)
        first, each = mixed.AppClient(seen, ["a text"]).chat("Once")
        own = seen.jobs[0].result().metrics
    assert own.first_token is not None and each > 0
    assert first > own.first_token - own.arrival
