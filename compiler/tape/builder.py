"""Collects the entries of a tape; barriers follow from what they read and write.

In: operators and their slots, one after another. Out: a Tape, whose buffers are planned by
liveness.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from dovetail.compiler.tape.buffers import Stage, plan_offsets
from dovetail.compiler.tape.operators import OPERATORS
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import WeightEntry, order_name
from dovetail.ir.tape import (
    ArgRef,
    Buffer,
    BufferRef,
    Entry,
    FloatConst,
    Groups,
    IntConst,
    KvRef,
    Slot,
    StateRef,
    Tape,
    WeightRef,
)

Value = Slot | int | float
"""A slot of an entry; numbers stand for constants."""
NO_RESIDUAL: tuple[Value, int] = (WeightRef(name=None), 0)


class TapeBuilder:
    """Collects entries; `add` decides each one's barrier, `finish` plans the buffers."""

    def __init__(self, weights: Iterable[WeightEntry] = ()) -> None:
        self.weights = {entry.name: entry for entry in weights}
        self.buffers: dict[str, Buffer] = {}
        self.entries: list[Entry] = []
        self.stages: list[Stage] = []
        self.split: tuple[Value, int] = NO_RESIDUAL
        """Where products add up parts of K, and how many elements fit there."""
        self.ordered = BufferRef(name="ordered")
        """Rows whose columns are as a weight has them: see `in_order`."""
        self._parts: frozenset[str] = frozenset()
        """What several entries of the open stage write together."""

    def padded(self, name: str, rows: int, columns: int) -> BufferRef:
        """Declare rows of float32 whose stride keeps neighbours out of each other's cache sets."""
        return self._declare(name, rows, columns, -(-columns // 16) * 16 + 16)

    def dense(self, name: str, rows: int, columns: int) -> BufferRef:
        """Declare float32 rows without padding, for kernels that index the buffer themselves."""
        return self._declare(name, rows, columns, columns)

    def rows(self, buffer: BufferRef) -> tuple[BufferRef, int]:
        """Return a buffer and the elements between its rows."""
        return buffer, self.buffers[buffer.name].stride

    def weight(self, name: str) -> WeightRef:
        """Return a weight, or null where this model has none of that name."""
        return WeightRef(name=name if name in self.weights else None)

    def gemm(self, weight: str, a: BufferRef, m: ArgRef, matrices: int = 1) -> tuple[Value, ...]:
        """Return the slots every GEMM begins with: M, N, K, A, lda, B, panel stride, bias.

        matrices: of one shape that the weight has, one after another.
        """
        entry = self.weights[weight]
        n = entry.n // 2 if entry.layout == "packed_pair" else entry.n
        stride = FORMATS[entry.dtype].panel_elements(entry.k)
        bias = self.weight(f"{weight}_bias")
        return (m, n // matrices, entry.k, *self.rows(a), self.weight(weight), stride, bias)

    def add(
        self,
        op: str,
        segment: str,
        *values: Value,
        m: ArgRef | None = None,
        skips: bool = False,
        groups: Groups | None = None,
    ) -> None:
        """Append an entry; `values` are its slots in order, numbers stand for constants.

        m: the rows it works on, by default its first slot. skips: it does not run where M is 0.
        groups: as of the entry.
        """
        slots, operands, rows = tuple(map(_slot, values)), OPERATORS[op], m or values[0]
        assert len(slots) == len(operands), f"{op} takes {len(operands)} slots, not {len(slots)}"
        assert isinstance(rows, ArgRef), f"the M of {op} is an argument"
        uses = [(r, o.kind) for s, o in zip(slots, operands, strict=True) if (r := _resource(s))]
        uses += [(groups.starts.name, "in")] if groups else []
        stage, parts = Stage.of(uses), frozenset(r for r, kind in uses if kind == "part")
        barrier = bool(self.stages) and self._needs_barrier(stage, parts)
        if barrier or not self.stages:
            self.stages.append(stage)
            self._parts = parts
        else:
            self.stages[-1] = self.stages[-1].join(stage)
            self._parts |= parts
        skip = rows.name if skips else None
        self.entries.append(
            Entry(
                op=op,
                slots=slots,
                m=rows.name,
                barrier=barrier,
                skip_if_zero=skip,
                groups=groups,
                segment=segment,
            )
        )

    def product(
        self, op: str, segment: str, m: ArgRef, weight: str, a: BufferRef, *rest: Value
    ) -> None:
        """Append a product of m rows; `rest` are its slots from the residual on."""
        self.add(op, segment, *self.gemm(weight, self.in_order(segment, m, weight, a), m), *rest)

    def in_order(self, segment: str, m: ArgRef, weight: str, a: BufferRef) -> BufferRef:
        """Return m rows of a with their columns as a weight has them, which it may have apart."""
        order = order_name(weight)
        if order not in self.weights:
            return a
        rows = self.rows(a), self.rows(self.ordered)
        values = (m, self.weights[order].n, self.weight(order), *rows[0], *rows[1])
        self.add("order_columns", segment, *values)
        return self.ordered

    def linear(
        self,
        op: str,
        segment: str,
        m: ArgRef,
        weight: str,
        a: BufferRef,
        c: BufferRef,
        *,
        residual: BufferRef | None = None,
    ) -> None:
        """Append c = a W^T + bias + residual over all m rows."""
        added = self.rows(residual) if residual else NO_RESIDUAL
        self.product(op, segment, m, weight, a, *added, *self.rows(c), *self.split)

    def gather(
        self, segment: str, m: ArgRef, places: str, source: BufferRef, target: BufferRef
    ) -> None:
        """Append target = the m rows of source that the argument `places` tells."""
        values = (m, self.buffers[target.name].columns, ArgRef(name=places))
        self.add("gather_rows", segment, *values, *self.rows(source), *self.rows(target))

    def finish(self, name: str, args: tuple[str, ...], tokens: int, sequences: int) -> Tape:
        """Plan the buffers and return the tape."""
        names = self.buffers.keys()
        stages = [Stage(stage.reads & names, stage.writes & names) for stage in self.stages]
        sizes = {buffer.name: buffer.bytes for buffer in self.buffers.values()}
        offsets, arena = plan_offsets(sizes, stages)
        return Tape(
            name=name,
            args=args,
            buffers=tuple(replace(b, offset=offsets[b.name]) for b in self.buffers.values()),
            arena_bytes=arena,
            entries=tuple(self.entries),
            max_tokens=tokens,
            max_sequences=sequences,
        )

    def _declare(self, name: str, rows: int, columns: int, stride: int) -> BufferRef:
        size = rows * stride * DTYPES["f32"].size
        self.buffers[name] = Buffer(
            name=name, dtype="f32", rows=rows, columns=columns, stride=stride, offset=0, bytes=size
        )
        return BufferRef(name=name)

    def _needs_barrier(self, stage: Stage, parts: frozenset[str]) -> bool:
        open_ = self.stages[-1]
        order = (stage.reads & open_.writes) | (stage.writes & (open_.reads | open_.writes))
        return bool(order - (parts & self._parts))


def _slot(value: Value) -> Slot:
    if isinstance(value, int):
        return IntConst(value=value)
    return FloatConst(value=value) if isinstance(value, float) else value


def _resource(slot: Slot) -> str | None:
    """Return the name under which a slot's memory takes part in dependences, None for constants."""
    if isinstance(slot, BufferRef):
        return slot.name
    if isinstance(slot, KvRef):
        return f"kv:{slot.pool}:{slot.layer}"
    if isinstance(slot, StateRef):
        return f"state:{slot.offset}"
    return f"arg:{slot.name}" if isinstance(slot, ArgRef) else None
