"""A GPU for tests that does nothing before somebody waits for it, and checks who may touch what.

In: calls of the CUDA driver. Out: what a GPU gives to a program that orders its work by streams and
events; a `Race` for one that does not: each piece of work has a vector clock, and two that touch
the same memory, one of them writing, must be ordered by more than luck.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.errors import RankError
from dovetail.runtime.cuda import MULTIPROCESSORS, Driver
from dovetail.runtime.device_weights import DeviceWeight
from dovetail.runtime.torch_products import TYPES, Tensors, TorchProducts, multiply
from dovetail.runtime.torch_sums import BoundExchange, TorchSums
from tests.gpu_touches import TOUCHES, Range, Touch, operands_of

Clock = dict[int, int]
"""What has surely happened: of each stream or thread, so many of its acts."""
CELL = 64


class Race(AssertionError):
    """Two acts on the same memory that nothing orders."""


class Ledger:
    """Who touched which cell last; cells are 64 bytes."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[int, int, str]] = {}
        self._read: dict[int, dict[int, tuple[int, str]]] = {}
        self.checked = 0
        self.off = False

    def note(self, actor: int, clock: Clock, touch: Touch, name: str) -> None:
        """Check an act against all before it; `clock` counts the act itself."""
        if self.off:
            return
        for cell in _cells(touch.writes):
            for who, (when, what) in self._read.pop(cell, {}).items():
                self._check(clock, who, when, what, name, cell)
            self._check_written(clock, cell, name)
            self._written[cell] = (actor, clock[actor], name)
        for cell in _cells(touch.reads):
            self._check_written(clock, cell, name)
            self._read.setdefault(cell, {})[actor] = (clock[actor], name)

    def _check_written(self, clock: Clock, cell: int, name: str) -> None:
        if cell in self._written:
            who, when, what = self._written[cell]
            self._check(clock, who, when, what, name, cell)

    def _check(self, clock: Clock, who: int, when: int, what: str, name: str, cell: int) -> None:
        self.checked += 1
        if clock.get(who, 0) < when:
            self.off = True  # what comes after the first one is not worth its report
            raise Race(f"{name} is not ordered after {what} (memory {cell * CELL:#x})")


def _cells(ranges: Iterable[Range]) -> Iterable[int]:
    for first, last in ranges:
        yield from range(first // CELL, -(-last // CELL))


def joined(*clocks: Clock) -> Clock:
    """Return what has happened by any of them."""
    found: Clock = {}
    for clock in clocks:
        for who, when in clock.items():
            found[who] = max(found.get(who, 0), when)
    return found


@dataclass
class Act:
    """Queued work; `given` is what its thread knew. An event is recorded or followed instead."""

    name: str
    run: Callable[[], None]
    touch: Callable[[], Touch]
    given: Clock = field(default_factory=dict)
    record: Mark | None = None
    follow: Mark | None = None


@dataclass
class Mark:
    """One recording of an event."""

    stream: int
    clock: Clock | None = None


class LazyDriver(Driver):
    """The emulated driver, whose streams wait until they are waited for; or not, if `eager`."""

    def __init__(
        self, library: Path, kernels: Mapping[str, KernelEntry], *, eager: bool = False
    ) -> None:
        self._kernels, self.eager = kernels, eager
        self.ledger = Ledger()
        self._functions: dict[int, KernelEntry] = {}
        self._queues: dict[int, deque[Act]] = {}
        self._clocks: dict[int, Clock] = {}
        self._marks: dict[int, Mark] = {}
        self._captured: list[Act] | None = None
        self._graphs: dict[int, list[Act]] = {}
        self._numbers = count(1000)
        self._lock = threading.RLock()
        self.counts: dict[str, int] = {}
        self.launched: Counter[str] = Counter()
        super().__init__(str(library))

    def call(self, name: str, *args: Any) -> None:
        """Do what is asynchronous later, the rest at once."""
        self.counts[name] = self.counts.get(name, 0) + 1
        own = getattr(self, f"_{name}", None)
        with self._lock:
            if own is None:
                super().call(name, *args)
            else:
                own(*args)

    # ---- threads ----

    def now(self) -> Clock:
        """Return what the calling thread knows."""
        return self._clocks.setdefault(threading.get_ident(), {})

    def learn(self, clock: Clock) -> None:
        """Have the calling thread know what another did."""
        with self._lock:
            self._clocks[threading.get_ident()] = joined(self.now(), clock)

    def host(self, name: str, *, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> None:
        """Note that the calling thread touches these arrays."""
        with self._lock:
            me = threading.get_ident()
            clock = self.now()
            clock[me] = clock.get(me, 0) + 1
            touch = Touch([*map(spans, reads)], [*map(spans, writes)])
            self.ledger.note(me, clock, touch, name)

    # ---- streams ----

    def give(self, stream: int, act: Act) -> None:
        """Queue an act."""
        with self._lock:
            if self._captured is not None:
                self._captured.append(act)
                return
            act.given = dict(self.now())
            self._queues.setdefault(stream, deque()).append(act)
            if self.eager:
                self._drain(stream)

    def _drain(self, stream: int, until: Mark | None = None) -> None:
        queue = self._queues.setdefault(stream, deque())
        while queue and (until is None or until.clock is None):
            act = queue[0]
            if act.follow is not None and act.follow.clock is None:
                self._drain(act.follow.stream, act.follow)
            queue.popleft()
            clock = joined(self._clocks.get(stream, {}), act.given)
            if act.follow is not None:
                assert act.follow.clock is not None
                clock = joined(clock, act.follow.clock)
            clock[stream] = clock.get(stream, 0) + 1
            self._clocks[stream] = clock
            self.ledger.note(stream, clock, act.touch(), act.name)
            act.run()
            if act.record is not None:
                act.record.clock = dict(clock)

    def _cuMemcpyHtoDAsync_v2(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy("upload", to, source, size, stream)

    def _cuMemcpyDtoHAsync_v2(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy("download", to, source, size, stream)

    def _copy(self, name: str, to: int, source: int, size: int, stream: int) -> None:
        def run() -> None:
            ctypes.memmove(to, source, size)

        touch = Touch([(source, source + size)], [(to, to + size)])
        self.give(stream, Act(name, run, lambda: touch))

    def _cuEventRecord(self, event: int, stream: int) -> None:
        mark = self._marks[event] = Mark(stream)
        self.give(stream, Act("record", _nothing, Touch, record=mark))

    def _cuStreamWaitEvent(self, stream: int, event: int, _flags: int) -> None:
        self.give(stream, Act("follow", _nothing, Touch, follow=self._marks[event]))

    def _cuEventSynchronize(self, event: int) -> None:
        mark = self._marks[event]
        self._drain(mark.stream, mark)
        assert mark.clock is not None
        self.learn(mark.clock)

    def _cuCtxSynchronize(self) -> None:
        for stream in list(self._queues):
            self._drain(stream)
            self.learn(self._clocks.get(stream, {}))

    # ---- graphs ----

    def _cuStreamBeginCapture_v2(self, _stream: int, _mode: int) -> None:
        self._captured = []

    def _cuStreamEndCapture(self, _stream: int, graph: Any) -> None:
        assert self._captured is not None
        graph._obj.value = next(self._numbers)
        self._graphs[graph._obj.value], self._captured = self._captured, None

    def _cuGraphInstantiateWithFlags(self, found: Any, graph: Any, _flags: int) -> None:
        found._obj.value = next(self._numbers)
        self._graphs[found._obj.value] = self._graphs[graph.value]

    def _cuGraphDestroy(self, graph: Any) -> None:
        """Its instance lives on."""
        del self._graphs[graph.value]

    def _cuGraphExecDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def _cuGraphLaunch(self, graph: int, stream: int) -> None:
        for act in self._graphs[graph]:
            self.give(stream, Act(act.name, act.run, act.touch))

    # ---- kernels ----

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        super().call("cuDeviceGetAttribute", value, attribute, device)
        if attribute == MULTIPROCESSORS:
            value._obj.value = 1

    def _cuModuleGetFunction(self, function: Any, module: Any, symbol: bytes) -> None:
        super().call("cuModuleGetFunction", function, module, symbol)
        entry = self._kernels[symbol.decode().removeprefix("dt_cuda_")]
        self._functions[function._obj.value] = entry

    def _cuLaunchKernel(self, function: Any, *rest: Any) -> None:
        *grid, shared, stream, params, extra = rest
        entry = self._functions[function.value]
        kept = [ctypes.c_uint64.from_address(address).value for address in params]
        operands = operands_of(entry, params)

        def run() -> None:
            self.launched[entry.name] += 1
            values = [ctypes.c_uint64(value) for value in kept]
            held = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            Driver.call(self, "cuLaunchKernel", function, *grid, shared, stream, held, extra)

        def touch() -> Touch:
            return TOUCHES[entry.family](operands)

        self.give(stream, Act(entry.name, run, touch))


def _nothing() -> None:
    pass


def spans(array: np.ndarray) -> Range:
    """Return the bytes of a contiguous array."""
    assert array.flags.c_contiguous
    return array.ctypes.data, array.ctypes.data + array.nbytes


class ClockedWorker(ThreadPoolExecutor):
    """A thread that knows what those know that give it tasks, and they what it did."""

    def __init__(self, driver: LazyDriver) -> None:
        super().__init__(1)
        self._driver = driver

    def submit(self, task: Any, /, *args: Any, **named: Any) -> Future[Any]:
        driver, given = self._driver, dict(self._driver.now())
        after: Clock = {}

        def follow() -> Any:
            driver.learn(given)
            try:
                return task(*args, **named)
            finally:
                after.update(driver.now())

        future = super().submit(follow)
        result = future.result

        def wait(timeout: float | None = None) -> Any:
            try:
                return result(timeout)
            finally:
                driver.learn(after)

        future.result = wait  # type: ignore[method-assign]
        return future


class HostProducts(TorchProducts):
    """torch on the CPU, in the order of the emulated device's streams."""

    def __init__(
        self, driver: LazyDriver, weights: Mapping[str, DeviceWeight], ordinal: int
    ) -> None:
        super().__init__(weights, ordinal)
        self.driver = driver
        self.fail: Callable[[int], Exception | None] = lambda rows: None

    def view(self, address: int, dtype: str, shape: tuple[int, int], stride: int) -> torch.Tensor:
        rows, columns = shape
        kind = TYPES[dtype]
        size = ((rows - 1) * stride + columns) * kind.itemsize
        memory = (ctypes.c_uint8 * size).from_address(address)
        flat = torch.frombuffer(memory, dtype=kind)
        return flat.as_strided(shape, (stride, 1))

    def run(self, bound: Tensors, rows: int, stream: int) -> None:
        error = self.fail(rows)
        if error is not None:
            raise error
        touch = Touch([_rows(bound.a, rows)], [_rows(bound.out, rows)])
        if bound.residual is not None:
            touch.reads.append(_rows(bound.residual, rows))
        self.driver.give(stream, Act("product", lambda: multiply(bound, rows), lambda: touch))


def prefer_ours(*_: object) -> float:
    """Compare products: whatever this machine makes of them, the generated ones win."""
    return 0.0


class HostSums(TorchSums):
    """Sums in the order of the emulated device's streams; a failed one is told of afterwards."""

    _products: HostProducts

    def run(self, bound: BoundExchange, rows: int, stream: int) -> None:
        touched = [_rows(bound.x, rows)] if rows else []

        def meet() -> None:
            with suppress(RankError):  # as on a device: `check` says so
                self.meet(bound, rows)

        if rows:
            self._products.driver.give(stream, Act("sum", meet, lambda: Touch(touched, touched)))


def _rows(tensor: torch.Tensor, rows: int) -> Range:
    return tensor.data_ptr(), tensor.data_ptr() + rows * tensor.stride(0) * tensor.itemsize
