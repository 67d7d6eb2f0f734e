"""Lines of tuning records: what was written comes back, and nothing else ever does."""

from __future__ import annotations

import contextlib
import zlib
from datetime import timedelta

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.tuning import (
    BUSY,
    STATUSES,
    LineFaultError,
    RecordSet,
    Reference,
    TuningRecord,
    decode_record,
    encode_record,
)
from tests.compiler.records import HARDWARE, WHEN, make_record

FEW, MANY = 100, 2000
NAMES = st.text(max_size=20)
COUNTS = st.integers(0, 1 << 40)
SCHEDULES = st.lists(st.integers(-1, 1 << 40), max_size=8).map(tuple)
TIMES = st.lists(st.floats(1e-9, 1e9), min_size=3, max_size=3).map(sorted)


@st.composite
def valid_records(draw: st.DrawFn) -> TuningRecord:
    status, (low, seconds, high) = draw(st.sampled_from(STATUSES)), draw(TIMES)
    times = {"low": low, "seconds": seconds, "high": high, "runs": 3}
    beside = Reference(kernel="k", build=draw(NAMES), schedule=draw(SCHEDULES), seconds=seconds)
    return make_record(
        status=status,
        kernel=draw(NAMES),
        schedule=draw(SCHEDULES),
        shape=draw(st.dictionaries(NAMES, COUNTS, max_size=4)),
        reference=draw(st.sampled_from([None, beside])),
        **(times if status == "ok" else dict.fromkeys(times, 0)),
    )


@st.composite
def edits(draw: st.DrawFn, line: bytes) -> bytes:
    """Cut, overwrite, remove, insert or repeat a few bytes of a line."""
    data = bytearray(line)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        data[start:end] = draw(
            st.one_of(st.binary(max_size=8), st.just(bytes(data[start:end]) * 2))
        )
    return bytes(data)


@given(valid_records())
def test_records_come_back_as_they_were(record):
    line = encode_record(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode_record(line) == decode_record(line[:-1]) == record
    assert msgspec.json.decode(line)["kernel"] == record.kernel  # plain JSON for everybody else


def check_bytes(line: bytes) -> None:
    with pytest.raises(LineFaultError):
        decode_record(line)


def check_edit(record: TuningRecord, data: st.DataObject) -> None:
    edited = data.draw(edits(encode_record(record)))
    with contextlib.suppress(LineFaultError):
        assert decode_record(edited) == record  # nothing that counts was changed


test_random_bytes = settings(max_examples=FEW, deadline=None)(
    given(st.binary(max_size=400))(check_bytes)
)
test_random_edits = settings(max_examples=FEW, deadline=None)(
    given(valid_records(), st.data())(check_edit)
)
test_many_random_bytes = pytest.mark.long(
    settings(max_examples=MANY, deadline=None)(given(st.binary(max_size=400))(check_bytes))
)
test_many_random_edits = pytest.mark.long(
    settings(max_examples=MANY, deadline=None)(given(valid_records(), st.data())(check_edit))
)


def sealed(text: bytes) -> bytes:
    """Return JSON text as a line with the right checksum, so that only its values can be wrong."""
    body = text.rstrip()[:-1]
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 3},
        {"schema": 0},
        {"seconds": -1.0},
        {"seconds": None},
        {"seconds": 0.5},
        {"low": 0.0},
        {"high": "3"},
        {"runs": 0},
        {"runs": 1.5},
        {"status": "fine"},
        {"status": "wrong"},
        {"shape": {"n": -1}},
        {"shape": [1, 2, 3]},
        {"when": "yesterday"},
        {"when": "2026-01-02T03:04:05"},
        {"kernel": "k" * 300},
        {"schedule": [1.5]},
        {"surprise": 1},
    ],
)
def test_impossible_values_are_refused_even_with_a_right_checksum(change):
    fields = msgspec.to_builtins(make_record()) | change
    with pytest.raises(LineFaultError, match="schema or impossible"):
        decode_record(sealed(msgspec.json.encode(fields)))


@pytest.mark.parametrize("number", [b"1e999", b"NaN", b"Infinity", b"-0.1"])
def test_times_that_are_no_times(number):
    text = msgspec.json.encode(make_record(cost=0.25)).replace(b"0.25", number)
    with pytest.raises(LineFaultError):
        decode_record(sealed(text))


def test_unsealed_and_huge_lines_are_refused():
    with pytest.raises(LineFaultError, match="whole"):
        decode_record(msgspec.json.encode(make_record()))
    with pytest.raises(LineFaultError, match="long"):
        decode_record(b"x" * (1 << 17))


def test_keys_tell_what_a_record_answers_for():
    same = make_record(seconds=2.5, status="ok", cost=9.0)
    assert make_record().key == same.key
    assert make_record(shape={"m": 1, "k": 64, "n": 32}).key == same.key
    others = [make_record(build="c"), make_record(schedule=(1,)), make_record(threads=2)]
    assert len({record.key for record in (same, *others)}) == 4


def test_machines_share_a_label_whatever_cores_are_used():
    more = msgspec.structs.replace(HARDWARE, cores=8)
    other = msgspec.structs.replace(HARDWARE, caches=(1, 2, 4))
    assert HARDWARE.label == more.label != other.label


def beside(seconds, **fields):
    """A record of a trial in turns with a reference that took so long."""
    reference = Reference(kernel="rule", build="b", schedule=(), seconds=seconds)
    return make_record(reference=reference, low=1.0, seconds=1.0, high=1.0, **fields)


def test_a_slow_reference_tells_that_the_machine_was_busy():
    records = RecordSet()
    first = beside(2.0)
    records.add(first)
    assert records.trusts(first)  # nothing better is known yet
    records.add(beside(1.0, kernel="other", rounds=9))
    assert not records.trusts(first)
    assert records.trusts(beside(BUSY)) and not records.trusts(beside(1.1 * BUSY))
    assert records.trusts(beside(2.0, shape={"n": 1}))  # other work has other references
    assert records.lookup(first.key) is None
    failed = make_record(status="crash", low=0, seconds=0, high=0, runs=0)
    assert records.trusts(msgspec.structs.replace(failed, reference=first.reference))


class Visited(RecordSet):
    """One to which another thread adds a record while this one looks at each."""

    def __init__(self):
        super().__init__()
        self.added = 0

    def trusts(self, record):
        self.added += 1
        self.add(make_record(kernel=f"from elsewhere {self.added}"))
        return super().trusts(record)


def test_records_may_come_while_others_are_looked_at():
    records = Visited()
    first = [beside(1.0, when=WHEN + timedelta(hours=hour)) for hour in range(2)]
    records.append(first)
    assert first[1] in records.known.values() and records.added == 2
    assert first[1] in records.needed()
    assert {*map(encode_record, first)} < {*map(encode_record, records.records())}


def test_short_times_may_vary():
    records = RecordSet()
    records.add(beside(1e-6))
    assert records.trusts(beside(1e-5)) and not records.trusts(beside(1e-4))
    times = {"low": 1e-6, "seconds": 1e-6}
    assert records.trusts(make_record(**times, high=1e-5))
    assert not records.trusts(make_record(**times, high=1e-4))


def test_a_busy_time_does_not_take_the_place_of_a_calm_one():
    calm, busy = beside(1.0), beside(2.0, when=WHEN + timedelta(hours=1))
    for order in ((calm, busy), (busy, calm)):
        records = RecordSet()
        for record in order:
            records.add(record)
        assert list(records.known.values()) == [calm]
    again = beside(1.2, when=busy.when)
    records.add(again)
    assert records.lookup(calm.key) == again and list(records.records()) == [*order, again]
