"""One kernel as a tape of its own, so that it is called and timed as in a step.

In: a library, a kernel with its schedule, the values of its operands. Out: seconds of a run.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

from dovetail.compiler.measure import Candidate
from dovetail.runtime import abi
from dovetail.runtime.library import KernelLibrary, Team

PERIOD = 1_000_003
"""Values in the pattern that fills operands; prime, so that no two panels are alike."""


class KernelCall:
    """A candidate bound to operands, in the order of the kernel's slots; the caller owns these."""

    def __init__(
        self,
        library: KernelLibrary,
        candidate: Candidate,
        reduce: str | None,
        values: Sequence[int | float],
        *,
        rows: int,
    ) -> None:
        """reduce: the kernel that adds up partial results. rows: M, by which rows are found."""
        self._library = library
        slots = (abi.Slot * len(values))(
            *(abi.Slot(f=v) if isinstance(v, float) else abi.Slot(i=v) for v in values)
        )
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*candidate.schedule)
        kernels = (candidate.kernel, reduce)
        addresses = [library.entry(name) if name else None for name in kernels]
        row = (abi.Row * 1)(abi.Row(1, *addresses, schedule))
        entries = (abi.Entry * 1)(abi.Entry(row, 1, 0, 0, -1, 0))
        self._keep = (slots, row, entries)
        self._tape = abi.Tape(entries, 1, slots, None, 0)
        self._args = (abi.Slot * 1)(abi.Slot(i=rows))

    def run(self, team: Team) -> float:
        """Run once; return seconds."""
        start = time.perf_counter()
        self._library.run(team, self._tape, self._args, range(1))
        return time.perf_counter() - start
