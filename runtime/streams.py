"""Work of a GPU in order: a compute and a copy stream, events between them, pinned memory, graphs.

In: a `CudaDevice`. Out: `GpuStreams`. All calls return at once but `wait`; a copy's memory on the
host may not be touched until an event behind it has been waited for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import DovetailError
from dovetail.runtime.cuda import CudaDevice

Bytes = npt.NDArray[np.uint8]
NON_BLOCKING = 1
"""Flag of a stream: it does not wait for the default stream."""
QUIET_EVENT = 3
"""Flags of an event: the waiting thread sleeps, no times are kept."""
RELAXED = 2
"""Mode of a capture: other threads and libraries may call the driver meanwhile."""


class GpuStreams:
    """The two streams of an executor. One thread gives work; any thread may `wait`."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self._driver = device, device.driver
        self.compute, self.copy = (
            self._driver.handle("cuStreamCreate", NON_BLOCKING) for _ in range(2)
        )
        self._free: list[int] = []
        self._used: list[int] = []
        self._graphs: list[int] = []
        self._host: list[Bytes] = []
        self._registered: list[Bytes] = []

    # ---- host memory ----

    def pinned(self, nbytes: int) -> Bytes:
        """Return zeroed bytes of the host that copies run from and to beside other work."""
        address = self._driver.handle("cuMemHostAlloc", max(nbytes, 1), 0)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * max(nbytes, 1)).from_address(address))
        memory[:] = 0
        self._host.append(memory)
        return memory[:nbytes]

    def pin(self, memory: Bytes) -> None:
        """Pin memory that is there already, such as the CPU's KV pools."""
        self._driver.call("cuMemHostRegister_v2", memory.ctypes.data, memory.nbytes, 0)
        self._registered.append(memory)

    # ---- work ----

    def upload(self, target: int, source: npt.NDArray[Any], stream: int) -> None:
        """Copy a contiguous array of pinned memory to the device."""
        assert source.flags.c_contiguous
        if source.nbytes:
            args = (target, source.ctypes.data, source.nbytes, stream)
            self._driver.call("cuMemcpyHtoDAsync_v2", *args)

    def download(self, target: npt.NDArray[Any], source: int, stream: int) -> None:
        """Copy from the device to a contiguous array of pinned memory."""
        assert target.flags.c_contiguous
        if target.nbytes:
            args = (target.ctypes.data, source, target.nbytes, stream)
            self._driver.call("cuMemcpyDtoHAsync_v2", *args)

    def event(self, stream: int) -> int:
        """Mark the point that `stream` has come to; it is good until `finish`."""
        event = (
            self._free.pop() if self._free else self._driver.handle("cuEventCreate", QUIET_EVENT)
        )
        self._used.append(event)
        self._driver.call("cuEventRecord", event, stream)
        return event

    def follow(self, stream: int, event: int) -> None:
        """Let what is given to `stream` from now on wait for `event`."""
        self._driver.call("cuStreamWaitEvent", stream, event, 0)

    def wait(self, event: int) -> None:
        """Return when `event` has been reached; CudaError where work before it failed."""
        self._driver.call("cuEventSynchronize", event)

    def finish(self) -> None:
        """Return when both streams have done their work; all events are free again."""
        for stream in (self.compute, self.copy):
            self.wait(self.event(stream))
        self._free += self._used
        self._used = []

    @contextmanager
    def recording(self) -> Iterator[list[int]]:
        """Record what the body gives to the compute stream, run nothing; the list gets the graph.

        Where the body fails nothing is kept.
        """
        found: list[int] = []
        graph = ctypes.c_void_p()
        self._driver.call("cuStreamBeginCapture_v2", self.compute, RELAXED)
        try:
            try:
                yield found
            except BaseException:
                with suppress(DovetailError):  # what failed may have ended it
                    self._driver.call("cuStreamEndCapture", self.compute, ctypes.byref(graph))
                raise
            self._driver.call("cuStreamEndCapture", self.compute, ctypes.byref(graph))
            found.append(self._driver.handle("cuGraphInstantiateWithFlags", graph, 0))
            self._graphs += found
        finally:
            if graph.value:
                self._driver.call("cuGraphDestroy", graph)

    def replay(self, graph: int) -> None:
        """Give the work of a graph to the compute stream."""
        self._driver.call("cuGraphLaunch", graph, self.compute)

    def forget(self, graph: int) -> None:
        """Give a graph back that is not replayed any more, after its work."""
        self._graphs.remove(graph)
        self._driver.call("cuGraphExecDestroy", graph)

    def close(self) -> None:
        """Give everything back, after the work that is under way."""
        with suppress(DovetailError):  # work that failed has told so
            self.finish()
        for event in (*self._free, *self._used):
            self._driver.call("cuEventDestroy_v2", event)
        for graph in self._graphs:
            self._driver.call("cuGraphExecDestroy", graph)
        for memory in self._registered:
            self._driver.call("cuMemHostUnregister", memory.ctypes.data)
        for memory in self._host:
            self._driver.call("cuMemFreeHost", memory.ctypes.data)
        for stream in (self.compute, self.copy):
            self._driver.call("cuStreamDestroy_v2", stream)
        self._free, self._used, self._graphs = [], [], []
        self._registered, self._host = [], []
