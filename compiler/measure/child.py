"""The measuring child process: a `ChildSetup`, then `Job`s in, `Reply`s out."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from dovetail.compiler.measure.attention import AttentionRun
from dovetail.compiler.measure.call import CallRun
from dovetail.compiler.measure.expected import (
    ExpectedProduct,
    agrees,
    panels_to_check,
    rows_to_check,
)
from dovetail.compiler.measure.kernel_call import PERIOD, KernelCall, zeros
from dovetail.compiler.measure.meter import (
    MARK_BYTES,
    AttentionCase,
    CallCase,
    Candidate,
    Case,
    ChildSetup,
    GateCase,
    GemmCase,
    Job,
    Reply,
    RowsCase,
)
from dovetail.compiler.measure.rows import RowsRun
from dovetail.compiler.rules.schedules import GATED, LINEAR, reduce_kernel
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.block_format import GROUP, SUPER, BlockFormat, Blocks
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL, SPLIT_K_ELEMENTS
from dovetail.ir.schedule import SCHEDULE_VALUES
from dovetail.runtime.child.framing import Channel
from dovetail.runtime.child.worker import read_beside
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.tape import Team

PADDING = 16
"""Elements between rows, as in the runtime's activation buffers."""
SPIN = 2000
TIMED_SECONDS, MOST_CALLS = 5e-4, 16
"""A time is taken over as many calls as last so long, but not over more than this."""
PATTERN_UNITS = 64
"""Units of a quantised panel that are drawn; others repeat them."""
M_TILE = SCHEDULE_VALUES.index("m_tile")
ALIGNMENT = 4096

Array = npt.NDArray[np.float32]
KnownProducts = dict[tuple[str, int, int, str, bool], ExpectedProduct]
"""(kind, n, k, dtype, activations rounded) to what comes out."""


class WeightPool:
    """Random packed weights, larger than the caches; copies of a weight are windows of the pool.

    They lie in pages of 4 KiB, as an artifact's do where its file system has no larger ones: huge
    ones would flatter many streams.
    """

    def __init__(self, dtype: str, pool_bytes: int) -> None:
        self._form = form = FORMATS[dtype]
        if isinstance(form, BlockFormat):
            drawn = draw_blocks(form, PANEL, PATTERN_UNITS * form.unit, seed=1)
            self._pattern = form.pack(drawn).reshape(-1)
        else:
            values = np.random.default_rng(1).standard_normal(PERIOD, np.float32)
            self._pattern = form.dtype.narrow(values * np.float32(0.05)).view(np.uint8)
        self._least = pool_bytes
        self._pool = self._filled(pool_bytes)

    def _filled(self, size: int) -> npt.NDArray[np.uint8]:
        pool = map_pages(size // ALIGNMENT * ALIGNMENT)
        self._fill(pool)
        return pool

    def _fill(self, part: npt.NDArray[np.uint8]) -> None:
        period = len(self._pattern)
        for first in range(0, len(part), period):
            window = part[first : first + period]
            window[:] = self._pattern[: len(window)]

    def copies(self, panels: int, k: int) -> list[npt.NDArray[np.uint8]]:
        """Return windows of a weight's size, two at least, that together span what was asked for.

        Fewer would leave a part of a weight in the cache until its turn comes again.
        """
        size = panels * self._form.panel_bytes(k)
        step = -(-size // ALIGNMENT) * ALIGNMENT
        count = max(2, -(-self._least // step))
        if len(self._pool) < count * step:
            self._pool = self._filled(count * step)
        windows = [self._pool[i : i + size] for i in range(0, count * step, step)]
        if isinstance(self._form, BlockFormat):  # whose scales must lie where they are read
            for window in windows:
                self._fill(window)
        return windows

    def columns(self, window: npt.NDArray[np.uint8], k: int, panel: int) -> npt.NDArray[np.float64]:
        """Return one panel [k][16] of a window as float64."""
        stored = window.view(self._form.dtype.numpy).reshape(-1, self._form.panel_elements(k))
        values = self._form.unpack(stored[panel], PANEL, k).T
        return self._form.dtype.widen(values).astype(np.float64)


def draw_blocks(form: BlockFormat, n: int, k: int, seed: int) -> Blocks:
    """Return random quantised rows [n][k]: all codes, and scales of both signs, are among them."""
    rng = np.random.default_rng((seed, n, k, form.bits))
    shape, count = (n, k // SUPER if form.nested else k // form.block), k // form.block
    size = 0.1 / (1 << (form.bits - 1)) / (64 if form.nested else 1)  # values of about 0.05
    scales, minimums = ((rng.standard_normal(shape) * size).astype(np.float16) for _ in range(2))
    steps, lows = (rng.integers(-128, 128, (n, count)).astype(np.int8) for _ in range(2))
    return Blocks(
        codes=rng.integers(0, 1 << form.bits, (n, k), dtype=np.uint8),
        scales=scales,
        minimums=minimums if form.minimum else None,
        steps=steps if form.nested else None,
        lows=lows if form.nested and form.minimum else None,
    )


def round_to_codes(a: Array) -> Array:
    """Return [m][k] as kernels of quantised weights see it: int8, one scale for each 32 values."""
    groups = a.reshape(len(a), -1, GROUP)
    most = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    rounded: Array = np.rint(groups * inverse) * (most / np.float32(127))
    return rounded.reshape(a.shape)


def map_pages(size: int) -> npt.NDArray[np.uint8]:
    """Return bytes in shared pages of 4 KiB, as the page cache holds many a file's."""
    file = os.memfd_create("dovetail-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        return np.frombuffer(mmap.mmap(file, size), np.uint8)
    finally:
        os.close(file)


def count_calls(seconds: float) -> int:
    """Return how many calls one time is taken over, of a kernel that takes so long.

    Waking threads and reading the clock take microseconds, which a step pays once for many kernels.
    """
    return max(1, min(MOST_CALLS, math.ceil(TIMED_SECONDS / max(seconds, 1e-9))))


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
        pairs = 2 if case.kind in GATED else 1
        self.panels = -(-case.n // PANEL) * pairs
        self.weights = pool.copies(self.panels, case.k)
        random = np.random.default_rng(2)
        self.a: Array = random.standard_normal((case.m, case.k + PADDING), np.float32)
        self.c: Array = np.empty((case.m, case.n + PADDING), np.float32)
        self.partial: Array = np.empty(SPLIT_K_ELEMENTS, np.float32)
        self.turn = 0
        self.places = [weight.ctypes.data for weight in self.weights]
        stride = FORMATS[case.dtype].panel_elements(case.k)
        self.before = [case.m, case.n, case.k, self.a.ctypes.data, self.a.shape[1]]
        self.after = [stride, 0, self.c.ctypes.data, self.c.shape[1]]
        if case.kind not in GATED:
            self.after[2:2] = [0, 0]
            self.after += [self.partial.ctypes.data, self.partial.size]

    def operands(self, turn: int) -> list[int]:
        """Return the operand values, with a copy of the weight, in the order of the slots."""
        return [*self.before, self.places[turn % len(self.places)], *self.after]

    def bind(self, candidate: Candidate, calls: int) -> KernelCall:
        """Return calls on the next copies of the weight."""
        turns = range(self.turn, self.turn + calls)
        self.turn += calls
        reduce = reduce_kernel(self.case.kind, self.case.dtype, candidate.schedule)
        operands = (self.operands(turn) for turn in turns)
        return KernelCall(self.library, candidate, reduce, *operands, rows=self.case.m)

    def check(self, candidate: Candidate) -> bool:
        """Run once: everything written, nothing beside it, rows and panels as in float64."""
        expected = self._expected(candidate)
        self.c[:] = np.nan
        self.turn = 0  # the copy of the weight that is expected
        self.bind(candidate, 1).run(self.team)
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
        """Return the activations as a kernel sees them: some round them first."""
        a = self.a[:, : self.case.k]
        if not self.rounds(candidate):
            return a
        codes = self.binding(candidate).get("ROUNDED") == "i8"
        return round_to_codes(a) if codes else widen_bf16(narrow_bf16(a))

    def rounds(self, candidate: Candidate) -> bool:
        """Tell whether a kernel rounds the activations of so many rows, to bfloat16 or codes."""
        least = self.binding(candidate).get("DOT", 0)
        return bool(least) and self.case.m >= int(least)

    def binding(self, candidate: Candidate) -> Mapping[str, int | str]:
        """Return the binding of the kernel that multiplies."""
        return self.library.kernels[candidate.kernel].binding


class GateRun(GemmRun):
    """A gated product as above, or a candidate that is a gate: behind a product of both parts."""

    def __init__(
        self,
        library: KernelLibrary,
        team: Team,
        case: GateCase,
        pool: WeightPool,
        products: KnownProducts,
    ) -> None:
        fields = {name: getattr(case, name) for name in GemmCase.__struct_fields__}
        plain = GemmCase(**fields | {"kind": case.gated})
        super().__init__(library, team, plain, pool, products)
        self.product = case.apart
        self.pairs = zeros(case.m, self.panels * PANEL + PADDING)

    def bind(self, candidate: Candidate, calls: int) -> KernelCall:
        """Return calls on the next copies of the weight."""
        if self.is_whole(candidate):
            return super().bind(candidate, calls)
        turns = range(self.turn, self.turn + calls)
        self.turn += calls
        case, pairs = self.case, (self.pairs.ctypes.data, self.pairs.shape[1])
        m, _, *rest = self.before
        stride, bias, *out = self.after
        whole = [m, self.panels * PANEL, *rest]
        after = [stride, bias, 0, 0, *pairs, self.partial.ctypes.data, self.partial.size]
        operands = ([*whole, self.places[t % len(self.places)], *after] for t in turns)
        product = Candidate(self.product, candidate.schedule)
        reduce = reduce_kernel(LINEAR, case.dtype, candidate.schedule)
        then = candidate.kernel, [m, case.n, *pairs, *out]
        return KernelCall(self.library, product, reduce, *operands, rows=m, then=then)

    def is_whole(self, candidate: Candidate) -> bool:
        """Tell whether it is a gated product."""
        return self.library.kernels[candidate.kernel].family == "gemm_silu"

    def binding(self, candidate: Candidate) -> Mapping[str, int | str]:
        """Return the binding of the kernel that multiplies."""
        name = candidate.kernel if self.is_whole(candidate) else self.product
        return self.library.kernels[name].binding


Run = GemmRun | AttentionRun | RowsRun | CallRun
"""A case bound to operands."""


class Bench:
    """Keeps library, team and weights between jobs.

    mark: descriptor of shared memory in which it notes the candidate that it runs.
    """

    def __init__(self, setup: ChildSetup, mark: int, say: Callable[[Reply], object]) -> None:
        self._say = say
        self.library = KernelLibrary(Path(setup.library), setup.index)
        self.pool_bytes = setup.pool_bytes
        self.teams: dict[tuple[int, tuple[int, ...]], Team] = {}
        self.pools: dict[str, WeightPool] = {}
        self.products: KnownProducts = {}
        self.mark = mmap.mmap(mark, MARK_BYTES)

    def run(self, job: Job) -> Reply:
        """Check and time a job."""
        bound = self._bind(job.case)
        self._say(Reply(event="bound"))
        good = [self._check(bound, i, c) for i, c in enumerate(job.candidates)]
        return Reply(event="times", times=self._time(bound, job, good))

    def _bind(self, case: Case) -> Run:
        team = self._team(case)
        if isinstance(case, AttentionCase):
            return AttentionRun(self.library, team, case, self.pool_bytes)
        if isinstance(case, RowsCase):
            return RowsRun(self.library, team, case)
        if isinstance(case, CallCase):
            return CallRun(self.library, team, case)
        if case.dtype not in self.pools:
            self.pools[case.dtype] = WeightPool(case.dtype, self.pool_bytes)
        if isinstance(case, GateCase):
            return GateRun(self.library, team, case, self.pools[case.dtype], self.products)
        return GemmRun(self.library, team, case, self.pools[case.dtype], self.products)

    def _team(self, case: Case) -> Team:
        key = (case.threads, case.cpus)
        if key not in self.teams:
            team = Team(self.library, case.threads, SPIN)
            team.set_active(PhasePlan(threads=case.threads, cpus=case.cpus))
            self.teams[key] = team
        return self.teams[key]

    def _check(self, bound: Run, index: int, candidate: Candidate) -> bool:
        self._begin(index)
        self._say(Reply(event="start"))
        correct = bound.check(candidate)
        self._say(Reply(event="checked", index=index, correct=correct))
        return correct

    def _begin(self, index: int) -> None:
        """Note the candidate that is about to run where the parent finds it after a crash."""
        self.mark[:MARK_BYTES] = index.to_bytes(MARK_BYTES, "little")

    def _time(self, bound: Run, job: Job, good: list[bool]) -> tuple[tuple[float, ...], ...]:
        """Time what is right, in each round in another order: none profits from its place."""
        times: list[list[float]] = [[] for _ in job.candidates]
        right = [i for i, correct in enumerate(good) if correct]
        team, end = self._team(job.case), time.monotonic() + job.seconds
        calls, random = 0, np.random.default_rng(4)
        for turn in range(job.rounds if right else 0):
            for i in random.permutation(right).tolist():
                self._begin(i)
                calls = calls or count_calls(bound.bind(job.candidates[i], 1).run(team))
                warm = calls + 1 if calls > 1 else 1
                times[i].append(bound.bind(job.candidates[i], warm).run_warm(team))
            if turn and time.monotonic() > end:
                break
            self._say(Reply(event="round"))
        return tuple(tuple(t) for t in times)


def serve(channel: Channel, mark: int) -> None:
    """Run jobs as they come; the process ends with its parent, whatever a kernel is doing."""
    setup = channel.receive(ChildSetup)
    if setup is None:
        return
    jobs: SimpleQueue[Job] = SimpleQueue()
    read_beside(channel, Job, jobs.put)
    bench = Bench(setup, mark, channel.send)
    channel.send(Reply(event="ready"))
    while True:
        channel.send(bench.run(jobs.get()))
