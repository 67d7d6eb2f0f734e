"""One of two processes that sum for `calibrate`. In: a SumJob. Out: SumTimes of the first rank."""

from __future__ import annotations

import ctypes
import os
import time

import msgspec
import numpy as np

from dovetail.runtime.child.framing import Channel
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.native.collective import Communicator

RANKS = 2
SPIN, ROUNDS = 2000, 12
REGION_BYTES, REGION_CALLS = 8 << 20, 200
"""A round sums so many bytes, in not more than so many calls."""


class SumJob(msgspec.Struct, frozen=True, kw_only=True):
    """What each of the processes runs; sizes are in bytes."""

    library: str
    nbytes: int
    rank: int
    pu: int
    sizes: tuple[int, ...]


class SumTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an all-reduce, per size and round."""

    seconds: tuple[tuple[float, ...], ...]


def sum_times(job: SumJob, fd: int) -> SumTimes:
    """Sum zeros of each size; both processes start each round together."""
    os.sched_setaffinity(0, {job.pu})
    shared = SharedMemory(fd, job.nbytes)
    library = abi.declare(ctypes.CDLL(job.library))
    comm = Communicator(library, shared.bytes, rank=job.rank, ranks=RANKS, threads=1, spin=SPIN)
    return SumTimes(seconds=tuple(_rounds(comm, size) for size in job.sizes))


def _rounds(comm: Communicator, size: int) -> tuple[float, ...]:
    x = np.zeros(size // 4, np.float32)
    calls = max(1, min(REGION_CALLS, REGION_BYTES // size))
    seconds = []
    for _ in range(ROUNDS):
        comm.all_reduce(x)
        start = time.perf_counter()
        for _ in range(calls):
            comm.all_reduce(x)
        seconds.append((time.perf_counter() - start) / calls)
    return tuple(seconds)


def serve(channel: Channel, fd: int) -> None:
    """Answer one job; `fd` is of the memory that both processes share."""
    job = channel.receive(SumJob)
    if job is not None:
        channel.send(sum_times(job, fd))
