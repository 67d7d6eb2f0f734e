"""Schedules of a machine that is not at hand: from its records, else from a model of others'."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dovetail.codegen.library import index_library
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.measure.recorder import Identity, Recorder
from dovetail.compiler.rules.payload import make_payload
from dovetail.compiler.rules.tables import default_tables
from dovetail.compiler.rules.workload import DEFAULT_WORKLOAD
from dovetail.compiler.search.choose import ChoiceRequest, PolicyChooser, choose_schedules
from dovetail.compiler.search.parts import SearchScope
from dovetail.compiler.search.policy import DEFAULT, MEASURED, PREDICTED
from dovetail.compiler.search.rules import Recall
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.compiler.search.tables import EFFORTS, search_tables, tuning_library
from dovetail.ir.tuning import RecordSet
from dovetail.topology.hardware import read_hardware
from tests.compiler.records import make_record
from tests.compiler.rules.test_tables import SPEC, plan
from tests.compiler.search.landscape import TARGET, Landscape, bowl, task

WIDE = msgspec.structs.replace(SPEC, weight_dtype="f32")
THERE = msgspec.structs.replace(
    read_hardware(), cpu_model="a large machine", isa_flags=tuple(sorted(TARGET.cpu_features))
)
ELSEWHERE = msgspec.structs.replace(THERE, cpu_model="a machine that nobody has tuned on")
SCOPE = SearchScope(
    spec=WIDE,
    payload=make_payload(WIDE, DEFAULT_WORKLOAD, 64, 8),
    plans=(plan(2, 2),),
    hardware=THERE,
    target=TARGET,
)


def record(path, cost):
    """Search on a made-up machine; return the tables that were chosen there."""
    index = index_library(tuning_library(WIDE, TARGET))
    recorder = Recorder(Landscape(cost), Identity.of(THERE, index), TuningDatabase(path))
    return search_tables(
        WIDE, SCOPE.payload, SCOPE.plans, THERE, recorder, target=TARGET, budget_seconds=1e6
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Records that were made on the large machine, and what was chosen there."""
    path = tmp_path_factory.mktemp("choose") / "tuning.jsonl"
    return path, record(path, bowl)


def choose(path, hardware, effort="fast"):
    request = ChoiceRequest(effort=effort, database=path, measurable=False)
    scope = replace(SCOPE, hardware=hardware)
    return choose_schedules(scope, request, lambda done, total: None)


def products(tables, *fields):
    names = fields or ("kernel", "schedule", "m_lo")
    return {
        (table.op, *(getattr(row, name) for name in names))
        for table in tables
        for row in table.rows
        if table.n
    }


def sources(chosen):
    return {source for _, source in products(chosen.tables, "source")}


def test_a_machine_is_served_by_its_own_records(database):
    path, tables = database
    chosen = choose(path, THERE)
    assert products(chosen.tables) == products(tables)
    assert sources(chosen) == {MEASURED, DEFAULT}  # the rules serve M beyond the largest point
    assert (chosen.measured, len(chosen.records) > 0) == (0, True)
    (note,) = chosen.notes
    assert f"{TARGET.name} cannot be measured here" in note
    assert "0 by a cost model" in note


def unlike_the_rules(case, panels, values):
    """The bowl, but tiles of three panels are best, which the rules take for few M only."""
    return bowl(case, panels, values) * (1 + abs(panels - 3))


def test_a_machine_without_records_is_served_by_a_model_of_the_others(tmp_path):
    path = tmp_path / "tuning.jsonl"
    record(path, unlike_the_rules)
    chosen = choose(path, ELSEWHERE)
    assert sources(chosen) == {PREDICTED, DEFAULT}
    rules = default_tables(WIDE, TARGET, SCOPE.plans, ELSEWHERE)
    assert products(chosen.tables) != products(rules)
    assert chosen.records == ()
    (note,) = chosen.notes
    assert "of the schedule rows 0 are from records" in note and "fitted to 0" not in note
    assert {t.op for t in chosen.tables} == {t.op for t in rules}


def test_times_of_older_kernels_of_a_machine_teach_nothing_about_it(database, tmp_path):
    path = tmp_path / "older.jsonl"
    older = [msgspec.structs.replace(r, build="older") for r in TuningDatabase(database[0])]
    TuningDatabase(path).append(older)
    assert sources(choose(path, THERE)) == {DEFAULT}


def test_without_any_record_the_rules_serve(tmp_path):
    chosen = choose(tmp_path / "none.jsonl", ELSEWHERE)
    assert sources(chosen) == {DEFAULT}
    assert "0 by a cost model fitted to 0 trials" in chosen.notes[0]


def test_a_search_ends_for_good_where_further_gain_is_improbable(tmp_path):
    identity = Identity.of(THERE, index_library(tuning_library(WIDE, TARGET)))
    recorder = Recorder(Landscape(bowl), identity, RecordSet())
    effort, database = EFFORTS["fast"], TuningDatabase(tmp_path / "tuning.jsonl")
    chooser = PolicyChooser(TARGET, effort, recorder, database, {})
    assert isinstance(chooser.choose(task()), Sandwich)
    for m in range(1, 20):
        lost = make_record(shape={"n": 32, "k": 64, "m": m}, ratio=(1.0, 1.0))
        recorder.trials.append(lost)
    assert isinstance(chooser.choose(task()), Recall)
    recorder.trials.clear()
    assert isinstance(chooser.choose(task()), Recall)
    thorough = PolicyChooser(TARGET, EFFORTS["full"], recorder, database, {})
    recorder.trials += [lost] * 99
    assert isinstance(thorough.choose(task()), Sandwich)


def test_without_effort_nothing_is_read(database):
    chosen = choose(database[0], THERE, effort="none")
    assert sources(chosen) == {DEFAULT}
    assert chosen.notes == ()
