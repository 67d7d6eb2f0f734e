"""What a search bought end to end: what is measured, what is kept, and once for real."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler import pipeline
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.plan import end_to_end
from dovetail.compiler.plan.end_to_end import PHASES, compare_tables, differ, judge, put_rules
from dovetail.compiler.plan.replay import ReplayJob, ReplayTimes, run_replay
from dovetail.compiler.rules.tables import default_tables
from dovetail.compiler.search.choose import next_win
from dovetail.compiler.search.policy import FINAL_ROUNDS
from dovetail.ir.model import APART, OWN_GATE
from dovetail.ir.schedule import ScheduleFile
from dovetail.runtime.artifact import open_artifact
from dovetail.topology.hardware import read_hardware
from tests.compiler.records import make_record
from tests.compiler.rules.test_tables import SPEC, plan
from tests.compiler.search.landscape import TARGET
from tests.compiler.virtual import use_virtual_meters
from tests.models import save_model

ROUNDS = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20)


def rules_of(one):
    return default_tables(SPEC, TARGET, [one], read_hardware())


def found_of(one):
    """The rules' tables, but for the products' prefetch distance: what a search might find."""
    return tuple(
        msgspec.structs.replace(
            table,
            rows=tuple(
                msgspec.structs.replace(row, schedule=(*row.schedule[:7], 64, row.schedule[8]))
                for row in table.rows
            ),
        )
        if table.n
        else table
        for table in rules_of(one)
    )


def make_times(prefill, decode):
    return ReplayTimes(prefill=prefill, decode=decode, others=(0.0,) * len(prefill[0]))


@given(ROUNDS)
def test_only_what_is_surely_faster_is_kept(ratios: list[float]) -> None:
    beside = tuple(1.0 + i for i in range(len(ratios)))  # the machine drifts
    mine = tuple(r * b for r, b in zip(ratios, beside, strict=True))
    gain = judge(make_times((mine, beside), (mine, beside)), PHASES)["decode"]
    faster = sum(r < 1 for r in ratios)
    if gain.kept:
        assert len(ratios) >= 7 and faster > len(ratios) / 2 and gain.gain >= gain.least > 1
    if faster == len(ratios) >= 7:
        assert gain.kept
    assert (gain.least == 0) == (len(ratios) < 7)


def test_busy_rounds_count_only_where_quiet_ones_are_too_few() -> None:
    mine, beside = (0.5,) * 7 + (3.0,) * 7, (1.0,) * 14
    times = ReplayTimes(
        prefill=(mine, beside), decode=(mine, beside), others=(0.0,) * 7 + (2.0,) * 7
    )
    assert judge(times, PHASES)["decode"].gain == 2.0
    fewer = msgspec.structs.replace(times, others=(0.0,) * 6 + (2.0,) * 8)
    assert not judge(fewer, PHASES)["decode"].kept


@pytest.mark.parametrize("one", [plan(2, 2), plan(4, 2)])
@pytest.mark.parametrize("lost", [(), ("prefill",), ("decode",), PHASES])
def test_a_lost_phase_runs_the_rules_and_the_other_what_was_found(one, lost) -> None:
    found, rules = found_of(one), rules_of(one)
    assert all(differ(found, rules, TARGET.name, phase, one) for phase in PHASES)
    kept = put_rules(found, rules, TARGET.name, one, lost)
    for phase in PHASES:
        assert differ(kept, rules, TARGET.name, phase, one) == (phase not in lost)
        assert differ(kept, found, TARGET.name, phase, one) == (phase in lost)


def test_a_lost_phase_has_no_gate_of_a_users_own() -> None:
    one = plan(2, 2)
    rules = rules_of(one)
    gates = [
        msgspec.structs.replace(rules[-1], op=OWN_GATE, n=0, k=0, phase=phase) for phase in PHASES
    ]
    gates += [msgspec.structs.replace(gate, op=APART, n=64, k=64) for gate in gates]
    kept = put_rules((*rules, *gates), rules, TARGET.name, one, ["prefill"])
    assert [table.phase for table in kept if table.op == OWN_GATE] == ["decode"]
    assert differ(kept, rules, TARGET.name, "decode", one)
    none = put_rules((*rules, *gates), rules, TARGET.name, one, PHASES)
    assert {table.op for table in none} == {table.op for table in rules}


def test_what_is_the_rules_own_is_not_measured() -> None:
    one = plan(2, 2)
    rules = rules_of(one)
    nothing: list = [None] * 5
    found = compare_tables(rules, rules, TARGET.name, one, Path(), *nothing)
    assert found == (rules, None)


def test_a_win_is_improbable_once_many_shapes_were_tried_in_vain() -> None:
    lost = [make_record(shape={"n": 32, "k": 64, "m": m}, ratio=(1.0, 1.0)) for m in range(1, 20)]
    assert next_win([]) == 0.5 and next_win(lost) < 0.05 <= next_win(lost[:-2])
    sure = make_record(rounds=FINAL_ROUNDS, ratio=(0.9, 0.95), shape={"n": 32, "k": 64, "m": 99})
    assert next_win([*lost, sure]) > 0.09
    doubtful = msgspec.structs.replace(sure, ratio=(0.9, 1.01))
    assert next_win([*lost, doubtful]) < next_win(lost)
    untold = msgspec.structs.replace(sure, rounds=3)
    assert next_win([*lost, untold]) == next_win(lost)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("end") / "model", "llama")


def read_tables(folder: Path):
    data = (folder / "models/llm/schedules.json").read_bytes()
    return msgspec.json.decode(data, type=ScheduleFile).tables


@pytest.mark.parametrize("faster", [True, False])
def test_a_compile_runs_both_and_keeps_what_is_faster(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """The two really run; their times are then replaced, which alone no test can rely on."""
    ran: list[ReplayJob] = []

    def replay(job, artifact, memory):  # type: ignore[no-untyped-def]
        assert run_replay(msgspec.structs.replace(job, rounds=1, least_rounds=2)) is not None
        ran.append(job)
        times = (0.5 if faster else 2.0,) * 7, (1.0,) * 7
        return make_times(times, times), ""

    use_virtual_meters(monkeypatch)
    monkeypatch.setattr(pipeline, "compare_tables", end_to_end.compare_tables)
    monkeypatch.setattr(end_to_end, "replay_once", replay)
    options = {"threads": 1, "budget": 3.0, "database": tmp_path / "db"}
    report = compile_model(model, output=tmp_path / "a.dove", **options)
    assert len(ran) == 1 and ran[0].tables[0] != ran[0].tables[1]
    assert report.end_to_end.decode.kept == report.end_to_end.prefill.kept == faster
    assert report.end_to_end.decode.gain == (2.0 if faster else 0.5)
    assert faster or report.rows.keys() == {"default"}
    serves = read_tables(tmp_path / "a.dove")
    none = compile_model(model, output=tmp_path / "n.dove", **options | {"effort": "none"})
    artifact = open_artifact(report, read_hardware())
    for phase in PHASES:
        other = differ(
            serves, read_tables(Path(none.path)), artifact.target, phase, artifact.service
        )
        assert other == faster
    broken = tuple(
        msgspec.structs.replace(t, rows=(msgspec.structs.replace(t.rows[0], kernel="none"),))
        for t in serves
    )
    refused = msgspec.structs.replace(ran[0], artifact=report.path, tables=(serves, broken))
    assert run_replay(refused) is None  # it would not be, were the artifact's own tables run
