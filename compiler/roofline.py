"""What this machine does at most, measured now: the lines that stand beside kernel figures.

In: a number of threads. Out: bytes per second of streaming reads that miss every cache, and
floating-point operations per second of fused multiply-adds in registers.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec, read_hardware

LEAST_BYTES = 256 << 20
PASSES = 8
FMA_CHAINS, FMA_REPEATS = 12, 1_000_000
"""Chains per repeat in roofline.dk, and repeats of one pass (milliseconds)."""


def measure_read_bandwidth(threads: int, passes: int = PASSES) -> float:
    """Return bytes per second that `threads` pinned threads read, the best of `passes` passes.

    Raises:
        SpecError: this machine allows fewer threads.
        ToolchainError: there is no C compiler.
    """
    hardware = read_hardware()
    data, read_stream = _data(_stream_bytes(hardware)), _library().read_stream
    sums = np.zeros(16 * threads, np.float32)

    def read(thread: int) -> None:
        read_stream(
            ctypes.c_int64(data.size),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_void_p(sums.ctypes.data),
            ctypes.c_int64(thread),
            ctypes.c_int64(threads),
        )

    return float(data.nbytes / min(_wall_seconds(hardware, threads, passes, read)))


def measure_fma_rate(threads: int, passes: int = PASSES) -> float:
    """Return FLOP per second of `threads` pinned threads, the best of `passes`; raises as above."""
    peak_fma = _library().peak_fma
    sums = np.zeros(16 * threads, np.float32)

    def multiply(thread: int) -> None:
        peak_fma(
            ctypes.c_int64(FMA_REPEATS),
            ctypes.c_void_p(sums.ctypes.data),
            ctypes.c_int64(thread),
            ctypes.c_int64(threads),
        )

    seconds = min(_wall_seconds(read_hardware(), threads, passes, multiply))
    return 2 * FMA_CHAINS * host_target().lanes * FMA_REPEATS * threads / seconds


def _wall_seconds(
    hardware: HardwareSpec, threads: int, passes: int, work: Callable[[int], None]
) -> list[float]:
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

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(run, range(threads), choose_pus(hardware, threads)))
    return [
        max(end for _, end in one) - min(start for start, _ in one)
        for one in zip(*found, strict=True)
    ]


def _stream_bytes(hardware: HardwareSpec) -> int:
    """Return how much to read: far more than all last-level caches hold."""
    return max(LEAST_BYTES, 4 * sum(cache.bytes for cache in hardware.caches_of(3)))


@lru_cache(maxsize=1)
def _data(size: int) -> npt.NDArray[np.float32]:
    return np.ones(size // 4 // 4096 * 4096, np.float32)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    requests = tuple(KernelRequest("roofline", k, {}, k) for k in ("read_stream", "peak_fma"))
    spec = LibrarySpec(host_target(), requests, name="roofline", team=False, tvm_ffi=False)
    return ctypes.CDLL(str(build_library(spec).path))
