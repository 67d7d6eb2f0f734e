"""The tuning database: shared by processes, and only whole true records are ever used."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import timedelta
from itertools import permutations

import msgspec
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compiler.measure import database as database_module
from dovetail.compiler.measure.database import TuningDatabase, default_path
from dovetail.ir.errors import SpecError
from dovetail.ir.tuning import Reference, encode_record
from tests.compiler.records import WHEN, make_record
from tests.full_disk import files_of_at_most
from tests.ir.test_tuning import FEW, MANY, edits, valid_records

WRITER = """
import sys
from msgspec.structs import replace
from dovetail.compiler.measure import database as database_module
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.ir.tuning import decode_record
path, name, line = sys.argv[1:]
database, record = TuningDatabase(path), decode_record(line.encode())
for i in range(200):
    database.append([replace(record, kernel=f"{name}{i}", build="x" * (i % 90) * 2)])
"""


def start_writer(path, name):
    arguments = [WRITER, str(path), name, encode_record(make_record()).decode()]
    return subprocess.Popen([sys.executable, "-P", "-c", *arguments])


def later(record, seconds=2.0, **changes):
    times = {"seconds": seconds, "low": seconds / 2, "high": seconds * 1.5}
    when = record.when + timedelta(hours=1)
    return msgspec.structs.replace(record, when=when, **times, **changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.jsonl"


def test_what_is_appended_is_there_for_the_next_process(path):
    records = [make_record(kernel=name) for name in "abc"]
    database = TuningDatabase(path)
    assert len(database) == 0 and database.lookup(records[0].key) is None
    database.append(records[:2])
    database.append(records[2:])
    database.append([])
    again = TuningDatabase(path)
    assert list(again) == list(database) == records
    assert again.lookup(records[1].key) == records[1] and again.warning is None


def test_a_new_database_is_made_with_its_folders_once_there_is_a_record(tmp_path):
    database = TuningDatabase(tmp_path / "new/folder/tuning.jsonl")
    database.append([])
    assert not (tmp_path / "new").exists()
    database.append([make_record()])
    assert list(TuningDatabase(database.path)) == [make_record()]


def test_who_holds_a_database_too_long_is_not_waited_for(path, monkeypatch):
    monkeypatch.setattr(database_module, "LOCK_SECONDS", 0.0)
    database = TuningDatabase(path)
    with FileLock(f"{path}.lock"):
        for use in (
            lambda: TuningDatabase(path),
            database.prune,
            lambda: database.append([make_record()]),
        ):
            with pytest.raises(SpecError, match="was locked by another process"):
                use()
    assert len(database) == 0 and not path.exists()


def test_the_later_record_of_a_key_stands_wherever_it_lies(path):
    old = make_record()
    new = later(old, 1.0)
    path.write_bytes(encode_record(new) + encode_record(old))
    database = TuningDatabase(path)
    assert list(database) == [new] and len(list(database.records())) == 2
    assert database.warning is None


def test_bad_lines_are_counted_and_the_others_used(path):
    good = [make_record(kernel=name) for name in "ab"]
    whole = encode_record(make_record(kernel="c"))
    bad = [b"\xff\x00\n", b"{}\n", whole[:40] + b"\n", whole.replace(b"2.0", b"1.5")]
    bad += [b"x" * (1 << 18) + b"\n", whole[:-5]]
    path.write_bytes(encode_record(good[0]) + b"\n" + b"".join(bad[:3]))
    with path.open("ab") as file:
        file.write(encode_record(good[1]) + b"".join(bad[3:]))
    database = TuningDatabase(path)
    assert list(database) == good and database.skipped.total() == len(bad)
    assert set(database.skipped) == {
        "not a whole record", "changed since it was written", "too long"
    }  # fmt: skip
    assert "skipped 6 lines (1 changed since it was written, 4 not a whole rec" in database.warning


def test_a_torn_last_line_does_not_spoil_the_next_record(path):
    first, second = make_record(kernel="a"), make_record(kernel="b")
    path.write_bytes(encode_record(first)[:-20])
    TuningDatabase(path).append([second])
    database = TuningDatabase(path)
    assert list(database) == [second] and database.skipped.total() == 1


def test_what_a_full_disk_has_no_room_for_leaves_the_file_as_it_was(path):
    """Of a batch, and of a merge, some records fit whole and one in part."""
    database, other = TuningDatabase(path), TuningDatabase(path.with_name("other"))
    database.append([make_record()])
    before, more = path.read_bytes(), [make_record(kernel=name) for name in "abc"]
    other.append(more)
    with files_of_at_most(len(before) * 5 // 2):
        for write in (lambda: database.append(more), lambda: database.merge(other)):
            with pytest.raises(SpecError, match="cannot write the tuning database"):
                write()
            assert path.read_bytes() == before
    assert len(database) == 1 and database.merge(other) == 3
    assert len(TuningDatabase(path)) == 4


def test_a_file_of_something_else_is_refused_and_left_alone(path):
    text = '{"prompt": "Is this a record?"}\nNo.\n'
    path.write_text(text)
    with pytest.raises(SpecError, match="is no tuning database: no line of it is a record"):
        TuningDatabase(path)
    assert path.read_text() == text
    path.write_bytes(encode_record(make_record()).replace(b'"schema":2', b'"schema":1'))
    assert TuningDatabase(path).skipped.total() == 1  # of another version, so it is one


def test_processes_may_append_while_another_prunes(path):
    writers = [start_writer(path, name) for name in ("left", "right")]
    database, pruned = TuningDatabase(path), 0
    while any(writer.poll() is None for writer in writers):
        database.append([make_record()])  # of which one is superfluous each time
        pruned += database.prune()
    assert [writer.wait() for writer in writers] == [0, 0]
    database = TuningDatabase(path)
    assert len(database) == 401 and database.warning is None and pruned > 0


def test_a_killed_writer_loses_no_finished_record(path):
    writer = start_writer(path, "k")
    while writer.poll() is None and not (path.is_file() and path.read_bytes().count(b"\n") >= 5):
        pass
    writer.kill()
    writer.wait()
    lines = path.read_bytes().count(b"\n")
    database = TuningDatabase(path)
    assert len(database) == lines >= 5 and database.skipped.total() <= 1


def check_garbage(path, data: bytes) -> None:
    """Beside a record its lines are counted, else it may be refused as something else."""
    for whole in (data, encode_record(make_record()) + data):
        path.write_bytes(whole)
        try:
            database = TuningDatabase(path)
            assert len(database) == (whole != data)
            assert database.skipped.total() == sum(map(bool, data.split(b"\n")))
        except SpecError:
            assert whole == data
        assert path.read_bytes() == whole  # reading mends nothing


def check_edited(path, records, data: st.DataObject) -> None:
    lines = [encode_record(record) for record in records]
    victim = data.draw(st.integers(0, len(lines) - 1))
    edited = data.draw(edits(lines[victim]))
    path.write_bytes(b"".join([*lines[:victim], edited, *lines[victim + 1 :]]))
    found, others = list(TuningDatabase(path)), [*records[:victim], *records[victim + 1 :]]
    assert all(record in records for record in found)
    whole = edited.endswith(b"\n") or victim == len(lines) - 1
    newest = {r.key: max(o.when for o in others if o.key == r.key) for r in others}
    assert not whole or newest.keys() <= {record.key for record in found}


@settings(max_examples=FEW, deadline=None)
@given(data=st.binary(max_size=600))
def test_random_files(tmp_path_factory, data):
    check_garbage(tmp_path_factory.getbasetemp() / "garbage.jsonl", data)


@settings(max_examples=FEW, deadline=None)
@given(st.lists(valid_records(), min_size=2, max_size=3), st.data())
def test_random_edits_of_a_file(tmp_path_factory, records, data):
    check_edited(tmp_path_factory.getbasetemp() / "edited.jsonl", records, data)


@pytest.mark.long
@settings(max_examples=MANY, deadline=None)
@given(data=st.binary(max_size=600))
def test_many_random_files(tmp_path_factory, data):
    check_garbage(tmp_path_factory.getbasetemp() / "garbage.jsonl", data)


@pytest.mark.long
@settings(max_examples=MANY, deadline=None)
@given(st.lists(valid_records(), min_size=2, max_size=3), st.data())
def test_many_random_edits_of_a_file(tmp_path_factory, records, data):
    check_edited(tmp_path_factory.getbasetemp() / "edited.jsonl", records, data)


def test_merge_takes_what_is_missing_or_later(tmp_path):
    a, b, c = (make_record(kernel=name) for name in "abc")
    ours, theirs = TuningDatabase(tmp_path / "ours"), TuningDatabase(tmp_path / "theirs")
    ours.append([later(a, 1.0), b])
    theirs.append([a, later(b, 5.0), c])
    assert ours.merge(theirs) == 2 and ours.merge(theirs) == 0
    found = TuningDatabase(tmp_path / "ours")
    assert {r.kernel: r.seconds for r in found} == {"a": 1.0, "b": 5.0, "c": 2.0}


def test_prune_keeps_the_latest_that_are_wanted(path):
    a, b = make_record(kernel="a"), make_record(kernel="b")
    path.write_bytes(b"junk\n" + encode_record(a) + encode_record(later(a, 1.0)))
    path.chmod(0o640)
    database = TuningDatabase(path)
    TuningDatabase(path).append([b])  # by another process meanwhile
    assert database.prune() == 2 and database.warning is None
    assert [r.seconds for r in TuningDatabase(path)] == [1.0, 2.0]
    assert path.stat().st_mode & 0o777 == 0o640
    assert database.prune(lambda record: record.kernel == "b") == 1
    inode = path.stat().st_ino
    assert list(TuningDatabase(path)) == [b] and database.prune() == 0
    assert path.stat().st_ino == inode  # what needs no change is left alone


def test_diff_tells_noise_from_change(tmp_path):
    noise, slow, fast, worse, ours_only, theirs_only = records = [
        make_record(kernel=name) for name in "abcdef"
    ]
    ours, theirs = TuningDatabase(tmp_path / "ours"), TuningDatabase(tmp_path / "theirs")
    ours.append(records[:5])
    slower, faster = later(slow, 9.0), later(fast, 0.5)
    failed = msgspec.structs.replace(worse, status="crash", seconds=0, low=0, high=0, runs=0)
    theirs.append([later(noise, 2.2), slower, faster, failed, theirs_only])
    found = ours.diff(theirs)
    assert (found.ours, found.theirs, found.same) == ((ours_only,), (theirs_only,), 1)
    assert found.changed == ((slow, slower), (fast, faster), (worse, failed))


def test_unusable_files_are_one_sentence(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError, match="read the tuning database"):
        TuningDatabase(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]  # and no lock beside it
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="read the tuning database"):
        TuningDatabase(tmp_path / "file/tuning.jsonl")
    database = TuningDatabase(tmp_path / "later/tuning.jsonl")
    (tmp_path / "later").write_text("")
    with pytest.raises(SpecError, match="write the tuning database"):
        database.append([make_record()])


def beside(seconds, hours, **fields):
    """A record whose reference took so long, made so many hours later."""
    reference = Reference(kernel="r", build="b", schedule=(), seconds=seconds)
    return make_record(reference=reference, when=WHEN + timedelta(hours=hours), **fields)


def test_disturbed_records_are_none_of_the_trusted(path):
    calm, busy = beside(1.0, 0, kernel="a"), beside(2.0, 1, kernel="b")
    database = TuningDatabase(path)
    database.append([calm, busy])
    assert list(database) == [calm, busy] and database.trusted() == (calm,)


def answers(database, records):
    return [(database.lookup(record.key), database.trusts(record)) for record in records]


@settings(max_examples=FEW, deadline=None)
@given(data=st.data())
def test_neither_order_nor_prune_nor_merge_changes_an_answer(tmp_path_factory, data):
    times, names = st.sampled_from([1.0, 1.2, 1.4, 1.6, 2.0, 4.0]), st.sampled_from("abc")
    drawn = data.draw(st.lists(st.tuples(times, names), min_size=1, max_size=8))
    records = [beside(t, i, kernel=name) for i, (t, name) in enumerate(drawn)]
    folder = tmp_path_factory.mktemp("order")
    ours, theirs = TuningDatabase(folder / "ours"), TuningDatabase(folder / "theirs")
    whole = TuningDatabase(folder / "whole")
    whole.append(records)
    wanted = answers(whole, records)
    shuffled = data.draw(st.permutations(records))
    cut = data.draw(st.integers(0, len(records)))
    ours.append(shuffled[:cut])
    theirs.append(shuffled[cut:])
    ours.prune()
    ours.merge(theirs)
    theirs.merge(ours)
    assert answers(ours, records) == answers(theirs, records) == wanted
    ours.prune()
    assert answers(TuningDatabase(folder / "ours"), records) == wanted
    assert ours.merge(theirs) == theirs.merge(ours) == 0


def test_a_calm_older_record_answers_for_a_busy_later_one(path):
    calm, busy, judge = beside(1.4, 0), beside(2.0, 1), beside(1.0, 2, kernel="other")
    for order in permutations((calm, busy, judge)):
        path.unlink(missing_ok=True)
        database = TuningDatabase(path)
        database.append(order)
        assert database.lookup(calm.key) == calm == TuningDatabase(path).lookup(calm.key)
        database.prune(lambda record: record.kernel != "other")
        assert not TuningDatabase(path).lookup(calm.key) == busy


def test_a_stand_in_is_kept_for_the_day_that_a_later_record_proves_disturbed(path, tmp_path):
    first, stand_in, last = (beside(t, i) for i, t in enumerate((1.4, 1.4, 2.0)))
    database, judges = TuningDatabase(path), TuningDatabase(tmp_path / "judges")
    database.append([first, stand_in, last])
    assert database.prune() == 0
    assert database.lookup(last.key) == last
    judges.append([beside(1.0, 4, kernel="other")])
    database.merge(judges)
    assert database.lookup(last.key) == stand_in


def test_appending_in_any_order_ends_in_the_same_database(path):
    records = [make_record(kernel=name, when=WHEN + timedelta(i)) for i in (1, 2) for name in "ab"]
    for seed in range(4):
        path.unlink(missing_ok=True)
        shuffled = random.Random(seed).sample(records, len(records))
        TuningDatabase(path).append(shuffled)
        assert {r.kernel: r.when for r in TuningDatabase(path)} == {
            name: WHEN + timedelta(2) for name in "ab"
        }


def test_the_shared_database_lies_in_the_build_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", os.fspath(tmp_path))
    assert default_path() == tmp_path / "tuning.jsonl" == default_path(tmp_path)
