"""The ranks of a group on several machines or GPUs: torch.distributed with NCCL or gloo.

In: where the first rank's store listens. Out: a `Collective`. The only module of the runtime that
loads torch; processes load it when a group of this kind is asked for, and not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dovetail.ir.errors import RankError
from dovetail.runtime.collective import F32, own_columns

LOOK_SECONDS = 0.2
"""How long to wait for others before looking whether all of them live."""


class Store:
    """Where ranks find each other; the first rank has the server."""

    def __init__(self, host: str, port: int, *, server: bool, seconds: float) -> None:
        """Serve at a free port (`port` 0), or join what serves; RankError where that fails."""
        try:
            self.store = dist.TCPStore(
                host, port, None, server, timedelta(seconds=seconds), wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"ranks cannot find each other at {host} ({_first_line(error)})"
            ) from None
        self.port = int(self.store.port)


class TorchCollective:
    """A `Collective` over a torch process group of its own, not the default one.

    `lost` tells whether the process at the other end of a control connection is gone: a network
    does not always say so.
    """

    def __init__(
        self,
        backend: str,
        store: Store,
        *,
        rank: int,
        ranks: int,
        host: str,
        seconds: float,
        lost: Callable[[], bool],
    ) -> None:
        """Meet the others; RankError when they do not come in time.

        Args:
            backend: gloo, or nccl: one GPU for each rank, the current one of the process.
            store: where the ranks meet.
            rank: this rank.
            ranks: how many there are.
            host: this machine's address that the others reach.
            seconds: after which a rank that does not answer is given up.
            lost: see above.
        """
        self.rank, self.ranks, self._lost, self._dead = rank, ranks, lost, False
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        try:
            self._group = _GROUPS[backend](store.store, rank, ranks, host, seconds)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"rank {rank} cannot join its group ({_first_line(error)})") from None

    @property
    def failed(self) -> bool:
        """Whether a rank has died or the group was ended."""
        return self._dead

    def all_reduce(self, x: F32) -> None:
        """See Collective; `x` may also be a contiguous tensor on the group's device."""
        self._check()
        if isinstance(x, torch.Tensor):
            self._wait(self._group.allreduce([x]))
        elif x.size:
            values = self._tensor(x)
            self._wait(self._group.allreduce([values]))
            x[...] = values.cpu().numpy()

    def all_gather(self, x: F32, units: int, size: int) -> None:
        """See Collective. Rows travel padded to the widest part, which NCCL and gloo both take."""
        self._check()
        parts = own_columns(self, units, size, x.shape[1])
        widest = max(len(part) for part in parts)
        mine = np.zeros((x.shape[0], widest), np.float32)
        own = parts[self.rank]
        mine[:, : len(own)] = x[:, own.start : own.stop]
        values = self._tensor(mine)
        found = [torch.empty_like(values) for _ in parts]
        self._wait(self._group.allgather([found], [values]))
        for part, theirs in zip(parts, found, strict=True):
            x[:, part.start : part.stop] = theirs[:, : len(part)].cpu().numpy()

    def fail(self) -> None:
        """Give up what this rank waits for; the others see its connections close."""
        self._dead = True
        held, self._group = [self._group], None
        # A group goes when an operation under way has been answered or its time is over: not here
        threading.Thread(target=_leave, args=(held,)).start()

    def close(self) -> None:
        """Leave the group."""
        self.fail()

    def _tensor(self, x: F32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self._device)

    def _check(self) -> None:
        if self._dead:
            raise RankError("a process of the group has ended, so nothing can be summed")

    def _wait(self, work: Any) -> None:
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        try:
            while not done.wait(LOOK_SECONDS):  # `work.wait` takes a time, and gloo ignores it
                if self._lost():
                    raise RuntimeError("a process has hung up")
            work.wait()
        except RuntimeError as error:
            self.fail()
            raise RankError(
                f"the group has failed at rank {self.rank} ({_first_line(error)})"
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


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
