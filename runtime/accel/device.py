"""A torch device as executors see it: its memory, its two streams, and what threads it leaves.

In: a name such as `cuda:1`, `xpu:0` or `torch:cpu`. Out: a `TorchDevice`. On `torch:cpu` work is
done when a call returns, so streams and events are nothing there; elsewhere they are torch's own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.machine.memory import allocate, available_memory
from dovetail.runtime.native.runner import Runner
from dovetail.topology.hardware import read_hardware

CPU = "torch:cpu"
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CPU_MEMORY = 0.5
"""Part of the memory that the CPU's KV leaves free that counts as that of `torch:cpu`."""
NO_MEMORY = "can't allocate memory"
"""What torch says where the CPU's memory is at its end."""
WAITING = {"cuda": {"blocking": True}}
"""Events by device: a thread that waits for one leaves its core to the CPU's attention."""
HOST_CALLS = {
    "cuda": ("libcuda.so.1", "cuLaunchHostFunc"),
    "hip": ("libamdhip64.so", "hipLaunchHostFunc"),
}
"""Libraries and functions that take a stream, a function, and what it is told."""
TURING = (7, 5)
"""The last NVIDIA architecture without bfloat16 products."""

os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
"""Whatever runs there means the same GPU by a number, as `HardwareSpec.accelerators` does."""

Array = npt.NDArray[Any]


@contextmanager
def staying(cpus: frozenset[int]) -> Iterator[None]:
    """Keep this thread to these CPUs meanwhile; none: wherever it likes."""
    before = os.sched_getaffinity(0) if cpus else cpus
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            os.sched_setaffinity(0, before)


class TorchDevice:
    """One device. Work of a stream runs in the order given; the two streams side by side."""

    def __init__(self, name: str, threads: int = 1) -> None:
        """`threads`: of torch on `torch:cpu`. Raises DeviceError where there is no such device."""
        self.name, self.threads = name, threads
        self.cpus: frozenset[int] = frozenset()  # what a working thread keeps to, on `torch:cpu`
        try:
            self.device = torch.device("cpu" if name == CPU else name)
        except RuntimeError:  # a kind that this torch was not built for
            raise self._unknown("none") from None
        self.apart = self.device.type != "cpu"  # has memory and streams of its own
        self.copy: Any = None
        self.compute: Any = None
        if self.apart:
            self._check()
            self._own = torch.get_device_module(self.device)
            self.copy, self.compute = (self._own.Stream(self.device) for _ in range(2))
            self._call = find_host_call(self.device)
            self._waiting = ThreadPoolExecutor(1, "copies")
            self._late: Future[None] | None = None

    def _check(self) -> None:
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        kind, index = self.device.type, self.device.index or 0
        if found is None or found.type != kind or index >= torch.accelerator.device_count():
            seen = f"{torch.accelerator.device_count()} of {found.type}" if found else "none"
            raise self._unknown(seen)

    def _unknown(self, seen: str) -> DeviceError:
        return DeviceError(
            f"torch {torch.__version__} has no device {self.name} here (it sees {seen}); "
            "install torch for this accelerator, or give --device cpu"
        )

    def activations(self, weights: str) -> str:
        """Return the type of activations by default, for weights of a type.

        Theirs on `torch:cpu`; else bfloat16, float16 where products know no bfloat16.
        """
        if not self.apart and weights in TYPES:
            return weights
        old = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) <= TURING
        return "f16" if old else "bf16"

    @property
    def records(self) -> bool:
        """Whether work can be recorded, and replayed at once."""
        return str(self.device.type) == "cuda"

    def free_bytes(self, *, taken: int = 0, ranks: int = 1, most: int | None = None) -> int:
        """Return the bytes that are free on the device now; of `torch:cpu` a part of the CPU's.

        taken: of the CPU's memory by pools, whose pages nobody has touched yet. ranks: processes
        that share that memory. most: of it, where others leave no more.
        """
        if not self.apart:
            free = available_memory(read_hardware())
            free = max(0, (free if most is None else min(free, most)) - taken)
            return int(free * CPU_MEMORY) // ranks
        return int(self._own.mem_get_info(self.device)[0])

    @contextmanager
    def working(self) -> Iterator[None]:
        """Have this thread give work to the device: without gradients, on its compute stream.

        Raises CapacityError where memory runs out, DeviceError for what else torch raises.
        """
        try:
            with torch.inference_mode():
                if self.apart:
                    with self._own.stream(self.compute):
                        yield
                else:
                    if torch.get_num_threads() != self.threads:
                        torch.set_num_threads(self.threads)
                    with staying(self.cpus):
                        yield
        except RuntimeError as error:
            said = first_line(error)
            if isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in said:
                raise CapacityError(f"{self.name} has no memory: {said}") from None
            raise DeviceError(f"torch has failed on {self.name}: {said}") from error

    # ---- streams: nothing to do on torch:cpu ----

    def mark(self, stream: Any) -> Any:
        """Return an event at the point that a stream has come to; None on `torch:cpu`."""
        if not self.apart:
            return None
        event = self._own.Event(**WAITING.get(self.device.type, {}))
        event.record(stream)
        return event

    def follow(self, stream: Any, event: Any) -> None:
        """Have a stream go on behind an event."""
        if event is not None:
            stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """Return when an event has been reached."""
        if event is not None:
            event.synchronize()

    def call(self, runner: Runner) -> None:
        """Release an order of `runner` once the copy stream has come to this point."""
        if not self.apart:
            runner.release()
        elif self._call is not None:
            stream = ctypes.c_void_p(self.copy.cuda_stream)
            address, handle = map(ctypes.c_void_p, (runner.release_address, runner.handle))
            if status := self._call(stream, address, handle):
                raise DeviceError(f"{self.name} calls no functions: status {status}")
        else:  # a thread of Python's waits
            event = self.mark(self.copy)
            self._late = self._waiting.submit(_release_behind, event, runner)

    def finish(self) -> None:
        """Wait for all that was given to the device."""
        if self.apart:
            self.compute.synchronize()
            self.copy.synchronize()
            if self._late is not None:
                self._late.result()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Give work to the copy stream."""
        if self.apart:
            with self._own.stream(self.copy):
                yield
        else:
            yield

    # ---- memory ----

    def host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return zeroed bytes of the host that the device copies from and to without a detour."""
        if not self.apart:
            return allocate(nbytes)
        found: npt.NDArray[np.uint8] = torch.zeros(
            nbytes, dtype=torch.uint8, pin_memory=True
        ).numpy()
        return found

    @contextmanager
    def pinned(self, *arrays: Array) -> Iterator[None]:
        """Let the device copy from and to memory of the host without a detour, where CUDA can."""
        if self.device.type != "cuda":
            yield
            return
        runtime = torch.cuda.cudart()
        spans = [(array.ctypes.data, array.nbytes) for array in arrays]
        held = [start for start, size in spans if not int(runtime.cudaHostRegister(start, size, 0))]
        try:
            yield
        finally:
            for address in held:
                runtime.cudaHostUnregister(address)

    def release(self) -> None:
        """Give memory that no tensor holds back to the driver."""
        if self.apart:
            self._own.empty_cache()

    def twin(self, array: Array) -> torch.Tensor:
        """Return a tensor like `array` on the device; on `torch:cpu` over the same memory."""
        tensor = torch.from_numpy(array)
        return torch.zeros_like(tensor, device=self.device) if self.apart else tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the device; CapacityError without room."""
        try:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            said = first_line(error)
            raise CapacityError(f"{self.name} has no memory for {shape}: {said}") from None


def _release_behind(event: Any, runner: Runner) -> None:
    event.synchronize()
    runner.release()


def find_host_call(device: torch.device) -> Any:
    """Return the driver's function that has a stream call one of the host, None without one."""
    if device.type != "cuda":
        return None
    library, name = HOST_CALLS["hip" if torch.version.hip else "cuda"]
    try:
        return getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return None


def first_line(error: Exception) -> str:
    """Return the first line of what torch says, which may go on for pages."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
