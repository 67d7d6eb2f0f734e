"""A second compile measures nothing: neither schedules nor plans, whatever the machine does."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from dovetail.compiler.measure.answers import Memory
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.plan import replay
from dovetail.compiler.plan.replay import ReplayTimes, measure_choice
from dovetail.compiler.search import choose
from dovetail.compiler.search.choose import ChoiceRequest, Chosen, choose_schedules
from dovetail.ir.artifact import FileEntry, Manifest
from dovetail.ir.cache import cache_directory
from dovetail.ir.plans import MEASURED, SIMULATED, PlanChoice
from dovetail.ir.tuning import RecordSet
from dovetail.topology.hardware import read_hardware
from tests.compiler.plan.test_replay import TRACE, make_choice
from tests.compiler.search.landscape import Landscape
from tests.compiler.search.test_choose import SCOPE, TARGET, WIDE

QUIET = ReplayTimes(prefill=((1.0,), (2.0,)), decode=((0.1,), (0.05,)), others=(0.0,))
BUSY = msgspec.structs.replace(QUIET, others=(1.0,))


# ---- schedules ----


@pytest.fixture
def landscape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Landscape:
    """A made-up machine that is measured instead of this one; only texts are there already."""
    texts = cache_directory() / "text"
    texts.mkdir(parents=True, exist_ok=True)
    (tmp_path / "text").symlink_to(texts)
    found = Landscape()
    monkeypatch.setattr(choose._Search, "_open", lambda search, part, stack: found)
    return found


def choose_again(folder: Path, landscape: Landscape, **changes: object) -> Chosen:
    """Choose on the landscape; its trials so far are forgotten."""
    landscape.asked.clear()
    request = ChoiceRequest(
        effort="fast", database=folder / "tuning.jsonl", measurable=True, budget=0.5, cache=folder
    )
    return choose_schedules(SCOPE, replace(request, **changes), lambda done, total: None)  # type: ignore[arg-type]


def test_a_measured_choice_is_not_searched_again(
    tmp_path: Path, landscape: Landscape, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = choose_again(tmp_path, landscape)
    assert first.measured > 0 and landscape.asked
    database = (tmp_path / "tuning.jsonl").read_bytes()
    monkeypatch.delattr(RecordSet, "_by_key")  # nor is any trial looked up
    second = choose_again(tmp_path, landscape)
    assert (second.measured, landscape.asked) == (0, [])
    assert (second.tables, second.records) == (first.tables, first.records)
    assert any("by an earlier compile" in note for note in second.notes)
    assert (tmp_path / "tuning.jsonl").read_bytes() == database
    (answer,) = (tmp_path / "answers").iterdir()
    assert answer.stat().st_size < len(database) / 4  # it names the trials


def test_new_records_or_another_budget_make_a_new_choice(
    tmp_path: Path, landscape: Landscape
) -> None:
    first = choose_again(tmp_path, landscape)
    other = choose_again(tmp_path, landscape, budget=0.6)
    assert not any("by an earlier compile" in note for note in other.notes)
    late = msgspec.structs.replace(first.records[0], when=datetime(2100, 1, 1, tzinfo=UTC))
    TuningDatabase(tmp_path / "tuning.jsonl").append([late])
    again = choose_again(tmp_path, landscape)
    assert not any("by an earlier compile" in note for note in again.notes)


def test_a_choice_from_disturbed_trials_waits_for_a_quiet_machine(
    tmp_path: Path, landscape: Landscape, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, load, runs = choose._Search.run, [0.0], []

    def disturbed(*args: object) -> Chosen:
        runs.append(args)
        return replace(search(*args), disturbed=10**6)  # type: ignore[arg-type]

    monkeypatch.setattr(choose._Search, "run", disturbed)
    monkeypatch.setattr(choose, "busy_cores", lambda pus: load[0])
    choose_again(tmp_path, landscape)
    load[0] = 2.0
    choose_again(tmp_path, landscape)
    assert len(runs) == 1
    load[0] = 0.0
    for _ in range(choose.SEARCHES + 2):
        choose_again(tmp_path, landscape)
    assert len(runs) == choose.SEARCHES


def test_a_lost_database_is_measured_anew(tmp_path: Path, landscape: Landscape) -> None:
    choose_again(tmp_path, landscape)
    (tmp_path / "tuning.jsonl").unlink()
    assert choose_again(tmp_path, landscape).measured > 0


# ---- plans ----


class Replays:
    """Stands for the child: gives these times, and counts how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: ReplayTimes | None = QUIET
        self.runs, self.busy = 0, 0.0
        monkeypatch.setattr(replay, "run_replay", self.run)
        monkeypatch.setattr(replay, "busy_cores", lambda cpus: self.busy)

    def run(self, job: replay.ReplayJob) -> ReplayTimes | None:
        self.runs += 1
        return self.times


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


def measure(folder: Path, library: str = "a") -> PlanChoice:
    """Measure two plans with a library of this hash, in an artifact that need not be run."""
    files = {
        "kernels/generic/kernels.so": FileEntry(bytes=1, sha256=library),
        "plans/choice.json": FileEntry(bytes=1, sha256=str(datetime.now(UTC))),
    }
    manifest = Manifest(
        producer="test", created="", model_fingerprint="", workload_fingerprint="",
        targets=(TARGET.name,), models=("llm",), effort="fast", files=files,
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    memory = Memory.of(read_hardware("package:1 core:4"), folder)
    return measure_choice(make_choice((0, 0), (1, 1)), folder, WIDE, TRACE, 1.0, memory)


def test_plans_are_replayed_once(tmp_path: Path, replays: Replays) -> None:
    first, second = measure(tmp_path), measure(tmp_path)
    assert replays.runs == 1
    assert first.source == second.source == MEASURED
    assert (first.pairs, first.decode) == (second.pairs, second.decode)
    assert "by an earlier compile" in second.replay and "earlier" not in first.replay


def test_other_kernels_are_replayed(tmp_path: Path, replays: Replays) -> None:
    measure(tmp_path)
    assert "earlier" not in measure(tmp_path, library="b").replay
    assert replays.runs == 2


@pytest.mark.parametrize("times", [BUSY, None])
def test_a_replay_that_came_to_nothing_waits_for_a_quiet_machine(
    tmp_path: Path, replays: Replays, times: ReplayTimes | None
) -> None:
    replays.times, replays.busy = times, 2.0
    first, second = measure(tmp_path), measure(tmp_path)
    assert (replays.runs, first.source, second.source) == (1, SIMULATED, SIMULATED)
    assert "by an earlier compile" in second.notes[-1]
    replays.busy, replays.times = 0.0, QUIET
    assert (measure(tmp_path).source, replays.runs) == (MEASURED, 2)
    assert (measure(tmp_path).source, replays.runs) == (MEASURED, 2)


def test_replays_are_not_tried_for_ever(tmp_path: Path, replays: Replays) -> None:
    replays.times = BUSY
    for _ in range(replay.REPLAYS + 3):
        assert measure(tmp_path).source == SIMULATED
    assert replays.runs == replay.REPLAYS
