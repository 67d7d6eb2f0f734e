"""One kernel as a tape of its own, so that it is called and timed as in a step.

In: a library, a kernel with its schedule, the values of its operands. Out: seconds of a run.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dovetail.compiler.measure.meter import Candidate
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.native.tape import Team

PERIOD = 1_000_003
"""Values in the pattern that fills operands; prime, so that no two panels are alike."""


def zeros(rows: int, columns: int) -> npt.NDArray[np.float32]:
    """Return zeros that lie as an engine's buffers do: vectors across cache lines are slow."""
    return allocate(4 * rows * columns).view(np.float32).reshape(rows, columns)


class KernelCall:
    """A candidate bound to operands, in the order of the kernel's slots; the caller owns these.

    Of several sets of operands it is run on one after the other, as the kernels of a step are.
    then: a kernel that follows each time, and its operands.
    """

    def __init__(
        self,
        library: KernelLibrary,
        candidate: Candidate,
        reduce: str | None,
        *operands: Sequence[int | float],
        rows: int,
        then: tuple[str, Sequence[int | float]] | None = None,
    ) -> None:
        """reduce: the kernel that adds up partial results. rows: M, by which rows are found."""
        self._calls, self._each = len(operands), 2 if then else 1
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*candidate.schedule)
        addresses = [library.entry(name) if name else None for name in (candidate.kernel, reduce)]
        row = (abi.Row * 1)(abi.Row(1, *addresses, schedule))
        calls = [(row, each) for each in operands]
        if then:
            after = (abi.Row * 1)(abi.Row(1, library.entry(then[0]), None, schedule))
            calls = [part for call in calls for part in (call, (after, then[1]))]
        values = [value for _, each in calls for value in each]
        slots = (abi.Slot * len(values))(
            *(abi.Slot(f=v) if isinstance(v, float) else abi.Slot(i=v) for v in values)
        )
        firsts = accumulate((len(each) for _, each in calls), initial=0)
        entries = (abi.Entry * len(calls))(
            *(abi.Entry(row, 1, at, 0, -1, 1) for (row, _), at in zip(calls, firsts, strict=False))
        )
        self._keep = (slots, calls, entries)
        self._tape = abi.Tape(entries, len(calls), slots, None, 0)
        self._args = (abi.Slot * 1)(abi.Slot(i=rows))

    def run(self, team: Team) -> float:
        """Run once, on all operands; return seconds."""
        return self._timed(team, range(self._calls * self._each))

    def run_warm(self, team: Team) -> float:
        """Run on the first operands, to wake the team, then on the others; return seconds of one.

        With one set of operands it is the first run that counts.
        """
        if self._calls == 1:
            return self.run(team)
        team.run(self._tape, self._args, range(self._each))
        return self._timed(team, range(self._each, self._calls * self._each)) / (self._calls - 1)

    def _timed(self, team: Team, span: range) -> float:
        start = time.perf_counter()
        team.run(self._tape, self._args, span)
        return time.perf_counter() - start
