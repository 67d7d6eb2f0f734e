"""The measuring child process: `ChildSetup` and `Job` lines in, `Reply` lines out."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.compiler.expected import ExpectedProduct, agrees, panels_to_check, rows_to_check
from dovetail.compiler.kernel_call import PERIOD, KernelCall
from dovetail.compiler.measure import (
    MARK_BYTES,
    AttentionCase,
    Candidate,
    Case,
    ChildSetup,
    GemmCase,
    Job,
    Reply,
)
from dovetail.compiler.measure_attention import AttentionRun
from dovetail.compiler.schedules import SILU, reduce_kernel
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL, SPLIT_K_ELEMENTS
from dovetail.ir.schedule import SCHEDULE_VALUES
from dovetail.runtime.library import KernelLibrary, Team

PADDING = 16
"""Elements between rows, as in the runtime's activation buffers."""
SPIN = 2000
M_TILE = SCHEDULE_VALUES.index("m_tile")
ALIGNMENT = 4096

Array = npt.NDArray[np.float32]
KnownProducts = dict[tuple[str, int, int, str, bool], ExpectedProduct]
"""(kind, n, k, dtype, activations rounded) to what comes out."""


class WeightPool:
    """Random packed weights, larger than the caches; copies of a weight are windows of the pool."""

    def __init__(self, dtype: str, pool_bytes: int) -> None:
        values = np.random.default_rng(1).standard_normal(PERIOD, np.float32) * np.float32(0.05)
        self._form = FORMATS[dtype]
        self._pattern = self._form.dtype.narrow(values)
        self._pool = self._filled(pool_bytes)

    def _filled(self, size: int) -> npt.NDArray[np.uint8]:
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        pool = raw[start : start + size // ALIGNMENT * ALIGNMENT]
        view = pool.view(self._form.dtype.numpy)
        for first in range(0, len(view), PERIOD):
            part = view[first : first + PERIOD]
            part[:] = self._pattern[: len(part)]
        return pool

    def copies(self, panels: int, k: int) -> list[npt.NDArray[np.uint8]]:
        """Return windows of a weight's size, two at least, that together span the pool."""
        size = panels * self._form.panel_bytes(k)
        step = -(-size // ALIGNMENT) * ALIGNMENT
        if len(self._pool) < 2 * step:
            self._pool = self._filled(2 * step)
        return [self._pool[i : i + size] for i in range(0, len(self._pool) - size + 1, step)]

    def columns(self, window: npt.NDArray[np.uint8], k: int, panel: int) -> npt.NDArray[np.float64]:
        """Return one panel [k][16] of a window as float64."""
        stored = window.view(self._form.dtype.numpy).reshape(-1, self._form.panel_elements(k))
        values = self._form.unpack(stored[panel], PANEL, k).T
        return self._form.dtype.widen(values).astype(np.float64)


class Run(Protocol):
    """A case bound to operands."""

    def check(self, candidate: Candidate) -> bool:
        """Run a candidate and tell whether its numbers are right."""

    def call(self, candidate: Candidate) -> float:
        """Run a candidate on operands that no cache holds; return seconds."""


class GemmRun:
    """One product bound to operands: calls a candidate on a copy of the weight."""

    def __init__(
        self,
        library: KernelLibrary,
        team: Team,
        case: GemmCase,
        pool: WeightPool,
        products: KnownProducts,
    ) -> None:
        self.library, self.team, self.case, self.pool = library, team, case, pool
        self.products = products
        pairs = 2 if case.kind == SILU else 1
        self.panels = -(-case.n // PANEL) * pairs
        self.weights = pool.copies(self.panels, case.k)
        random = np.random.default_rng(2)
        self.a: Array = random.standard_normal((case.m, case.k + PADDING), np.float32)
        self.c: Array = np.empty((case.m, case.n + PADDING), np.float32)
        self.partial: Array = np.empty(SPLIT_K_ELEMENTS, np.float32)
        self.turn = 0

    def operands(self, weight: npt.NDArray[np.uint8]) -> list[int]:
        """Return the operand values in the order of the kernel's slots."""
        case = self.case
        a, c = self.a.ctypes.data, self.c.ctypes.data
        stride = FORMATS[case.dtype].panel_elements(case.k)
        first = [case.m, case.n, case.k, a, self.a.shape[1], weight.ctypes.data, stride, 0]
        if case.kind == SILU:
            return [*first, c, self.c.shape[1]]
        return [*first, 0, 0, c, self.c.shape[1], self.partial.ctypes.data, self.partial.size]

    def call(self, candidate: Candidate) -> float:
        """Run on the next copy of the weight; return seconds."""
        values = self.operands(self.weights[self.turn % len(self.weights)])
        self.turn += 1
        reduce = reduce_kernel(self.case.kind, self.case.dtype, candidate.schedule)
        return KernelCall(self.library, candidate, reduce, values, rows=self.case.m).run(self.team)

    def check(self, candidate: Candidate) -> bool:
        """Run once: everything written, nothing beside it, rows and panels as in float64."""
        expected = self._expected(candidate)
        self.c[:] = np.nan
        self.turn = 0  # the copy of the weight that is expected
        self.call(candidate)
        case, c = self.case, self.c[:, : self.case.n]
        if not np.isfinite(c).all() or not np.isnan(self.c[:, case.n :]).all():
            return False
        a = self.activations(candidate)
        rows = rows_to_check(case.m, candidate.schedule[M_TILE])
        return agrees(c[rows], expected.rows(a, rows)) and all(
            agrees(c[:, panel * PANEL :][:, :PANEL], expected.panel(a, panel))
            for panel in panels_to_check(case.n)
        )

    def _expected(self, candidate: Candidate) -> ExpectedProduct:
        """Return what the product must come out as; only those of the last weight are kept."""
        case, pool, weight, known = self.case, self.pool, self.weights[0], self.products
        key = (case.kind, case.n, case.k, case.dtype, self.rounds(candidate))
        if key not in known:
            for other in [other for other in known if other[:4] != key[:4]]:
                del known[other]
            known[key] = ExpectedProduct(
                case.kind, case.n, lambda panel: pool.columns(weight, case.k, panel)
            )
        return known[key]

    def activations(self, candidate: Candidate) -> Array:
        """Return the activations as a kernel sees them: some round them to bfloat16 first."""
        a = self.a[:, : self.case.k]
        return widen_bf16(narrow_bf16(a)) if self.rounds(candidate) else a

    def rounds(self, candidate: Candidate) -> bool:
        """Tell whether a kernel rounds the activations of so many rows."""
        least = self.library.kernels[candidate.kernel].binding.get("DOT", 0)
        return bool(least) and self.case.m >= int(least)


class Child:
    """Keeps library, team and weights between jobs."""

    def __init__(self, setup: ChildSetup) -> None:
        self.library = KernelLibrary(Path(setup.library), setup.index)
        self.pool_bytes = setup.pool_bytes
        self.teams: dict[tuple[int, tuple[int, ...]], Team] = {}
        self.pools: dict[str, WeightPool] = {}
        self.products: KnownProducts = {}
        self.mark = mmap.mmap(setup.mark, MARK_BYTES)

    def run(self, job: Job) -> Reply:
        """Check and time a job."""
        bound = self._bind(job.case)
        write_reply(Reply(event="bound"))
        good = [self._check(bound, i, c) for i, c in enumerate(job.candidates)]
        return Reply(event="times", times=self._time(bound, job, good))

    def _bind(self, case: Case) -> Run:
        team = self._team(case)
        if isinstance(case, AttentionCase):
            return AttentionRun(self.library, team, case, self.pool_bytes)
        if case.dtype not in self.pools:
            self.pools[case.dtype] = WeightPool(case.dtype, self.pool_bytes)
        return GemmRun(self.library, team, case, self.pools[case.dtype], self.products)

    def _team(self, case: Case) -> Team:
        key = (case.threads, case.cpus)
        if key not in self.teams:
            team = self.library.make_team(case.threads, SPIN)
            team.set_active(PhasePlan(threads=case.threads, cpus=case.cpus))
            self.teams[key] = team
        return self.teams[key]

    def _check(self, bound: Run, index: int, candidate: Candidate) -> bool:
        self._begin(index)
        write_reply(Reply(event="start"))
        correct = bound.check(candidate)
        write_reply(Reply(event="checked", index=index, correct=correct))
        return correct

    def _begin(self, index: int) -> None:
        """Note the candidate that is about to run where the parent finds it after a crash."""
        self.mark[:MARK_BYTES] = index.to_bytes(MARK_BYTES, "little")

    def _time(self, bound: Run, job: Job, good: list[bool]) -> tuple[tuple[float, ...], ...]:
        times: list[list[float]] = [[] for _ in job.candidates]
        end = time.monotonic() + job.seconds
        for turn in range(job.rounds):
            for i, candidate in enumerate(job.candidates):
                if good[i]:
                    self._begin(i)
                    times[i].append(bound.call(candidate))
            if turn and time.monotonic() > end:
                break
            write_reply(Reply(event="round"))
        return tuple(tuple(t) for t in times)


def write_reply(reply: Reply) -> None:
    """Write one line and flush it."""
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def read_lines(lines: SimpleQueue[bytes]) -> None:
    """Pass on what the parent writes; when it is gone, end, whatever a kernel is doing."""
    for line in iter(sys.stdin.buffer.readline, b""):
        lines.put(line)
    os._exit(0)


def main() -> None:
    """Serve jobs until stdin ends; what goes wrong here is told, so that no kernel is blamed."""
    try:
        serve()
    except Exception as error:  # MemoryError above all
        write_reply(Reply(event="failed", text=f"{type(error).__name__} {error}".strip()))
        os._exit(1)  # an orderly end would wait for the thread that reads stdin


def serve() -> None:
    """Run jobs as they come."""
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    child = Child(msgspec.json.decode(lines.get(), type=ChildSetup))
    write_reply(Reply(event="ready"))
    while True:
        write_reply(child.run(msgspec.json.decode(lines.get(), type=Job)))


if __name__ == "__main__":
    main()
