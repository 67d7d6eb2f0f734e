"""One kernel as a tape of its own, so that it is called and timed as in a step.

In: a library, a kernel with its schedule, the values of its operands. Out: seconds of a run.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dovetail.compiler.measure import Candidate
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
    """

    def __init__(
        self,
        library: KernelLibrary,
        candidate: Candidate,
        reduce: str | None,
        *operands: Sequence[int | float],
        rows: int,
    ) -> None:
        """reduce: the kernel that adds up partial results. rows: M, by which rows are found."""
        self._calls = len(operands)
        values = [value for each in operands for value in each]
        slots = (abi.Slot * len(values))(
            *(abi.Slot(f=v) if isinstance(v, float) else abi.Slot(i=v) for v in values)
        )
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*candidate.schedule)
        kernels = (candidate.kernel, reduce)
        addresses = [library.entry(name) if name else None for name in kernels]
        row = (abi.Row * 1)(abi.Row(1, *addresses, schedule))
        firsts = range(0, len(values), len(operands[0]))
        entries = (abi.Entry * len(operands))(*(abi.Entry(row, 1, at, 0, -1, 1) for at in firsts))
        self._keep = (slots, row, entries)
        self._tape = abi.Tape(entries, len(operands), slots, None, 0)
        self._args = (abi.Slot * 1)(abi.Slot(i=rows))

    def run(self, team: Team) -> float:
        """Run once, on all operands; return seconds."""
        return self._timed(team, range(self._calls))

    def run_warm(self, team: Team) -> float:
        """Run on the first operands, to wake the team, then on the others; return seconds of one.

        With one set of operands it is the first run that counts.
        """
        if self._calls == 1:
            return self.run(team)
        team.run(self._tape, self._args, range(1))
        return self._timed(team, range(1, self._calls)) / (self._calls - 1)

    def _timed(self, team: Team, span: range) -> float:
        start = time.perf_counter()
        team.run(self._tape, self._args, span)
        return time.perf_counter() - start
