"""A native thread that runs parts of tapes on a team, each as soon as its operands are there.

In: orders, which lie in memory that stays, and releases, from Python or from a device's stream.
Out: the same orders, with what became of them. Python takes no part between release and end.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from dovetail.ir.errors import CapacityError
from dovetail.runtime.machine import abi
from dovetail.runtime.native.tape import Team, check_status


class Runner:
    """One thread; orders run in the order in which they are given. Ends with `close`."""

    def __init__(self, team: Team, cpus: Sequence[int] = ()) -> None:
        """Start the thread, which keeps to `cpus`; CapacityError where none can be had."""
        self._team = team  # outlives it
        self._c = team.library
        self.handle = self._c.dt_runner_create(team.handle, abi.int32_array(tuple(cpus)), len(cpus))
        if not self.handle:
            raise CapacityError("cannot start a thread; give a smaller number of threads")
        self.release_address = int(
            ctypes.cast(self._c.dt_runner_release, ctypes.c_void_p).value or 0
        )
        self._end = weakref.finalize(self, self._c.dt_runner_destroy, self.handle)
        self._end.atexit = False  # it may be in a run while the process ends

    def give(self, order: abi.Order) -> int:
        """Take an order, which runs when it is released; return its number."""
        return int(self._c.dt_runner_give(self.handle, ctypes.byref(order)))

    def release(self) -> None:
        """Let the next order run."""
        self._c.dt_runner_release(self.handle)

    def wait(self, number: int, order: abi.Order) -> tuple[float, float]:
        """Return when an order began and ended, once it has; raises as `Team.run`."""
        self._c.dt_runner_wait(self.handle, number)
        check_status(order.status, range(order.first, order.last))
        began, ended = order.times
        return began * 1e-9, ended * 1e-9

    def drop(self) -> None:
        """Wait for what runs, and forget what has not begun; nothing may be released meanwhile."""
        self._c.dt_runner_drop(self.handle)

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._end()
