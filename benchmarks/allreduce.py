"""All-reduce of two processes: ours, gloo of torch.distributed, and a naive one with a lock.

In: sizes in bytes. Out: per size and contestant the seconds of a call. The contestants take turns
in the same pair of processes; every result is compared with the sum.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.native.collective import Communicator, comm_bytes

F32 = npt.NDArray[np.float32]
RANKS, SPIN = 2, 2000
REGION_BYTES = 8 << 20
"""A timed region sums so many bytes, in calls of one size, but not more than REGION_CALLS."""
REGION_CALLS = 500
NAMES = ("ours", "gloo", "locked")


def measure(sizes: tuple[int, ...], rounds: int) -> list[tuple[int, str, list[float]]]:
    """Return (bytes, contestant, seconds per call in each round)."""
    library = build_library(LibrarySpec(host_target(), (), name="collective", tvm_ffi=False)).path
    c = abi.declare(ctypes.CDLL(str(library)))
    group = SharedMemory.create(comm_bytes(c, RANKS, 1))
    naive = SharedMemory.create(max(sizes) + 4096)
    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "gloo"

        def run(rank: int) -> None:
            side = Side(rank, c, group, naive, lock, meeting)
            found = [side.time(size, rounds) for size in sizes]
            if rank == 0:
                theirs.send(found)

        children = [context.Process(target=run, args=(rank,)) for rank in range(RANKS)]
        for child in children:
            child.start()
        theirs.close()
        try:
            found = ours.recv()
        except EOFError:
            raise SystemExit("a rank of the benchmark failed") from None
        finally:
            for child in children:
                child.join()
    return [
        (size, name, seconds[name])
        for size, seconds in zip(sizes, found, strict=True)
        for name in NAMES
    ]


class Side:
    """One of the two processes."""

    def __init__(
        self,
        rank: int,
        c: ctypes.CDLL,
        group: SharedMemory,
        naive: SharedMemory,
        lock: Lock,
        meeting: Path,
    ) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
        self._comm = Communicator(c, group.bytes, rank=rank, ranks=RANKS, threads=1, spin=SPIN)
        self._lock, self._naive = lock, naive.bytes
        self._rank = rank
        self._contestants: dict[str, Callable[[F32], Any]] = {
            "ours": self._comm.all_reduce,
            "gloo": lambda x: dist.all_reduce(torch.from_numpy(x)),
            "locked": self._reduce_locked,
        }

    def time(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of a call, by contestant and round."""
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        calls = max(1, min(REGION_CALLS, REGION_BYTES // nbytes))
        for turn in range(rounds):
            for name in NAMES:
                self._check(name, nbytes, turn)
                x = np.zeros(nbytes // 4, np.float32)  # zeros stay finite however often
                self._comm.all_reduce(np.zeros(1, np.float32))  # start together
                start = time.perf_counter()
                for _ in range(calls):
                    self._contestants[name](x)
                seconds[name].append((time.perf_counter() - start) / calls)
        return seconds

    def _check(self, name: str, nbytes: int, seed: int) -> None:
        both = np.random.default_rng(seed).standard_normal((RANKS, nbytes // 4)).astype(np.float32)
        x = both[self._rank].copy()
        self._contestants[name](x)
        np.testing.assert_allclose(x, both.sum(axis=0), rtol=1e-5, atol=1e-6)

    def _reduce_locked(self, x: F32) -> None:
        """Add to one shared buffer under one lock; the last to leave clears the table."""
        counts = self._naive[:8].view(np.int32)
        shared = self._naive[4096 : 4096 + x.nbytes].view(np.float32)
        while counts[1]:  # the round before is not over yet
            os.sched_yield()
        with self._lock:
            if counts[0] == 0:
                shared[:] = x
            else:
                shared += x
            counts[0] += 1
        while counts[0] < RANKS:
            os.sched_yield()
        x[:] = shared
        with self._lock:
            counts[1] += 1
            if counts[1] == RANKS:
                counts[:] = 0
