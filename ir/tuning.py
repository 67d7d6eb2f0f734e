"""What one tuning trial found, as a line of JSON: the record, its key, and its exact spelling.

In: a record, or a line of bytes from anywhere. Out: the line, or the record, or a `LineFaultError`
that says why the line cannot be trusted. A checksum in each line finds edits that still parse.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from threading import Lock
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

SCHEMA = 2
LABEL_PREFIX = "dovetail-"
OK, WRONG, CRASH, TIMEOUT = "ok", "wrong", "crash", "timeout"
STATUSES = (OK, WRONG, CRASH, TIMEOUT)
MAX_LINE_BYTES = 1 << 16
BUSY = 1.5
"""A machine on which a reference takes this many times its best does other work at the time."""
SPREAD = 3.0
"""Quartiles further apart than this say nothing about a kernel."""
JITTER = 2e-5
"""Seconds by which a time may be late on a machine that is not busy."""

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, Meta(ge=0)]
Aware = Annotated[datetime, Meta(tz=True)]
Name = Annotated[str, Meta(max_length=200)]


class HardwareKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The machine a time holds for: CPU features that targets use, model, caches, cores used.

    caches: bytes of L1d, L2 and the last level. abi: of the thread team and tapes.
    """

    arch: Name
    isa: tuple[Name, ...]
    cpu: Name
    caches: tuple[Count, Count, Count]
    cores: Count
    abi: Count

    @property
    def label(self) -> str:
        """A short name that equal machines share, whatever number of their cores is used."""
        machine = msgspec.json.encode((self.arch, self.isa, self.cpu, self.caches, self.abi))
        return f"{LABEL_PREFIX}{hashlib.sha256(machine).hexdigest()[:12]}"


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What was timed in turns with a trial, so that times of other days can be compared."""

    kernel: Name
    build: Name
    schedule: tuple[int, ...]
    seconds: Seconds


class WorkKey(NamedTuple):
    """What is searched as one: a product at whatever M, or one attention kernel's case."""

    kind: str
    shape: tuple[tuple[str, int], ...]
    dtype: str
    threads: int

    @classmethod
    def of(cls, kind: str, shape: Mapping[str, int], dtype: str, threads: int) -> WorkKey:
        """Return the key of work of this shape, in which `m` does not count."""
        sizes = sorted((name, size) for name, size in shape.items() if name != "m")
        return cls(kind, tuple(sizes), dtype, threads)


class RecordKey(NamedTuple):
    """What a record answers for; a later record of the same key replaces an earlier one."""

    target: str
    hardware: HardwareKey
    kernel: str
    build: str
    kind: str
    shape: tuple[tuple[str, int], ...]
    dtype: str
    threads: int
    schedule: tuple[int, ...]
    rounds: int


class TuningRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One trial: a kernel with schedule values on one shape, and what came out.

    build: digest of the kernel's C text, compiler and flags. kind, shape, dtype: the work, e.g.
    `linear` with n, k and m, and the weight's dtype. seconds, low, high: median and quartiles of
    `runs`; 0 unless status is `ok`. rounds: the runs asked for. ratio: its median ratio to the
    reference, round by round, and what that hardly exceeds; 0 where unknown. cost: seconds the
    trial took.
    """

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    target: Name
    hardware: HardwareKey
    kernel: Name
    build: Name
    kind: Name
    shape: dict[Name, Count]
    dtype: Name
    threads: Count
    schedule: tuple[int, ...]
    status: Name
    seconds: Seconds
    low: Seconds
    high: Seconds
    runs: Count
    rounds: Count
    reference: Reference | None
    ratio: tuple[Seconds, Seconds] = (0.0, 0.0)
    cost: Seconds
    when: Aware

    def __post_init__(self) -> None:
        """Refuse values that no trial can have had."""
        times = (self.low, self.seconds, self.high)
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is none of {', '.join(STATUSES)}")
        if not all(map(math.isfinite, (*times, *self.ratio, self.cost))):
            raise ValueError("a time is not finite")
        if self.reference is not None and not math.isfinite(self.reference.seconds):
            raise ValueError("the reference time is not finite")
        if self.status == OK and not (0 < self.low <= self.seconds <= self.high and self.runs):
            raise ValueError("times of a good trial must be positive and in order")
        if self.status != OK and (any(times) or any(self.ratio) or self.runs):
            raise ValueError(f"a trial that ended in {self.status!r} has no times")

    def scale_to(self, base: Reference | None) -> float:
        """Return what to multiply times by to compare them with those taken beside `base`.

        That is 1 where one of them has no reference, or another one.
        """
        beside = self.reference
        if base is None or beside is None or not beside.seconds:
            return 1.0
        same = msgspec.structs.replace(beside, seconds=base.seconds) == base
        return base.seconds / beside.seconds if same else 1.0

    @property
    def reference_key(self) -> RecordKey | None:
        """What its reference's times are known by, whatever its own rounds."""
        if (beside := self.reference) is None:
            return None
        key = self.key._replace(kernel=beside.kernel, build=beside.build, rounds=0)
        return key._replace(schedule=beside.schedule)

    @property
    def work(self) -> WorkKey:
        """What was searched when this record was made."""
        return WorkKey.of(self.kind, self.shape, self.dtype, self.threads)

    @property
    def key(self) -> RecordKey:
        """What this record answers for."""
        return RecordKey(
            self.target,
            self.hardware,
            self.kernel,
            self.build,
            self.kind,
            tuple(sorted(self.shape.items())),
            self.dtype,
            self.threads,
            self.schedule,
            self.rounds,
        )


class RecordSet:
    """Records by key, of each the latest that was not taken on a busy machine.

    Which that is can change with any other record, so that all are kept; their order says nothing.
    They are sorted by key when that is first asked for: where nothing is measured, never. Threads
    may share a set.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._new: list[TuningRecord] = []
        self._all: dict[RecordKey, list[TuningRecord]] = {}
        self._rounds: set[int] = set()
        self._best: dict[RecordKey, TuningRecord] = {}

    @property
    def known(self) -> dict[RecordKey, TuningRecord]:
        """The record of each key."""
        return {key: self._pick(records) for key, records in self._by_key().items()}

    def add(self, record: TuningRecord) -> None:
        """Take a record in."""
        with self._lock:
            self._new.append(record)

    def append(self, records: Sequence[TuningRecord]) -> None:
        """Take records in; they are kept once this returns."""
        for record in records:
            self.add(record)

    def records(self) -> Iterator[TuningRecord]:
        """Yield all that was added."""
        return chain(*self._all.values(), self._new)

    def needed(self) -> tuple[TuningRecord, ...]:
        """Return the records that can answer, and those which tell that others were disturbed.

        A record can answer while no later one of its key was taken as calmly: should another prove
        the later ones disturbed, which can happen with any record to come, it is their stand-in.
        """
        by_key = self._by_key()
        kept = {id(record) for record in self._best.values()}
        for records in by_key.values():
            calmest = math.inf
            for record in sorted(records, key=_age, reverse=True):
                if self.trusts(record) and (unrest := _unrest(record)) < calmest:
                    calmest = unrest
                    kept.add(id(record))
        return tuple(record for record in self.records() if id(record) in kept)

    def _by_key(self) -> dict[RecordKey, list[TuningRecord]]:
        """Return all records by key, with `_rounds` and `_best` as they make them."""
        with self._lock:
            for record in self._new:
                key, seconds = record.reference_key, _reference_seconds(record)
                if key and seconds < _reference_seconds(self._best.get(key)):
                    self._best[key] = record
                self._all.setdefault(record.key, []).append(record)
                self._rounds.add(record.rounds)
            self._new.clear()
        return self._all

    def _pick(self, records: Sequence[TuningRecord]) -> TuningRecord:
        if len(records) == 1:
            return records[0]
        return max(records, key=lambda r: (self.trusts(r), *_age(r)))

    def trusts(self, record: TuningRecord) -> bool:
        """Tell whether a record's times hold: the machine had nothing else to do meanwhile.

        It had if what the trial was timed in turns with took much longer than at its best, or if
        the trial's own quartiles lie far apart. A failure is one on any machine.
        """
        if record.status != OK:
            return True
        if record.high > SPREAD * record.low + JITTER:
            return False
        self._by_key()
        key = record.reference_key
        if key is None or key not in self._best:
            return True
        best = _reference_seconds(self._best[key])
        return record.reference is None or record.reference.seconds <= BUSY * best + JITTER

    def lookup(self, key: RecordKey) -> TuningRecord | None:
        """Return the trusted record that answers for `key`: of as many rounds, or the next more.

        A trial that failed is known to fail, however many rounds were asked for.
        """
        by_key = self._by_key()
        more = sorted(self._rounds, key=lambda rounds: (rounds < key.rounds, rounds))
        for rounds in more:
            records = by_key.get(key._replace(rounds=rounds))
            record = self._pick(records) if records else None
            enough = record is not None and (rounds >= key.rounds or record.status != OK)
            if record is not None and enough and self.trusts(record):
                return record
        return None


def _age(record: TuningRecord) -> tuple[datetime, bytes]:
    """Return what orders the records of a key, the latest last."""
    return record.when, encode_record(record)


def _unrest(record: TuningRecord) -> float:
    """Return what a trusted record's trust falls with: less is trusted for longer."""
    if record.status != OK or record.reference is None:
        return -math.inf
    return record.reference.seconds


def _reference_seconds(record: TuningRecord | None) -> float:
    """Return what a record's reference took, infinity where there is none."""
    beside = record.reference if record else None
    return beside.seconds if beside and beside.seconds else math.inf


class LineFaultError(Exception):
    """A line is no record to trust; `reason` is one of a few words, for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')


def encode_record(record: TuningRecord) -> bytes:
    """Return `record` as one line of JSON with its checksum, newline included."""
    body = msgspec.json.encode(record)[:-1]
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def decode_record(line: bytes) -> TuningRecord:
    """Return the record in a line of `encode_record`; the newline may be missing.

    Raises LineFaultError for anything else, whatever the bytes are.
    """
    line = line.rstrip(b"\n")
    if len(line) > MAX_LINE_BYTES:
        raise LineFaultError("too long")
    seal = _SEAL.search(line)
    if seal is None:
        raise LineFaultError("not a whole record")
    body = line[: seal.start()]
    if zlib.crc32(body) != int(seal[1], 16):
        raise LineFaultError("changed since it was written")
    try:
        return msgspec.json.decode(body + b"}", type=TuningRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LineFaultError("another schema or impossible values") from None
