"""A device of one rank: runs tapes on the rank's own device, and sums over the group in between.

In: the rank's device and its `Collective`. Out: a `Device` for tapes of `shard.py`. Where the
kernels of a tape cannot reach the other ranks, on accelerators and other machines, a span of it
is run from one collective entry to the next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dovetail.ir.tape import Entry, Tape
from dovetail.runtime.abi import ALL_GATHER, COLLECTIVES
from dovetail.runtime.collective import F32, Collective
from dovetail.runtime.device import Bytes, Device, Event, Segment


class GroupDevice:
    """`device`, in a group. Until `join` it runs what has no collective."""

    def __init__(self, device: Device) -> None:
        self.name, self._device = device.name, device
        self._collective: Collective | None = None

    def join(self, collective: Collective) -> None:
        """Sum over the ranks of `collective` from now on."""
        self._collective = collective

    def alloc(self, nbytes: int) -> Bytes:
        """Return zeroed bytes of the device."""
        return self._device.alloc(nbytes)

    def copy(self, target: Bytes, source: Bytes, stream: int = 0) -> None:
        """Copy on the device."""
        self._device.copy(target, source, stream)

    def run(self, segment: Segment, stream: int = 0) -> None:
        """Run `segment`; all ranks must run theirs. RankError when the group has failed."""
        tape = segment.tape.tape
        span = range(len(tape.entries)) if segment.span is None else segment.span
        for part, collective in split_span(tape, span):
            if part:
                self._device.run(replace(segment, span=part), stream)
            if collective is not None:
                self._meet(segment, collective)

    def _meet(self, segment: Segment, entry: Entry) -> None:
        if segment.args[entry.m] <= 0:
            return
        assert self._collective is not None, "a tape of a group is run before it has been joined"
        names = COLLECTIVES[entry.op]
        values = {
            name: segment.tape.value(slot, segment.args)
            for name, slot in zip(names[1:], entry.slots[1:], strict=True)
        }
        x = _matrix(values["x"], values["rows"], values["columns"], values["stride"])
        if entry.op == ALL_GATHER:
            self._collective.all_gather(x, values["units"], values["size"])
        else:
            self._collective.all_reduce(x)

    def event(self, stream: int = 0) -> Event:
        """Mark the point that a stream of the device has come to."""
        return self._device.event(stream)

    def wait(self, event: Event) -> None:
        """Return when `event` has been reached."""
        self._device.wait(event)

    def now(self) -> float:
        """Return seconds on the device's clock."""
        return self._device.now()

    def close(self) -> None:
        """Close the device."""
        self._device.close()


def split_span(tape: Tape, span: range) -> Iterator[tuple[range, Entry | None]]:
    """Yield entries without collectives and the collective behind them, or None at the end."""
    start = span.start
    for place in span:
        if tape.entries[place].op in COLLECTIVES:
            yield range(start, place), tape.entries[place]
            start = place + 1
    if start < span.stop:
        yield range(start, span.stop), None


def _matrix(address: int, rows: int, columns: int, stride: int) -> F32:
    """Return the float32 rows at `address` as an array [rows, columns], `stride` values apart."""
    values = (rows - 1) * stride + columns
    flat = np.ctypeslib.as_array((ctypes.c_float * values).from_address(address))
    strides = (4 * stride, 4)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), strides)
