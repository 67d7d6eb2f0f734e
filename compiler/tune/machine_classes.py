"""What tuning databases hold by machine class, and several of them made one.

In: paths of databases. Out: records, shapes and gains per class, or a database of the records that
answer. A class is what `HardwareKey.label` names: CPU features, model, caches and the thread team's
ABI. It is part of every record's key, so that records of two classes never replace each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dovetail.codegen.library import ABI
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.measure.jobs import Scoreboard, TunedPoint, mean_gain
from dovetail.compiler.measure.recorder import hardware_key
from dovetail.ir.errors import SpecError
from dovetail.ir.tuning import HardwareKey, Reference
from dovetail.topology.hardware import read_hardware


class MachineClass(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one class of machines.

    shapes: works at an M that were timed. gain: geometric mean over them of default time / best
    time; a default is at least as good as itself. best: the shape that gained most surely.
    """

    label: str
    cpu: str
    arch: str
    caches: tuple[int, int, int]
    targets: tuple[str, ...]
    records: int
    shapes: int
    gain: float
    best: TunedPoint | None


class DatabaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A database by machine class; here: the label of this machine's own. warning: bad lines."""

    database: str
    here: str
    classes: tuple[MachineClass, ...]
    warning: str | None


class MergeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a merge wrote: records in all, and those that it took from each source."""

    database: str
    records: int
    added: dict[str, int]


def describe_database(path: Path) -> DatabaseReport:
    """Return what the database at `path` holds; SpecError where there is none to read."""
    database = _open(path)
    by_class: dict[str, list[HardwareKey]] = defaultdict(list)
    for record in database:
        by_class[record.hardware.label].append(record.hardware)
    classes = (_describe(database, label, keys[0]) for label, keys in sorted(by_class.items()))
    return DatabaseReport(
        database=str(path),
        here=hardware_key(read_hardware(), 1, ABI).label,
        classes=tuple(classes),
        warning=database.warning,
    )


def merge_databases(sources: Sequence[Path], output: Path) -> MergeReport:
    """Write the records of `sources`, and those that `output` has, to it: of each key the best.

    That is the latest of those taken on a calm machine, never the luckiest. Raises SpecError, with
    nothing written, where a file is missing or has a line that is no whole, unchanged record, and
    where there is no record at all.
    """
    found = [_check(_open(path)) for path in dict.fromkeys(sources)]
    merged = _check(TuningDatabase(output))
    if not any(map(len, (merged, *found))):
        raise SpecError(
            f"there is no record in {', '.join(map(str, sources))}; nothing was written"
        )
    added = {str(database.path): merged.merge(database) for database in found}
    merged.prune()
    return MergeReport(database=str(output), records=len(merged), added=added)


def _open(path: Path) -> TuningDatabase:
    if not path.exists():
        raise SpecError(f"there is no tuning database {path}; `dovetail tune --db {path}` makes it")
    return TuningDatabase(path)


def _check(database: TuningDatabase) -> TuningDatabase:
    if database.skipped:
        raise SpecError(
            f"{database.path} is damaged ({database.reasons}); copy it again from where it was "
            "made, or leave it out; nothing was written"
        )
    return database


def _describe(database: TuningDatabase, label: str, key: HardwareKey) -> MachineClass:
    records = [record for record in database if record.hardware.label == label]
    boards: dict[tuple[str, Reference | None], Scoreboard] = defaultdict(Scoreboard)
    for record in records:  # only what was timed beside the same kernel of the same build compares
        beside = record.reference and msgspec.structs.replace(record.reference, seconds=0.0)
        if database.trusts(record):
            boards[record.target, beside].add(record)
    points = [point for board in boards.values() for point in board.points()]
    shapes = {(p.kind, *sorted(p.shape.items()), p.dtype, p.threads) for p in points}
    return MachineClass(
        label=label,
        cpu=key.cpu,
        arch=key.arch,
        caches=key.caches,
        targets=tuple(sorted({record.target for record in records})),
        records=len(records),
        shapes=len(shapes),
        gain=mean_gain([max(1.0, point.gain) for point in points]),
        best=max(points, key=lambda point: point.gain_low, default=None),
    )
