"""Who works now and who keeps which cores, in memory that all processes of an app share.

In: a division of the CPU, workers that begin and end to work. Out: the CPUs that each has meanwhile
(`topology/division.py`): its share, and what idle workers lend. No message is needed: a worker
looks before each step, pass or scan, so that cores change hands within one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dovetail.runtime.machine.memory import SharedMemory
from dovetail.topology.division import STAGES, Shares, lend

SLOTS, MOST_CPUS, BANK = 1024, 4096, 8
"""Workers, CPUs and bytes of a number in the board's memory. Each encoder of each CPU instance is
a worker, and a large machine may have an instance on each of its cores."""
ENGINE_SLOT, SEARCH_SLOT, ENCODER_SLOT = 0, 1, 2
"""Encoders have all slots from theirs on."""
Loans: TypeAlias = dict[tuple[str, ...], Mapping[str, tuple[int, ...]]]
"""By the stages at which somebody works: the CPUs of each, by stage."""
_SHARES = MOST_CPUS // 8 * len(STAGES)
_BYTES = SLOTS + 2 * BANK + SLOTS * len(STAGES) * BANK + 2 * _SHARES


class Board:
    """The shared memory. Each slot has one writer, its worker; shares have one, the app."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        """`memory`: of another process, by its descriptor."""
        self.memory = memory or SharedMemory.create(_BYTES)
        cuts = np.cumsum([SLOTS, 2 * BANK, SLOTS * len(STAGES) * BANK, 2 * _SHARES])
        busy, version, used, shares, _ = np.split(self.memory.bytes, cuts)
        self._busy, self._version = busy, version.view(np.uint64)  # of shares; 1: nothing is lent
        self._used = used.view(np.float64).reshape(SLOTS, len(STAGES))
        self._shares = shares.reshape(2, len(STAGES), -1)
        self._read: tuple[int, Shares, Loans] = (0, {}, {})
        self.slots = count(ENCODER_SLOT)  # for the app to give away

    @classmethod
    def join(cls, fd: int) -> Board | None:
        """Return the board of another process; None where `fd` is none."""
        return None if fd < 0 else cls(SharedMemory(fd, _BYTES))

    # ---- the app ----

    def divide(self, shares: Shares) -> None:
        """Give shares, of CPUs by stage, which all workers keep to from their next step on."""
        version = int(self._version[0]) + 1
        for row, stage in zip(self._shares[version % 2], STAGES, strict=True):
            bits = np.zeros(MOST_CPUS, np.uint8)
            bits[list(shares.get(stage, ()))] = 1
            row[:] = np.packbits(bits)
        self._version[0] = version

    def keep(self, kept: bool) -> None:
        """Have workers lend nothing from now on, or lend again."""
        self._version[1] = kept

    @property
    def used(self) -> dict[str, float]:
        """Core-seconds that each stage has worked so far."""
        return dict(zip(STAGES, self._used.sum(axis=0).tolist(), strict=True))

    @property
    def changes(self) -> int:
        """How often shares were given anew, since the first ones."""
        return max(0, int(self._version[0]) - 1)

    def clear(self, slot: int) -> None:
        """Note that the worker of a slot has died."""
        self._busy[slot] = 0

    # ---- workers ----

    @property
    def shares(self) -> Shares:
        """Those that hold now."""
        return self._now()[0]

    def _now(self) -> tuple[Shares, Loans]:
        """Return the shares that hold now, and what was lent of them; for any thread."""
        version, (seen, shares, lent) = int(self._version[0]), self._read
        if version != seen:
            bits = np.unpackbits(self._shares[version % 2], axis=1)
            found = zip(STAGES, (tuple(np.flatnonzero(row).tolist()) for row in bits), strict=True)
            shares, lent = {stage: cpus for stage, cpus in found if cpus}, {}
            self._read = version, shares, lent
        return shares, lent

    @property
    def cpus(self) -> int:
        """How many CPUs are shared."""
        return len({cpu for cpus in self.shares.values() for cpu in cpus})

    def begin(self, slot: int, stage: str) -> tuple[int, ...] | None:
        """Note that a worker is at a stage; return the CPUs that it has now, None = all, alone."""
        self._busy[slot] = STAGES.index(stage) + 1
        (shares, lent), seen = self._now(), self._busy.tobytes()
        if self._version[1]:
            return shares.get(stage)
        busy = tuple(name for code, name in enumerate(STAGES, 1) if code in seen)
        if busy not in lent:
            lent[busy] = lend(shares, busy) if len(busy) > 1 else {}
        return lent[busy].get(stage)

    def end(self, slot: int, stage: str, seconds: float) -> None:
        """Note that it has nothing to do, and how many core-seconds it had worked at a stage."""
        self._busy[slot] = 0
        self._used[slot, STAGES.index(stage)] += seconds


class Seat:
    """A worker's place at the board. One thread at a time."""

    def __init__(self, board: Board, slot: int) -> None:
        self._board, self._slot = board, slot
        self._at: tuple[str, float, int] | None = None  # stage, since when, on how many CPUs

    def take(self, stage: str) -> tuple[int, ...] | None:
        """Work at a stage from now on; return the CPUs for that, None = any."""
        self.leave()
        usable = self._board.begin(self._slot, stage)
        self._at = stage, time.perf_counter(), len(usable) if usable else self._board.cpus
        return usable

    def leave(self) -> None:
        """Have nothing to do."""
        if self._at is not None:
            stage, since, cpus = self._at
            self._board.end(self._slot, stage, cpus * (time.perf_counter() - since))
            self._at = None


class MovingSeat(Seat):
    """A seat of a worker whose threads are not ours to pin one by one: all of them move."""

    def __init__(self, board: Board, slot: int) -> None:
        super().__init__(board, slot)
        self._home = self._here = os.sched_getaffinity(0)

    def take(self, stage: str) -> tuple[int, ...] | None:
        """See Seat."""
        usable = super().take(stage)
        wanted = self._home if usable is None else self._home.intersection(usable) or self._home
        if wanted != self._here:
            self._here = wanted
            for thread in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # it has ended
                    os.sched_setaffinity(int(thread.name), wanted)
        return usable


@contextmanager
def take_seat(seat: Seat | None, stage: str) -> Iterator[tuple[int, ...] | None]:
    """Work at a stage meanwhile; yield the CPUs, None = any."""
    if seat is None:
        yield None
        return
    try:
        yield seat.take(stage)
    finally:
        seat.leave()
