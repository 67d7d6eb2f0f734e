"""What the ranks of a group do together, and how they do it through shared memory (Sandwich §7.2).

In: a memfd that the first rank made and the others inherited. Out: arrays in it, and a
`Communicator`. Nothing has a name, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError, RankError
from dovetail.runtime.machine.abi import int32_array

F32: TypeAlias = npt.NDArray[np.float32]


class Collective(Protocol):
    """A rank's part in what a group sums and gathers, as its engine sees it."""

    @property
    def failed(self) -> bool:
        """Whether a rank has died or the group was ended."""

    def fail(self) -> None:
        """Make all ranks give up what they wait for."""


def own_columns(ranks: int, units: int, size: int, columns: int) -> list[range]:
    """Return the columns that each rank brings to a gather.

    `units` units of `size` columns are dealt in equal stretches in the order of the ranks; the last
    unit may be cut short.
    """
    bounds = [min(units * rank // ranks * size, columns) for rank in range(ranks + 1)]
    return [range(*ends) for ends in itertools.pairwise(bounds)]


class Communicator:
    """One rank of a group that sums through shared memory, in the order of the ranks.

    All ranks call the same methods in the same order, with equal shapes. Methods raise RankError
    when a rank has died, from then on always. `peers` are sockets to other ranks: one that hangs up
    has died.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shared: npt.NDArray[np.uint8],
        *,
        rank: int,
        ranks: int,
        threads: int,
        spin: int,
        peers: Sequence[int] = (),
    ) -> None:
        """Join the group in `shared`, `comm_bytes(library, ranks, lanes)` long and page-aligned."""
        self.rank, self.ranks, self._c, self._shared = rank, ranks, library, shared
        handle = library.dt_comm_create(
            int(shared.ctypes.data),
            rank,
            ranks,
            threads,
            spin,
            int32_array(tuple(peers)),
            len(peers),
        )
        if not handle:
            raise CapacityError(f"cannot join rank {rank} of {ranks} with {threads} threads")
        self.handle: int = handle
        self._failed = library.dt_comm_failed(handle)
        weakref.finalize(self, library.dt_comm_destroy, handle)

    @property
    def failed(self) -> bool:
        """Whether a rank has died or the group was ended."""
        return bool(self._failed[0])

    @property
    def stop_word(self) -> int:
        """Address of the word that is not 0 once the group has failed: a tape's `stop`."""
        return ctypes.cast(self._failed, ctypes.c_void_p).value or 0

    def all_reduce(self, x: F32) -> None:
        """Replace the values of `x` [n] by their sums over all ranks, alike on each to the bit."""
        if self._c.dt_all_reduce(self.handle, x.ctypes.data, 1, x.size, x.size, 0, 1):
            raise RankError("a process of the group has ended, so nothing can be summed")

    def fail(self) -> None:
        """Make all ranks give up what they wait for."""
        self._c.dt_comm_fail(self.handle)


def comm_bytes(library: ctypes.CDLL, ranks: int, threads: int) -> int:
    """Return the bytes of shared memory a group needs; CapacityError for an impossible group."""
    size = int(library.dt_comm_bytes(ranks, threads))
    if size < 0:
        raise CapacityError(f"a group of {ranks} processes with {threads} threads cannot be made")
    return size
