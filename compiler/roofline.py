"""What this machine reads at most, measured now: the line that stands beside a decode figure.

In: a number of threads. Out: bytes per second of streaming reads that miss every cache.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
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


def measure_read_bandwidth(threads: int, passes: int = PASSES) -> float:
    """Return bytes per second that `threads` pinned threads read, the best of `passes` passes.

    Raises:
        SpecError: this machine allows fewer threads.
        ToolchainError: there is no C compiler.
    """
    hardware = read_hardware()
    data = _data(_stream_bytes(hardware))
    function = _read_stream()
    barrier = threading.Barrier(threads)
    sums = np.zeros(16 * threads, np.float32)

    def read(thread: int, pu: int) -> list[tuple[float, float]]:
        os.sched_setaffinity(0, {pu})  # of this thread only; it ends with the pool
        spans = []
        for _ in range(passes):
            barrier.wait()
            start = time.perf_counter()
            function(data.size, data.ctypes.data, sums.ctypes.data, thread, threads)
            spans.append((start, time.perf_counter()))
        return spans

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(read, range(threads), choose_pus(hardware, threads)))
    seconds = (
        max(end for _, end in one) - min(start for start, _ in one)
        for one in zip(*found, strict=True)
    )
    return float(data.nbytes / min(seconds))


def _stream_bytes(hardware: HardwareSpec) -> int:
    """Return how much to read: far more than all last-level caches hold."""
    return max(LEAST_BYTES, 4 * sum(cache.bytes for cache in hardware.caches_of(3)))


@lru_cache(maxsize=1)
def _data(size: int) -> npt.NDArray[np.float32]:
    return np.ones(size // 4 // 4096 * 4096, np.float32)


@lru_cache(maxsize=1)
def _read_stream() -> ctypes._NamedFuncPointer:
    request = KernelRequest("roofline", "read_stream", {}, "read_stream")
    spec = LibrarySpec(host_target(), (request,), name="roofline", team=False, tvm_ffi=False)
    function = ctypes.CDLL(str(build_library(spec).path)).read_stream
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = (integer, pointer, pointer, integer, integer)
    function.restype = None
    return function
