"""What this machine does at most, measured now: the lines that stand beside kernel figures.

In: a number of threads. Out: bytes per second of streaming reads that miss every cache, and
floating-point operations per second of fused multiply-adds in registers. Every benchmark's line.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from statistics import median

import numpy as np
import numpy.typing as npt

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import get_target, host_target
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec, read_hardware

LEAST_BYTES = 256 << 20
CACHE_SHARE = 16
"""How much larger than the last-level caches the stream is.

Cyclic reads should never hit, but caches that do not evict the oldest line keep a part of the
stream: at 4 times their size up to a quarter of it, which reads as a third more bandwidth.
"""
MEMORY_SHARE = 4
"""At most this part of the memory that this process may have is taken."""
STREAMS = 4
"""Streams of each thread in roofline.dk: plain loads, in huge pages.

Not quite the most there is: with lines fetched 2 KiB ahead, as products fetch theirs, a Xeon read
1.05x to 1.06x as much (18.0 for 17.0 GB/s with one thread, 34.3 for 32.6 with two). A product may
thus show a little more than this line.
"""
STEP = 1 << 20
"""Streams lie an odd number of these bytes apart: a power of two puts them into the same banks of
memory, which cost two thirds of the bandwidth where they lay 256 MiB apart."""
PASSES = 9
FMA_CHAINS, FMA_REPEATS = 12, 1_000_000
"""Chains per repeat in roofline.dk, and repeats of one pass (milliseconds)."""


def measure_read_bandwidth(
    threads: int, passes: int = PASSES, data: npt.NDArray[np.float32] | None = None
) -> float:
    """Return bytes per second that `threads` pinned threads read together, the median of `passes`.

    data: what is read, larger than the caches; memory of our own where it is left out.

    The median, because what it stands beside is one, too: the best pass of a long run is a figure
    that nothing else reaches. A pass lasts from the first thread's start to the last one's end.

    Raises:
        SpecError: this machine allows fewer threads.
        ToolchainError: there is no C compiler.
    """
    data = _stream(threads) if data is None else data
    read_stream = _library(host_target().name).read_stream
    sums = np.zeros(16 * threads, np.float32)

    def read(thread: int) -> None:
        read_stream(data.size, data.ctypes.data, sums.ctypes.data, thread, threads)

    return data.nbytes / median(_wall_seconds(threads, passes, read))


def free_stream() -> None:
    """Give back the memory that was read; the next measurement takes it anew."""
    _stream.cache_clear()


def stream_bytes(hardware: HardwareSpec, threads: int) -> int:
    """Return how much `threads` threads read: odd multiples of STEP in each stream."""
    wanted = max(LEAST_BYTES, CACHE_SHARE * sum(hardware.l3_shares))
    if memory := hardware.usable_memory:
        wanted = min(wanted, memory // MEMORY_SHARE)
    steps = wanted // (STREAMS * threads * STEP)
    return STREAMS * threads * STEP * (steps | 1)


def measure_fma_rate(threads: int, passes: int = PASSES, target: Target | None = None) -> float:
    """Return FLOP per second of `threads` pinned threads, the median; raises as above.

    `target`, where given, is held to: its vectors may be narrower than the machine's best.
    """
    target = target or host_target()
    peak_fma = _library(target.name).peak_fma
    sums = np.zeros(16 * threads, np.float32)

    def multiply(thread: int) -> None:
        peak_fma(FMA_REPEATS, sums.ctypes.data, thread, threads)

    seconds = median(_wall_seconds(threads, passes, multiply))
    return 2 * FMA_CHAINS * target.lanes * FMA_REPEATS * threads / seconds


def _wall_seconds(threads: int, passes: int, work: Callable[[int], None]) -> list[float]:
    """Run `work(thread)` on pinned threads, all starting together; return each pass's duration."""
    barrier = threading.Barrier(threads)

    def run(thread: int, pu: int) -> list[tuple[float, float]]:
        os.sched_setaffinity(0, {pu})  # of this thread only; it ends with the pool
        spans = []
        for _ in range(passes):
            barrier.wait()
            start = time.perf_counter()
            work(thread)
            spans.append((start, time.perf_counter()))
        return spans

    pus = choose_pus(read_hardware(), threads)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(run, range(threads), pus))
    return [
        max(end for _, end in one) - min(start for start, _ in one)
        for one in zip(*found, strict=True)
    ]


@lru_cache(maxsize=1)
def _stream(threads: int) -> npt.NDArray[np.float32]:
    """Return what is read, each thread's share written by itself: it lies on that thread's node."""
    data = np.empty(stream_bytes(read_hardware(), threads) // 4, np.float32)
    shares = data.reshape(threads, -1)

    def fill(thread: int) -> None:
        # unlike pages: a hypervisor may keep one copy of those that are alike
        shares[thread] = np.arange(shares.shape[1], dtype=np.float32)

    _wall_seconds(threads, 1, fill)
    return data


@lru_cache(maxsize=2)
def _library(target: str) -> ctypes.CDLL:
    requests = tuple(KernelRequest("roofline", k, {}, k) for k in ("read_stream", "peak_fma"))
    spec = LibrarySpec(get_target(target), requests, name="roofline", team=False, tvm_ffi=False)
    library = ctypes.CDLL(str(build_library(spec).path))
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.read_stream.argtypes = [number, address, address, number, number]
    library.peak_fma.argtypes = [number, address, number, number]
    return library
