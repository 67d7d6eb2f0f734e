"""`dovetail tune` as a user calls it: progress, report, stopped by any signal and resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli.report import read_duration, show_seconds
from dovetail.cli.tune import describe_stop
from dovetail.compiler import tune
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.errors import SpecError
from dovetail.tiny_world import ENCODER
from tests.compiler.virtual import use_virtual_meters
from tests.dovetail.commands import assert_one_sentence, dovetail

OPTIONS = ("--threads", "1", "--budget")
COMMAND = [sys.executable, "-P", "-c", "from dovetail.cli import main; main()", "tune"]


def test_tune_reports(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_virtual_meters(monkeypatch)
    database = tmp_path / "tuning.jsonl"
    result = dovetail("tune", model, "--db", database, *OPTIONS, "2s", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["database"] == str(database) and report["effort"] == "fast"
    assert 0 < report["trials"] == report["measured"] <= len(TuningDatabase(database))
    assert "GFLOP/s" in result.err and "x the default" in result.err
    said = dovetail("tune", model, "--db", database, *OPTIONS, "1s", "--missing", "--workers", "9")
    assert "from the database" in said.out and "as fast as by the default" in said.out
    assert "note: " in said.out and "of 9 workers" in said.out


def enough(database: Path) -> bool:
    return database.read_bytes().count(b"\n") >= 20


def ended(process: subprocess.Popen[str]) -> bool:
    """Wait for a moment, without taking a core away from what is measured."""
    try:
        process.wait(0.05)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT, signal.SIGKILL],
)
def test_a_stopped_job_is_resumed(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    database = tmp_path / "tuning.jsonl"
    arguments = [model, "--db", database, *OPTIONS, "60s"]
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "tune: starting\n" and not database.exists()
        while not ended(process) and not (database.is_file() and enough(database)):
            pass
        process.send_signal(number)
        _, err = process.communicate()
    found = TuningDatabase(database)
    assert len(found) > 0 and found.skipped.total() <= 1
    if number != signal.SIGKILL:
        assert process.returncode == 2 and "Traceback" not in err, err
        assert "all kept; the same command continues" in err.replace("\n", " ")
        assert found.warning is None
    result = dovetail("tune", model, "--db", database, *OPTIONS, "1s", "--json")
    assert result.code == 0 and "continuing the job that was interrupted" in result.err, result.err
    report, after = json.loads(result.out), TuningDatabase(database)
    assert report["progress"]["done"] == report["progress"]["items"]
    good = {r.key: r.when for r in found if after.trusts(r)}  # on a busy machine not all are
    assert good.items() <= {r.key: r.when for r in after}.items()


def test_a_job_that_is_stopped_early_says_so() -> None:
    assert "nothing was recorded" in describe_stop(None)


def test_bad_input_is_one_sentence(model: Path, tmp_path: Path) -> None:
    database = tmp_path / "tuning.jsonl"
    for arguments in (
        (model, "--db", database, "--budget", "soon"),
        (model, "--db", database, "--kv-dtype", "f8"),
        (model, "--db", database, "--max-context", "0"),
        (model, "--db", tmp_path),
        (tmp_path / "none",),
    ):
        result = dovetail("tune", *arguments)
        said = [line for line in result.err.splitlines() if line.startswith("dovetail: ")]
        assert (result.code, len(said)) == (2, 1) and "Traceback" not in result.err, result
    assert not database.exists()


def test_what_is_not_tuned_is_told_by_what_it_is(
    model: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tune, "ray_jobs", raising=False)  # as if Ray were not installed
    monkeypatch.setitem(sys.modules, "dovetail.compiler.tune.ray_jobs", None)
    options = ("--db", tmp_path / "tuning.jsonl")
    for arguments, said in (
        ((artifact,), "is an artifact; give the model"),
        ((ENCODER,), "is an encoder; only models that generate"),
        ((model, "--ray", "auto"), "Ray is not installed"),
    ):
        result = dovetail("tune", *arguments, *options)
        assert result.code == 2 and said in result.err
    assert [*tmp_path.iterdir()] == []  # no job is there to be gone on with


def test_a_shape_refuses_the_options_of_models(tmp_path: Path) -> None:
    many = "--ray x --workers 0 --effort full --hardware all --missing --no-resume --workload w"
    every = f"{many} --weight-dtype int8 --kv-dtype f16 --max-context 9 --calibrate t".split()
    result = dovetail("tune", "--kernel", "softmax=run.c", "--shape", "rows=1,width=2", *every)
    assert_one_sentence(result)
    assert {word for word in every if word.startswith("--")} == set(
        re.findall(r"--[\w-]+", result.err)
    ) - {"--shape"}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("60s", 60), ("15m", 900), ("1h", 3600), ("0.5s", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "0", "nan", "1e99h", "ten", "5 weeks"])
def test_no_durations(text: str) -> None:
    with pytest.raises(SpecError, match="duration"):
        read_duration(text)


def test_seconds_are_shown_as_minutes() -> None:
    assert [show_seconds(s) for s in (0, 59.6, 61, 3601)] == ["0:00", "1:00", "1:01", "60:01"]
