"""The ranks of a group on several machines or GPUs: torch.distributed with NCCL or gloo.

In: where the first rank's store listens. Out: a `TorchCollective`. It imports torch: processes load
it when a group of this kind is asked for, and not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dovetail.ir.errors import RankError
from dovetail.runtime.accel.device import first_line
from dovetail.runtime.native.collective import own_columns

LOOK_SECONDS = 0.2
"""How long to wait for others before looking whether all of them live."""


def open_store(host: str, port: int, *, server: bool, seconds: float) -> dist.TCPStore:
    """Return where ranks find each other: the first one serves it at a free port (`port` 0).

    RankError where that fails.
    """
    wait = timedelta(seconds=seconds)
    try:
        return dist.TCPStore(host, port, None, server, wait, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"ranks cannot find each other at {host} ({first_line(error)})") from None


class TorchCollective:
    """What a `Communicator` does, over a torch process group of its own, not the default one.

    `lost` tells whether the process at the other end of a control connection is gone: a network
    does not always say so.
    """

    def __init__(
        self,
        backend: str,
        store: dist.TCPStore,
        *,
        rank: int,
        ranks: int,
        host: str,
        seconds: float,
        lost: Callable[[], bool],
    ) -> None:
        """Meet the others; RankError when they do not come in time.

        backend: gloo, or nccl: one GPU for each rank, the current one of the process. host: this
        machine's address that the others reach. seconds: after which a silent rank is given up.
        """
        self.rank, self.ranks, self._lost = rank, ranks, lost
        self._ended = threading.Event()
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        try:
            self._group = _GROUPS[backend](store, rank, ranks, host, seconds)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"rank {rank} cannot join its group ({first_line(error)})") from None
        if backend in _BEHIND:
            threading.Thread(target=self._watch, name="group-watch", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether a rank has died or the group was ended."""
        return self._ended.is_set()

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace float32 values by their sums over all ranks, alike on each to the last bit.

        It is work of the current stream: with NCCL this returns at once.
        """
        self._living()  # nothing to sum is an error, too, from then on
        if values.numel():
            dense = values.to(self._device).contiguous()
            self._perform(lambda group: group.allreduce([dense]))
            if dense.data_ptr() != values.data_ptr():
                values.copy_(dense)

    def all_gather(self, values: torch.Tensor, units: int, size: int) -> None:
        """Give every rank all columns of rows, see `own_columns`.

        Rows travel padded to the widest part, for NCCL.
        """
        parts = own_columns(self.ranks, units, size, values.shape[1])
        widest, own = max(len(part) for part in parts), parts[self.rank]
        mine = torch.zeros((len(values), widest), device=self._device)
        mine[:, : len(own)] = values[:, own.start : own.stop]
        found = [torch.empty_like(mine) for _ in parts]
        self._perform(lambda group: group.allgather([found], [mine]))
        for part, theirs in zip(parts, found, strict=True):
            values[:, part.start : part.stop] = theirs[:, : len(part)]

    def fail(self) -> None:
        """Leave, and give up what this rank waits for; the others see its connections close."""
        self._ended.set()
        held, self._group = [self._group], None
        # A group goes when an operation under way has been answered or its time is over: not here
        threading.Thread(target=_leave, args=(held,)).start()

    def _living(self) -> Any:
        """Return the group for one use: another thread may give it up at any time."""
        if self.failed or (group := self._group) is None:
            raise RankError("a process of the group has ended, so nothing can be summed")
        return group

    def _watch(self) -> None:
        """Give up when a rank is gone: nobody waits for sums that run behind a stream."""
        while not self._ended.wait(LOOK_SECONDS):
            if self._lost():
                self.fail()

    def _perform(self, begin: Callable[[Any], Any]) -> None:
        """Run the collective that `begin` starts; a group that failed raises for good."""
        done = threading.Event()
        try:
            work = begin(self._living())
            work.get_future().add_done_callback(lambda _: done.set())
            while not done.wait(LOOK_SECONDS):  # `work.wait` takes a time, and gloo ignores it
                if self._lost():
                    raise RuntimeError("a process has hung up")
            work.wait()
        except RuntimeError as error:
            self.fail()
            raise RankError(
                f"the group has failed at rank {self.rank} ({first_line(error)})"
            ) from None


def _leave(held: list[Any]) -> None:
    """End the group in `held` and drop it, which may wait for its threads."""
    if (group := held.pop()) is not None:
        group.abort()


def _make_gloo(store: Any, rank: int, ranks: int, host: str, seconds: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def _make_nccl(store: Any, rank: int, ranks: int, host: str, seconds: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)


_GROUPS: dict[str, Callable[..., Any]] = {"gloo": _make_gloo, "nccl": _make_nccl}
_BEHIND = {"nccl"}
"""Backends whose sums run on the device, when the call that gave them has long returned."""
