"""`dovetail db`: machine classes stay apart, and only whole databases are merged."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from dovetail.compiler.measure.database import TuningDatabase
from dovetail.ir.tuning import Reference, encode_record
from dovetail.tiny_world import LLAMA
from tests.compiler.records import HARDWARE, WHEN, make_record
from tests.dovetail.commands import assert_one_sentence, dovetail

OTHER = msgspec.structs.replace(HARDWARE, cpu="another machine")
BESIDE = Reference(kernel="k", build="b", schedule=(0,) * 9, seconds=2.0)
DEFAULT = make_record(reference=BESIDE, seconds=2.0, low=2.0, high=2.0)
BEST = make_record(reference=BESIDE, kernel="best", seconds=1.0, low=1.0, high=1.0)


def write(path: Path, *records) -> Path:
    TuningDatabase(path).append(records)
    return path


def on(hardware, record, **fields):
    return msgspec.structs.replace(record, hardware=hardware, **fields)


def test_classes_are_shown_apart_with_their_gains(tmp_path: Path) -> None:
    path = write(tmp_path / "a", DEFAULT, BEST, on(OTHER, DEFAULT))
    report = json.loads(dovetail("db", "show", path, "--json").out)
    found = {one["cpu"]: one for one in report["classes"]}
    assert {cpu: (one["records"], one["shapes"], one["gain"]) for cpu, one in found.items()} == {
        "test": (2, 1, 2.0),
        "another machine": (1, 1, 1.0),
    }
    assert found["test"]["best"]["kernel"] == "best" and found["test"]["label"] == HARDWARE.label
    text = dovetail("db", "show", path).out
    assert "2.00x linear" in " ".join(text.split()) and report["here"] in text


def test_the_best_record_of_each_key_and_class_is_merged(tmp_path: Path) -> None:
    newer = msgspec.structs.replace(BEST, seconds=1.5, high=2.0, when=WHEN + timedelta(hours=1))
    busy = Reference(kernel="k", build="b", schedule=(0,) * 9, seconds=9.0)
    latest = WHEN + timedelta(hours=2)
    disturbed = on(HARDWARE, BEST, seconds=5.0, high=5.0, low=4.0, reference=busy, when=latest)
    there = on(OTHER, BEST, seconds=7.0, high=8.0, when=latest)
    a = write(tmp_path / "a", DEFAULT, BEST)
    b = write(tmp_path / "b", newer, disturbed, there)
    report = json.loads(dovetail("db", "merge", a, b, "-o", tmp_path / "c", "--json").out)
    merged = TuningDatabase(tmp_path / "c")
    best = {r.hardware.cpu: r.seconds for r in merged if r.kernel == "best"}
    assert best == {"test": 1.5, "another machine": 7.0}  # neither the luckiest nor the disturbed
    assert report["records"] == len(merged) == 3
    again = dovetail("db", "merge", b, a, "-o", tmp_path / "d")
    assert again.code == 0 and f"{tmp_path / 'd'}: 3 records" in again.out
    twice = json.loads(dovetail("db", "merge", a, a, "-o", tmp_path / "e", "--json").out)
    assert twice["added"] == {str(a): 2}
    turned = TuningDatabase(tmp_path / "d")
    assert {r.key: r for r in turned} == {r.key: r for r in merged}


@pytest.mark.parametrize("end", [b"\x00\xff", encode_record(BEST)[:-9], b"{}\n"])
def test_a_damaged_database_is_refused_and_nothing_written(tmp_path: Path, end: bytes) -> None:
    good, bad = write(tmp_path / "good", DEFAULT), tmp_path / "bad"
    bad.write_bytes(encode_record(BEST) + end)
    result = dovetail("db", "merge", good, bad, "-o", tmp_path / "c")
    assert result.code == 2 and result.err.count("\n") == 1
    assert f"{bad} is damaged" in result.err and not (tmp_path / "c").exists()
    onto = dovetail("db", "merge", good, "-o", bad)
    assert onto.code == 2 and bad.read_bytes() == encode_record(BEST) + end
    assert "skipped 1 lines" in dovetail("db", "show", bad).out


def test_what_is_no_database_is_refused_by_every_verb(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("Milk\nBread\n")
    for words in (
        ("db", "show", notes),
        ("db", "merge", notes, "-o", tmp_path / "c"),
        ("db", "merge", write(tmp_path / "good", BEST), "-o", notes),
        ("compile", LLAMA, "-o", tmp_path / "app.dove", "--db", notes),
        ("tune", LLAMA, "--db", notes),
    ):
        result = dovetail(*words)
        assert result.code == 2 and f"{notes} is no tuning database" in result.err, words
    assert notes.read_text() == "Milk\nBread\n"
    assert not (tmp_path / "app.dove").exists() and not (tmp_path / "c").exists()


def test_nothing_is_merged_of_databases_without_records(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    result = dovetail("db", "merge", tmp_path / "empty", "-o", tmp_path / "c")
    assert_one_sentence(result)
    assert "nothing was written" in result.err and not (tmp_path / "c").exists()
    onto = dovetail("db", "merge", tmp_path / "empty", "-o", write(tmp_path / "good", BEST))
    assert onto.code == 0 and f"{tmp_path / 'good'}: 1 record" in onto.out


def test_a_missing_database_is_one_sentence(tmp_path: Path) -> None:
    for words in (("show", tmp_path / "no"), ("merge", tmp_path / "no", "-o", tmp_path / "c")):
        result = dovetail("db", *words)
        assert result.code == 2 and "there is no tuning database" in result.err
    assert not any(tmp_path.iterdir())
