"""Verifies a tape against everything it refers to: the builder makes none of these faults.

In: a Tape, the weight index and schedule tables, or an artifact. Out: nothing; a fault raises
ScheduleError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from dovetail.compiler.tape.buffers import Stage, live_sets
from dovetail.compiler.tape.operators import OPERATORS, POINTERS, Operand, named_slots
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import ScheduleError
from dovetail.ir.model import APART, OWN_GATE, PANEL, WeightEntry
from dovetail.ir.schedule import ScheduleFile, ScheduleTable
from dovetail.ir.tape import (
    GATED,
    ArgRef,
    BufferRef,
    Entry,
    FloatConst,
    IntConst,
    Slot,
    Tape,
    WeightRef,
)


class _Weights(msgspec.Struct):
    """What the files of models and of encoders both have."""

    weights: tuple[WeightEntry, ...]


def verify_tapes(path: str | Path) -> None:
    """Verify all tapes of an artifact, each by the tables of every target."""
    for folder in Path(path).glob("models/*"):
        (file,) = (f for f in folder.glob("*.json") if f.name in ("model.json", "encoder.json"))
        weights = msgspec.json.decode(file.read_bytes(), type=_Weights).weights
        schedules = (folder / "schedules.json").read_bytes()
        tables = msgspec.json.decode(schedules, type=ScheduleFile).tables
        tapes = list(folder.glob("tapes/*.json"))
        assert tapes
        for tape in (msgspec.json.decode(tape.read_bytes(), type=Tape) for tape in tapes):
            for target in {table.target for table in tables}:
                those = [table for table in tables if table.target == target]
                if tape.name != GATED or any(table.op == OWN_GATE for table in those):
                    verify_tape(tape, weights, those)


def verify_tape(
    tape: Tape, weights: Sequence[WeightEntry], tables: Iterable[ScheduleTable] = ()
) -> None:
    """Check slots, weights, arguments, schedule tables and that live buffers do not overlap.

    `tables` may be empty before schedules are made. Raises ScheduleError with every fault found.
    """
    index = {entry.name: entry for entry in weights}
    faults = [
        f"{_where(tape, number)}: {fault}"
        for number, entry in enumerate(tape.entries)
        for fault in _entry_faults(entry, tape, index)
    ]
    faults = faults or [*_table_faults(tape, tables, index), *_buffer_faults(tape)]
    if faults:
        raise ScheduleError("; ".join(faults))


def table_key(entry: Entry) -> tuple[str, int, int]:
    """Return (op, N, K) of the schedule table an entry runs by; 0, 0 for all but GEMMs."""
    slots = named_slots(entry)
    match slots.get("N"), slots.get("K"):
        case IntConst(value=n), IntConst(value=k):
            return entry.op, n, k
    return entry.op, 0, 0


def _stored(entry: Entry, weights: dict[str, WeightEntry]) -> str:
    """Return the format of the weight of a product, nothing for other entries."""
    slot = named_slots(entry).get("B")
    return weights[slot.name].dtype if isinstance(slot, WeightRef) and slot.name else ""


def tape_stages(tape: Tape) -> list[Stage]:
    """Return the buffers read and written between barriers."""
    stages: list[Stage] = []
    for entry in tape.entries:
        uses = [
            (slot.name, operand.kind)
            for slot, operand in zip(entry.slots, OPERATORS[entry.op], strict=True)
            if isinstance(slot, BufferRef)
        ]
        stage = Stage.of([*uses, (entry.groups.starts.name, "in")] if entry.groups else uses)
        if entry.barrier or not stages:
            stages.append(stage)
        else:
            stages[-1] = stages[-1].join(stage)
    return stages


def _where(tape: Tape, number: int) -> str:
    return f"{tape.name} entry {number} ({tape.entries[number].op})"


def _table_faults(
    tape: Tape, tables: Iterable[ScheduleTable], weights: dict[str, WeightEntry]
) -> Iterator[str]:
    known = {(table.op, table.n, table.k, table.dtype if table.n else "") for table in tables}
    for number, entry in enumerate(tape.entries):
        if known and (key := (*table_key(entry), _stored(entry, weights))) not in known:
            yield f"{_where(tape, number)}: no schedule table for (op, N, K, format) = {key}"


def _buffer_faults(tape: Tape) -> Iterator[str]:
    buffers = {buffer.name: buffer for buffer in tape.buffers}
    for buffer in tape.buffers:
        if buffer.offset % 64 or buffer.offset + buffer.bytes > tape.arena_bytes:
            yield f"buffer {buffer.name} is not aligned or leaves the arena"
        needed = ((buffer.rows - 1) * buffer.stride + buffer.columns) * DTYPES[buffer.dtype].size
        if buffer.stride < buffer.columns or buffer.bytes < needed:
            yield f"buffer {buffer.name} is smaller than its rows"
    for live in live_sets(tape_stages(tape)):
        for a, b in combinations([buffers[name] for name in live & buffers.keys()], 2):
            if a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes:
                yield f"buffers {a.name} and {b.name} overlap while both are live"
                return


def _entry_faults(entry: Entry, tape: Tape, weights: dict[str, WeightEntry]) -> Iterator[str]:
    if entry.op not in OPERATORS:
        yield "unknown op"
        return
    operands = OPERATORS[entry.op]
    if len(entry.slots) != len(operands):
        yield f"{len(entry.slots)} slots, not {len(operands)}"
        return
    for name in (entry.m, entry.skip_if_zero):
        if name is not None and name not in tape.args:
            yield f"{name} is no argument of the tape"
    for slot, operand in zip(entry.slots, operands, strict=True):
        if not _fits(slot, operand):
            yield f"slot {operand.name} cannot be {slot}"
        elif isinstance(slot, ArgRef) and slot.name not in tape.args:
            yield f"slot {operand.name}: {slot.name} is no argument of the tape"
        elif isinstance(slot, BufferRef) and slot.name not in {b.name for b in tape.buffers}:
            yield f"slot {operand.name}: no buffer {slot.name}"
        elif isinstance(slot, WeightRef) and slot.name is not None and slot.name not in weights:
            yield f"slot {operand.name}: no weight {slot.name}"
    yield from _shape_faults(entry, weights)


def _fits(slot: Slot, operand: Operand) -> bool:
    """Tell whether a slot can stand for an operand: numbers for numbers, addresses for pointers."""
    if operand.kind not in POINTERS:
        number = FloatConst if operand.kind == "float" else IntConst
        return isinstance(slot, number | ArgRef)
    if isinstance(slot, WeightRef):
        return operand.kind.endswith("?") if slot.name is None else operand.kind[:6] == "weight"
    return not isinstance(slot, IntConst | FloatConst) and operand.kind[:6] != "weight"


def _shape_faults(entry: Entry, weights: dict[str, WeightEntry]) -> Iterator[str]:
    """Compare a GEMM's N and K with the weight it reads."""
    matrix = named_slots(entry).get("B")
    if not isinstance(matrix, WeightRef) or matrix.name not in weights:
        return
    weight = weights[matrix.name]
    _, n, k = table_key(entry)
    columns = weight.n // 2 if weight.layout == "packed_pair" else weight.n
    if entry.op == APART:  # all panels, as they lie
        columns = -(-columns // PANEL) * PANEL * 2
    columns //= entry.groups.count if entry.groups else 1
    if (
        entry.op == "heads"
        and not columns % n
        and not matrix.offset % (weight.bytes * n // columns)
    ):
        columns = n  # one of several matrices
    if (n, k) != (columns, weight.k):
        yield f"N, K = {n}, {k} but {weight.name} is {columns} x {weight.k}"
