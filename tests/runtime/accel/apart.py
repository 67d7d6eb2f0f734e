"""Torch's CPU device as if it had memory and streams of its own, so that all is copied as to a GPU.

Work is done when a call returns: what waits for what is not tested by this, but what has to cross.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.machine.memory import allocate


class Done:
    """A stream, or an event on one."""

    def record(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...


class Module:
    """What torch has for a kind of device."""

    def Event(self, **_: object) -> Done:
        return Done()

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def empty_cache(self) -> None: ...


class ApartDevice(TorchDevice):
    """Attention on the CPU is released by a thread of Python's, as where no driver calls back."""

    def __init__(self, name: str, threads: int = 1) -> None:
        super().__init__(name, threads)
        self.apart, self._own, self._call, self._late = True, Module(), None, None
        self.copy, self.compute = Done(), Done()
        self._waiting = ThreadPoolExecutor(1)

    def host(self, nbytes: int) -> npt.NDArray[Any]:
        return np.asarray(allocate(nbytes))  # none can be pinned
