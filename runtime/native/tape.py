"""Binds a tape to a kernel library, weights, schedule tables and buffers; threads that run it.

In: `ir.tape.Tape` and where its operands live. Out: a `BoundTape`, one native call per run on a
`Team`. What cannot be bound (unknown operator, kernel, weight, argument) is an ArtifactError.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, RankError
from dovetail.ir.schedule import SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.ir.tape import (
    ArgRef,
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
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.weights import Weights


@dataclass(frozen=True, slots=True)
class KvArrays:
    """The K and V pools `[layer][block][kv_head][16][head_dim]` as raw bytes.

    starts: where each layer begins, in bytes, and the end of the last; one without K and V of its
    own takes none.
    """

    k: npt.NDArray[np.uint8]
    v: npt.NDArray[np.uint8]
    starts: Sequence[int]

    def layers(self, pool: str) -> list[npt.NDArray[np.uint8]]:
        """Return K or V of each layer."""
        whole = self.k if pool == "k" else self.v
        return [whole[first:last] for first, last in pairwise(self.starts)]


@dataclass(frozen=True, slots=True)
class Operands:
    """Where a tape's operands live. `arena` holds the planned buffers."""

    weights: Weights
    arena: npt.NDArray[np.uint8]
    kv: KvArrays | None = None
    states: npt.NDArray[np.uint8] | None = None  # [slot][bytes of all layers]


Tables = Mapping[str, Sequence[ScheduleTable]]
"""The tables of each operator that fit threads and phase best, one for each shape and format."""


def pick_tables(
    tables: Iterable[ScheduleTable], target: str, phase: str, threads: int
) -> dict[str, tuple[ScheduleTable, ...]]:
    """Return the table of each operator and shape for a phase and thread count.

    Exact thread counts win, then the largest smaller one, then the smallest larger one; a table of
    the phase itself wins over one for `any`. Products of one for fewer threads are cut into more
    cells, so that each thread has some.
    """

    def rank(table: ScheduleTable) -> tuple[bool, int, bool]:
        fits = table.threads <= threads
        return fits, table.threads if fits else -table.threads, table.phase == phase

    chosen: dict[str, dict[tuple[int, int, str], ScheduleTable]] = {}
    for table in tables:
        if table.target != target or table.phase not in (phase, "any"):
            continue
        shapes = chosen.setdefault(table.op, {})
        key = table.n, table.k, table.dtype
        if rank(table) > rank(shapes.setdefault(key, table)):
            shapes[key] = table
    return {
        op: tuple(_share_out(table, threads) for table in shapes.values())
        for op, shapes in chosen.items()
    }


def _share_out(table: ScheduleTable, threads: int) -> ScheduleTable:
    """Return the table of a product for more threads, its grid of columns widened in proportion.

    Results stay, bit for bit: they depend on how K is cut.
    """
    if not table.n or threads <= table.threads:
        return table
    place = SCHEDULE_VALUES.index("grid_n")

    def widen(row: Row) -> Row:
        values = list(row.schedule)
        values[place] = -(-max(values[place], 1) * threads // table.threads)
        return replace(row, schedule=tuple(values))

    return replace(table, rows=tuple(map(widen, table.rows)))


def nearest_table(tables: Sequence[ScheduleTable], n: int, k: int) -> ScheduleTable:
    """Return the table of shape N x K, else the one whose shape is the fewest times off."""
    return min(tables, key=lambda t: _times_off(t.n, n) + _times_off(t.k, k))


def _times_off(a: int, b: int) -> float:
    return abs(math.log(max(a, 1) / max(b, 1)))


def check_status(status: int, span: range) -> None:
    """Raise RankError when a run of entries was stopped, DeviceError when it failed."""
    if status == abi.STOPPED:
        raise RankError("a process of the group ended while it was computing")
    if status:
        raise DeviceError(
            f"the CPU could not run entries {span.start} to {span.stop} of a step: status "
            f"{status}; send the request again"
        )


class Team:
    """Fixed threads that run tapes; the caller of a run is one of them. Ends with `close`."""

    def __init__(self, library: KernelLibrary, threads: int, spin: int) -> None:
        """Start all but one of `threads`; spin: turns that they wait before they sleep."""
        self.library, self.threads = library.c, threads
        self.handle = self.library.dt_team_create(threads, None, spin)
        if not self.handle:
            raise CapacityError(f"cannot start {threads} threads; give a smaller number of threads")
        self._active: tuple[int, tuple[int, ...]] = (threads, ())
        self._end = weakref.finalize(self, self.library.dt_team_destroy, self.handle)
        self._end.atexit = False  # another thread may be in a run while the process ends

    def set_active(self, plan: PhasePlan) -> None:
        """Use the first `plan.threads` threads from now on, pinned to `plan.cpus`.

        Raises DeviceError when one of these CPUs is not there any more.
        """
        wanted = (plan.threads, plan.cpus)
        if wanted == self._active:
            return
        if self.library.dt_team_set_active(self.handle, plan.threads, abi.int32_array(plan.cpus)):
            self._active = (0, ())
            raise DeviceError(
                f"threads cannot be bound to CPUs {', '.join(map(str, plan.cpus))}: one is offline "
                "or no longer allowed to this process; load the artifact again to plan again"
            )
        self._active = wanted

    def run(
        self,
        tape: abi.Tape,
        args: ctypes.Array[abi.Slot],
        span: range,
        most: int | None = None,
        times: int | None = None,
    ) -> None:
        """Run the entries `span` of a bound tape, on at most so many threads.

        times: address of where to note when they ran, see dt_run.

        Raises RankError when it was stopped, DeviceError when the team could not run it.
        """
        given = (self.handle, ctypes.byref(tape), args, span.start, max(span.start, span.stop))
        status = self.library.dt_run(*given, self.threads if most is None else most, times)
        check_status(status, span)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._end()


class BoundTape:
    """A tape whose operands are addresses. One run at a time."""

    def __init__(
        self,
        library: KernelLibrary,
        tape: Tape,
        tables: Tables,
        operands: Operands,
        plan: PhasePlan,
    ) -> None:
        """Bind `tape` for the threads of `plan`; ArtifactError names what is missing."""
        self.tape, self.plan, self._library, self._operands = tape, plan, library, operands
        self._tables = tables
        self._arg_index = {name: i for i, name in enumerate(tape.args)}
        self._buffers = {buffer.name: buffer for buffer in tape.buffers}
        self._rows: dict[tuple[str, int, int, str], ctypes.Array[abi.Row]] = {}
        self._patches: list[abi.Patch] = []
        self._groups: list[abi.Groups] = []
        self._check_buffers()
        slots = [slot for entry in tape.entries for slot in entry.slots]
        self._slots = (abi.Slot * max(1, len(slots)))()
        for i, slot in enumerate(slots):
            self._bind_slot(i, slot)
        self._entries = self._bind_entries()
        self._patch_array = (abi.Patch * max(1, len(self._patches)))(*self._patches)
        self._args = (abi.Slot * max(1, len(tape.args)))()
        self._known: dict[str, int] = {}  # arguments as they are set
        self._everything = range(len(tape.entries))
        self.times: list[npt.NDArray[np.int64]] | None = None
        """Where each run adds when its entries ran, [entry][thread][abi.TIMES], or None."""
        self._tape = abi.Tape(
            self._entries,
            len(tape.entries),
            self._slots,
            self._patch_array,
            len(self._patches),
            None,
        )

    def _set_args(self, args: Mapping[str, int]) -> None:
        known, fields, places = self._known, self._args, self._arg_index
        for name, value in args.items():
            if known.get(name) != value:  # most are the same in every run
                fields[places[name]].i = known[name] = value

    def stop_at(self, word: int) -> None:
        """Pass over kernels once the int32 at address `word` is not 0; runs raise RankError."""
        self._tape.stop = word

    def run(
        self,
        team: Team,
        args: Mapping[str, int],
        span: range | None = None,
        most: int | None = None,
        usable: Collection[int] | None = None,
    ) -> None:
        """Set `args` (integers and addresses) and run all entries, or those in `span`.

        On the threads of the plan it was bound for, of these on the PUs that are `usable` now; if
        none is, on as many others that are: how products are cut, and so each bit, stays. On `most`
        of them at most: none of the others is woken.
        """
        plan = self.plan if usable is None else self._cut(usable)
        team.set_active(plan)
        threads = plan.threads if most is None else min(most, plan.threads)
        self._set_args(args)
        span = self._everything if span is None else span
        where = None
        if self.times is not None:
            self.times.append(np.zeros((len(span), threads, abi.TIMES), np.int64))
            where = int(self.times[-1].ctypes.data)
        team.run(self._tape, self._args, span, threads, where)

    def _cut(self, usable: Collection[int]) -> PhasePlan:
        own = self.plan.cpus
        if not own or not usable:
            return self.plan
        cpus = tuple(cpu for cpu in own if cpu in usable) or tuple(usable)[: len(own)]
        return PhasePlan(threads=len(cpus), cpus=cpus)

    def order(self, span: range, begun: npt.NDArray[np.int64], block_bytes: int) -> abi.Order:
        """Return an order to run the entries in `span` of one layer, with arguments of `prepare`.

        begun: how many blocks of both pools are cleared before, then these; it stays in use, as
        does what this tape is bound to.
        """
        used = [slot for i in span for slot in self.tape.entries[i].slots]
        pools = {s.pool: self._kv_address(s) for s in used if isinstance(s, KvRef)}
        return abi.Order(
            tape=ctypes.pointer(self._tape),
            args=self._args,
            first=span.start,
            last=span.stop,
            pools=(pools["k"], pools["v"]),
            begun=begun.ctypes.data,
            block_bytes=block_bytes,
        )

    def prepare(
        self, team: Team, args: Mapping[str, int], usable: Collection[int] | None = None
    ) -> None:
        """Set what orders run with; while none of this tape's runs. usable: see `run`."""
        team.set_active(self.plan if usable is None else self._cut(usable))
        self._set_args(args)

    def kernel(self, entry: Entry, m: int) -> str:
        """Return the name of the kernel that computes an entry of m rows."""
        return [row.kernel for row in self._table(entry).rows if row.m_lo <= m][-1]

    def product_bytes(self, entry: Entry, m: int) -> int:
        """Return the bytes of weights that an entry of m rows reads; 0 where it is no product.

        Of experts as many as m rows may choose.
        """
        names = self._library.slots(self.kernel(entry, 1))
        weight = dict(zip(names, entry.slots, strict=True)).get("B")
        if not isinstance(weight, WeightRef) or weight.name is None:
            return 0
        groups, whole = entry.groups, self._operands.weights.entries[weight.name].bytes
        return whole * min(m * groups.each, groups.count) // groups.count if groups else whole

    def buffer(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a planned buffer."""
        buffer = self._buffers[name]
        return self._operands.arena[buffer.offset : buffer.offset + buffer.bytes]

    def _error(self, problem: str) -> ArtifactError:
        return ArtifactError(
            f"tape {self.tape.name!r} cannot be bound: {problem}; "
            f"run `dovetail compile MODEL` again"
        )

    def _check_buffers(self) -> None:
        size = len(self._operands.arena)
        for buffer in self.tape.buffers:
            if buffer.offset < 0 or buffer.offset % 64 or buffer.offset + buffer.bytes > size:
                raise self._error(f"buffer {buffer.name!r} does not lie in the arena")

    def _bind_slot(self, place: int, slot: Slot) -> None:
        if isinstance(slot, IntConst):
            self._slots[place].i = slot.value
        elif isinstance(slot, FloatConst):
            self._slots[place].f = slot.value
        elif isinstance(slot, ArgRef):
            self._patches.append(abi.Patch(place, self._arg(slot.name), slot.offset))
        elif isinstance(slot, BufferRef):
            self._slots[place].i = self._buffer_address(slot)
        elif isinstance(slot, WeightRef):
            self._slots[place].i = self._weight_address(slot)
        elif isinstance(slot, StateRef):
            self._slots[place].i = self._state_address(slot)
        else:
            self._slots[place].i = self._kv_address(slot)

    def _arg(self, name: str) -> int:
        if name not in self._arg_index:
            raise self._error(f"it has no argument {name!r}")
        return self._arg_index[name]

    def _buffer_address(self, slot: BufferRef) -> int:
        buffer = self._buffers.get(slot.name)
        if buffer is None or not 0 <= slot.offset <= buffer.bytes:
            raise self._error(f"it has no buffer {slot.name!r} with {slot.offset} bytes")
        return int(self._operands.arena.ctypes.data) + buffer.offset + slot.offset

    def _weight_address(self, slot: WeightRef) -> int:
        if slot.name is None:
            return 0
        entry = self._operands.weights.entries.get(slot.name)
        if entry is None or not 0 <= slot.offset <= entry.bytes:
            raise self._error(f"the model has no weight {slot.name!r} with {slot.offset} bytes")
        return self._operands.weights.address(slot.name) + slot.offset

    def _kv_address(self, slot: KvRef) -> int:
        kv = self._operands.kv
        pool = {"k": kv.k, "v": kv.v}.get(slot.pool) if kv else None
        if kv is None or pool is None or not 0 <= slot.layer < len(kv.starts) - 1:
            raise self._error(f"there is no layer {slot.layer} in the {slot.pool!r} pool")
        return int(pool.ctypes.data) + kv.starts[slot.layer]

    def _state_address(self, slot: StateRef) -> int:
        states = self._operands.states
        if states is None or not 0 <= slot.offset < states.nbytes:
            raise self._error(f"there is no state of {slot.offset} bytes")
        return int(states.ctypes.data) + slot.offset

    def _bind_entries(self) -> ctypes.Array[abi.Entry]:
        entries = (abi.Entry * max(1, len(self.tape.entries)))()
        first = 0
        for i, entry in enumerate(self.tape.entries):
            rows = self._bind_rows(entry)
            skip = -1 if entry.skip_if_zero is None else self._arg(entry.skip_if_zero)
            entries[i] = abi.Entry(
                rows, len(rows), first, self._arg(entry.m), skip, int(entry.barrier)
            )
            if entry.groups is not None:
                self._groups.append(self._bind_groups(entry, entry.groups))
                entries[i].groups = ctypes.pointer(self._groups[-1])
            first += len(entry.slots)
        return entries

    def _bind_groups(self, entry: Entry, groups: Groups) -> abi.Groups:
        slots = self._library.slots(self.kernel(entry, 1))
        places = map(slots.index, ("M", "A", "lda", "B", "bias", "C", "ldc"))
        starts = self._buffer_address(groups.starts)
        if len(slots) > abi.MOST_SLOTS:
            raise self._error(f"operator {entry.op!r} has {len(slots)} operands")
        sizes = groups.count, groups.bytes, groups.bias_bytes
        return abi.Groups(*sizes, starts, len(slots), *places)

    def _bind_rows(self, entry: Entry) -> ctypes.Array[abi.Row]:
        table = self._table(entry)
        bounds = [row.m_lo for row in table.rows]
        if not bounds or bounds[0] > 1 or bounds != sorted(set(bounds)):
            raise self._error(f"the breakpoints of {entry.op!r} do not cover every M")
        for row in table.rows:
            self._check_operands(entry, row)
        key = (table.op, table.n, table.k, table.dtype)
        if key not in self._rows:
            self._rows[key] = (abi.Row * len(table.rows))(*map(self._bind_row, table.rows))
        return self._rows[key]

    def _table(self, entry: Entry) -> ScheduleTable:
        """Return the table for the shape of an entry, whose operands say N and K in a product."""
        tables = self._tables.get(entry.op, ())
        if not tables:
            raise self._error(f"no schedule table for operator {entry.op!r}")
        if len(tables) == 1:
            return tables[0]
        first = next((row.kernel for table in tables for row in table.rows), "")
        names = self._library.slots(first) if first else ()
        values = dict(zip(names, entry.slots, strict=False))
        n, k = (slot.value if isinstance(slot, IntConst) else 0 for slot in map(values.get, "NK"))
        ref, known = values.get("B"), self._operands.weights.entries
        weight = known.get(ref.name or "") if isinstance(ref, WeightRef) else None
        alike = [t for t in tables if t.dtype == (weight.dtype if weight else "")]
        return nearest_table(alike or tables, n, k)

    def _check_operands(self, entry: Entry, row: Row) -> None:
        for kernel in (row.kernel, row.reduce_kernel):
            if kernel is None:
                continue
            self._library.entry(kernel)
            wanted = len(self._library.slots(kernel))
            if wanted != len(entry.slots):
                raise self._error(
                    f"{kernel!r} takes {wanted} operands, operator {entry.op!r} has "
                    f"{len(entry.slots)}"
                )

    def _bind_row(self, row: Row) -> abi.Row:
        if len(row.schedule) != abi.SCHEDULE_LENGTH:
            raise self._error(f"a schedule of {row.kernel!r} has {len(row.schedule)} values")
        reduce = self._library.entry(row.reduce_kernel) if row.reduce_kernel else None
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*row.schedule)
        return abi.Row(row.m_lo, self._library.entry(row.kernel), reduce, schedule)
