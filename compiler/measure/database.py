"""The tuning database: one file of records that processes share and no kill can spoil.

In: a path. Out: the records in it that can be trusted, by key; a count of the lines that cannot.
Lines are only ever added, each whole, under a file lock; `prune` alone writes the file anew.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from filelock import FileLock, Timeout

from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import SpecError
from dovetail.ir.files import write_whole
from dovetail.ir.tuning import (
    MAX_LINE_BYTES,
    LineFaultError,
    RecordSet,
    TuningRecord,
    decode_record,
    encode_record,
)

FILE_NAME = "tuning.jsonl"
LOCK_SECONDS = 60.0
RECORD_START = b'{"schema":'  # of whatever schema


def default_path(cache: Path | None = None) -> Path:
    """Return the database that compiles share: `tuning.jsonl` in the build cache."""
    return (cache or cache_directory()) / FILE_NAME


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What two databases disagree in; pairs are (ours, theirs).

    changed: another status, or quartiles apart. same: everything else that both know.
    """

    ours: tuple[TuningRecord, ...]
    theirs: tuple[TuningRecord, ...]
    changed: tuple[tuple[TuningRecord, TuningRecord], ...]
    same: int


class TuningDatabase(RecordSet):
    """The records of one file.

    skipped: how many lines are no records to trust, by reason.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read what is there; a file that does not exist is an empty database.

        Raises SpecError where it cannot be read, is no file or holds something else.
        """
        self.path = Path(path)
        self.skipped: Counter[str] = Counter()
        with self._errors("read"), self._locked():
            self._load()

    def __len__(self) -> int:
        return len(self.known)

    def __iter__(self) -> Iterator[TuningRecord]:
        return iter(tuple(self.known.values()))

    @property
    def reasons(self) -> str:
        """Why lines were skipped, with counts."""
        return ", ".join(f"{n} {reason}" for reason, n in sorted(self.skipped.items()))

    @property
    def warning(self) -> str | None:
        """A sentence that counts the lines which were skipped, None if there were none."""
        if not self.skipped:
            return None
        return f"{self.path}: skipped {self.skipped.total()} lines ({self.reasons})"

    def trusted(self) -> tuple[TuningRecord, ...]:
        """Return the records whose times were taken while the machine did nothing else."""
        return tuple(record for record in self if self.trusts(record))

    def append(self, records: Sequence[TuningRecord]) -> None:
        """Add records to the file and to what is known; SpecError where that cannot be done."""
        if not records:
            return
        with self._errors("write"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                _append_lines(self.path, [encode_record(record) for record in records])
        super().append(records)

    def merge(self, other: TuningDatabase) -> int:
        """Add the records of `other` that one of both together needs; return how many.

        Both answer alike afterwards when each has merged the other.
        """
        union = RecordSet()
        ours = {encode_record(record) for record in self.records()}
        union.append((*self.records(), *other.records()))
        news = {encode_record(record): record for record in union.needed()}
        added = [record for line, record in news.items() if line not in ours]
        self.append(added)
        return len(added)

    def prune(self, keep: Callable[[TuningRecord], bool] = lambda record: True) -> int:
        """Write the file anew with the records that `keep` wants; return lines dropped.

        Superseded and disturbed records go too, but for those by which others are judged.
        """
        with self._errors("write"), self._locked():
            self._load()
            lines = sum(1 for _ in self.records()) + self.skipped.total()
            kept = [record for record in self.needed() if keep(record)]
            if lines > len(kept):
                write_whole(self.path, b"".join(map(encode_record, kept)))
                self._load()
        return lines - len(kept)

    def diff(self, other: TuningDatabase) -> Difference:
        """Compare with another database."""
        ours, theirs = self.known, other.known
        both = [(ours[key], theirs[key]) for key in ours if key in theirs]
        changed = tuple(pair for pair in both if _differ(*pair))
        return Difference(
            ours=tuple(r for key, r in ours.items() if key not in theirs),
            theirs=tuple(r for key, r in theirs.items() if key not in ours),
            changed=changed,
            same=len(both) - len(changed),
        )

    def _load(self) -> None:
        super().__init__()
        self.skipped = Counter()
        try:
            with self.path.open("rb") as file:
                ours = [self._take(line) for line in _lines(file)]
        except FileNotFoundError:
            return
        if ours and not any(ours):
            raise SpecError(
                f"{self.path} is no tuning database: no line of it is a record; choose another file"
            )

    def _take(self, line: bytes) -> bool:
        """Take a line in, or count it; tell whether it begins as records do, torn ones too."""
        try:
            self.add(decode_record(line))
        except LineFaultError as fault:
            self.skipped[fault.reason] += 1
        return RECORD_START.startswith(line[: len(RECORD_START)])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock, where its folder can hold one; a read-only one needs none."""
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        parent = self.path.parent
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            yield
            return
        try:
            with FileLock(f"{self.path}.lock", timeout=LOCK_SECONDS):
                yield
        except Timeout:
            raise SpecError(
                f"{self.path} was locked by another process for {LOCK_SECONDS:.0f} s; "
                "wait until that is done, or choose another file with --db"
            ) from None

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpecError(
                f"cannot {doing} the tuning database {self.path}: {error.strerror}; "
                "name a file that can be read and written"
            ) from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file that may hold anything; an overlong one comes cut short."""
    while line := file.readline(MAX_LINE_BYTES + 2):
        whole = line
        while whole and not whole.endswith(b"\n"):
            whole = file.readline(MAX_LINE_BYTES)
        if line != b"\n":
            yield line


def _append_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Add all lines, or none where the disk is full.

    A torn last line, of a process that died, is ended first.
    """
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.write(b"\n")
        try:
            left = b"".join(lines)
            while left:  # a part may have been written
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)
            raise


def _differ(ours: TuningRecord, theirs: TuningRecord) -> bool:
    apart = ours.high < theirs.low or theirs.high < ours.low
    return ours.status != theirs.status or apart
