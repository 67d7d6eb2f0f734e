"""Tuning jobs on a small model: measured, recorded, killed, resumed, and split over workers."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.measure.meter import SKIPPED, Measurement, Meter, StoppedError
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.rules.schedules import LINEAR, GemmOp
from dovetail.compiler.search import attention_search
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.tune import model as tune_module
from dovetail.compiler.tune.job_file import JobFile
from dovetail.compiler.tune.model import tune_model
from dovetail.compiler.tune.workers import run_items
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ScheduleError, SpecError
from dovetail.ir.tuning import RecordSet, decode_record
from dovetail.topology.hardware import read_hardware
from tests.compiler.measure.test_recorder import CASE, Script, identity, names, recorder
from tests.compiler.virtual import VirtualMeter, use_virtual_meters
from tests.models import save_model

ITEMS = tuple(
    SearchTask(
        GemmOp("o", LINEAR, n, 16, "f32"),
        host_target(),
        PhasePlan(threads=1, cpus=()),
        read_hardware(),
        (1,),
    )
    for n in (16, 32, 48, 64)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tune") / "model", "llama")


class Switched(Script):
    """A scripted measurer that waits for the test before it answers, and can be stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.stopped = threading.Event(), False

    def stop(self):
        self.stopped = True
        self.go.set()

    def measure(self, case, candidates, *, rounds, seconds):
        self.go.wait()
        if self.stopped:
            raise StoppedError
        return super().measure(case, candidates, rounds=rounds, seconds=seconds)


def search(item, measurer, seconds):
    measurer.measure(CASE, names("default", "fast"), rounds=item.op.n, seconds=seconds)


def test_items_are_shared_out_among_the_recorders():
    records, done = RecordSet(), []
    scripts = [Switched(), Switched()]
    for script in scripts:
        script.go.set()
    workers = [recorder(script, records) for script in scripts]
    run_items(ITEMS, workers, search, 10.0, lambda: done.append(1))
    assert len(done) == len(ITEMS) and len(records.known) == 2 * len(ITEMS)
    assert sum(len(script.asked) for script in scripts) == len(ITEMS)


def test_an_interrupt_stops_every_worker_and_keeps_what_is_finished():
    records, scripts = RecordSet(), [Switched(), Switched()]
    scripts[0].go.set()
    workers = [recorder(script, records) for script in scripts]

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_items(ITEMS, workers, search, 10.0, interrupt)
    assert scripts[0].stopped and scripts[1].stopped
    assert len(records.known) == 2 * len(scripts[0].asked) > 0
    assert scripts[1].asked == []  # its batch was in flight, and is the one that is lost


def test_a_failure_of_one_item_ends_the_job():
    def fail(item, measurer, seconds):
        raise SpecError("no such thing")

    with pytest.raises(SpecError, match="no such thing"):
        run_items(ITEMS, [recorder(Switched(), RecordSet())], fail, 1.0, lambda: None)


def test_workers_are_pinned_to_cores_of_their_own(monkeypatch):
    jobs = []

    def run(self, job):
        jobs.append(job)
        return {c: Measurement(candidate=c, status=SKIPPED) for c in job.candidates}

    monkeypatch.setattr(Meter, "_run", run)
    library = identity("fast").index
    with Meter(Path("tuning.so"), library, pool_bytes=1, cpus=(4, 5)) as meter:
        meter.measure(CASE, names("fast"), rounds=1, seconds=1)
    assert [job.case.cpus for job in jobs] == [(4,)]


@pytest.fixture
def asked(monkeypatch):
    """The trials that jobs and compiles run, which take virtual time."""
    return use_virtual_meters(monkeypatch)


def tune(model, database, **options):
    return tune_model(model, database=database, threads=1, budget=2.0, **options)


def test_a_job_fills_the_database_and_a_compile_uses_it(model, tmp_path, asked):
    database, seen = tmp_path / "tuning.jsonl", []
    first = tune(model, database, progress=seen.append)
    assert 0 < first.measured == first.trials == len(TuningDatabase(database))
    assert (first.progress.done, first.workers) == (first.progress.items, 1)
    assert [at.trials for at in seen] == sorted(at.trials for at in seen)
    assert all(point.gain > 0 and point.gflops > 0 for point in first.points)
    ran = asked.copy()
    report = compile_model(
        model, output=tmp_path / "a.dove", database=database, threads=1, budget=1.0
    )
    assert asked == ran and 0 == report.measured < report.trials
    again = tune(model, database)  # without --missing all is measured anew
    assert asked == ran * 2 and again.measured == again.trials == first.trials
    before = TuningDatabase(database)
    missing = tune(model, database, missing=True)
    assert missing.trials - missing.measured >= first.trials / 2
    assert_kept(before, TuningDatabase(database))
    assert len(TuningDatabase(database)) == first.trials + missing.measured
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.dove", "tuning.jsonl", "tuning.jsonl.lock"
    ]  # fmt: skip


def assert_kept(before, after):
    """No trial on record was run again."""
    assert {r.key: r.when for r in before}.items() <= {r.key: r.when for r in after}.items()


def test_a_job_on_this_machine_ends_whatever_else_runs(model, tmp_path):
    database = tmp_path / "tuning.jsonl"
    report = tune(model, database, workers=1)
    assert report.progress.done == report.progress.items and not report.progress.failed
    ran = list(TuningDatabase(database))
    # really measured: times of this machine, each beside its reference, whether or not they count
    assert {r.status for r in ran} == {"ok"} and len({r.seconds for r in ran}) > 1
    assert all(0 < r.low <= r.seconds < 1 and r.cost > 0 and r.reference for r in ran)
    assert {r.target for r in ran} == {host_target().name}
    assert report.measured <= report.trials
    assert len(report.points) > 0 or not report.measured


def attention_records(database):
    kinds = (attention_search.DECODE, attention_search.PREFILL)
    return {record.key: record for record in TuningDatabase(database) if record.kind in kinds}


def test_attention_goes_the_same_road(model, tmp_path, monkeypatch, asked):
    isa = host_target().isa
    variants = {(attention_search.DECODE, isa): ({"CHUNK": 16},)}
    monkeypatch.setattr(attention_search, "COMBINATIONS", variants)
    steps = {attention_search.DECODE: (), attention_search.PREFILL: ()}
    monkeypatch.setattr(attention_search, "STEPS", steps)
    database = tmp_path / "tuning.jsonl"
    asks = {"effort": "full", "kv_dtype": "bf16", "max_context": 48}
    first = tune(model, database, **asks)
    found = attention_records(database)
    assert sorted(r.status for r in found.values()) == ["ok"] * 3  # a variant and two defaults
    assert {(r.dtype, r.shape["context"]) for r in found.values()} == {("bf16", 48)}
    shown = [point for point in first.points if point.kind == attention_search.DECODE]
    assert len(shown) == 1 and shown[0].gflops > 0
    assert first.progress.done == first.progress.items == 7
    asked.clear()
    tune(model, database, missing=True, **asks)
    assert attention_records(database) == found
    report = compile_model(
        model, output=tmp_path / "a.dove", database=database, threads=1, budget=1.0, **asks
    )
    assert report.measured < report.trials
    assert attention_records(database) == found
    assert not any(
        case.kind in (attention_search.DECODE, attention_search.PREFILL) for case, _, _ in asked
    )
    kept = (tmp_path / "a.dove/tuning.jsonl").read_bytes().splitlines()
    assert found.keys() <= {decode_record(line).key for line in kept}


def test_a_stopped_job_is_resumed(model, tmp_path, asked):
    database = tmp_path / "tuning.jsonl"

    def stop(at):
        if at.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(model, database, progress=stop)
    kept = TuningDatabase(database)
    assert len(kept) > 0 and len(list(tmp_path.glob("*.job-*"))) == 1
    said = []
    with pytest.raises(KeyboardInterrupt):  # this is another job
        steps = {"max_step_tokens": 4, "max_step_sequences": 2}
        tune(model, tmp_path / "other.jsonl", progress=stop, say=said.append, **steps)
    assert said[0] == "reading model" and not any("continuing" in stage for stage in said)
    report = tune(model, database, say=said.append)
    assert "continuing the job that was interrupted" in said
    # with time left over it finds better ones, and confirms those in place of what it found before
    assert report.trials - report.measured >= len(kept) / 2
    assert_kept(kept, TuningDatabase(database))
    assert report.progress.done == report.progress.items
    assert list(tmp_path.glob("tuning.jsonl.job-*")) == []
    assert tune(model, database).measured >= len(kept) / 2  # that job is complete: this is another


def test_kernels_that_are_wrong_are_counted_and_never_served(model, tmp_path, monkeypatch, asked):
    monkeypatch.setattr(VirtualMeter, "status", "wrong")
    database = tmp_path / "tuning.jsonl"
    report = tune(model, database)
    assert report.progress.failed == {"wrong": report.trials} and report.points == ()
    assert report.progress.done == report.progress.items
    with pytest.raises(ScheduleError, match="is right on"):
        compile_model(model, output=tmp_path / "a.dove", database=database, threads=1, budget=1.0)
    assert not (tmp_path / "a.dove").exists()


def test_a_resumed_job_keeps_its_plans_and_begins_anew_with_other_kernels(
    model, tmp_path, monkeypatch, asked
):
    database = tmp_path / "tuning.jsonl"

    def stop(at):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(model, database, progress=stop)
    (file,) = tmp_path.glob("*.job-*")
    job = msgspec.json.decode(file.read_bytes(), type=JobFile)
    for options in ({}, {"resume": False}):
        name = "others" if not options else job.name
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(job, name=name)))
        report = tune(model, database, **options)
        assert report.measured == report.trials and not file.exists()
    file.write_bytes(b"damaged")
    with pytest.raises(SpecError, match=r"is damaged .*--no-resume"):
        tune(model, database)
    file.unlink()
    file.mkdir()  # there, and nothing that can be read
    with pytest.raises(SpecError, match=r"cannot read .*choose another --db"):
        tune(model, database)
    file.rmdir()
    file.write_bytes(msgspec.json.encode(job))
    # the figures that plans are chosen by may be others now: nobody asks for them
    monkeypatch.delattr(tune_module, "choose_plans")
    monkeypatch.delattr(tune_module, "figures_of")
    here = read_hardware()  # so may its memory: hosts take some from virtual machines
    node = msgspec.structs.replace(here.nodes[0], memory_bytes=here.nodes[0].memory_bytes - 4096)
    less = {"memory_bytes": here.memory_bytes - 4096, "nodes": (node, *here.nodes[1:])}
    grown = msgspec.structs.replace(here, memory_limit=1 << 40, **less)
    monkeypatch.setattr(tune_module, "read_hardware", lambda _: grown)
    report = tune(model, database)
    assert report.progress.done == report.progress.items and not file.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"effort": "heroic"}, "effort"),
        ({"workers": 0}, "workers"),
        ({"budget": -1.0}, "budget"),
        ({"max_step_tokens": 0}, "a step of 0 tokens"),
        ({"max_step_sequences": 600}, "no fewer than sequences"),
        ({"hardware": "there.json"}, "this machine"),
        ({"speed": 2}, "no option 'speed'"),
        ({"target": "aarch64-neon"}, "does not run|unknown target"),
    ],
)
def test_bad_requests_are_one_sentence(model, tmp_path, options, complaint):
    with pytest.raises(SpecError, match=complaint):
        tune_model(model, database=tmp_path / "db", **options)
    assert list(tmp_path.iterdir()) == []


def test_fewer_workers_than_asked_for_are_named(model, tmp_path, asked):
    report = tune(model, tmp_path / "db", workers=1000)
    assert 1 <= report.workers < 1000
    assert any("of 1000 workers" in note for note in report.notes)
