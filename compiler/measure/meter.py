"""Measures kernels and schedules in a child process that may crash, hang or be wrong harmlessly.

In: a kernel library, cases and candidate schedules. Out: a `Measurement` per candidate. The child
(`child.py`) checks each candidate against float64, then times all of a case in turns on
weights, or keys and values, that lie outside the caches.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import msgspec

from dovetail.compiler.measure.paired import PairedRatio, pair_times
from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import DovetailError, ToolchainError
from dovetail.ir.tuning import CRASH, OK, TIMEOUT, WRONG, WorkKey
from dovetail.runtime.child.child import Child, ChildLate, ChildLost
from dovetail.runtime.child.launch import LocalProcess
from dovetail.topology.hardware import HardwareSpec

MODULE = "dovetail.compiler.measure.child"
SKIPPED = "skipped"
CACHE_FACTOR = 4
"""Weights cycle through this many times the last-level cache."""
MIN_POOL_BYTES = 64 << 20
MARK_BYTES = 4
START_SECONDS = 120.0
"""How long a child may take to load the library, or to make operands, on however busy a machine."""
KERNEL_FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
)
"""How a kernel ends its process; any other end is not its fault, and no trial."""


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """What all cases have. kind: what is done, on values stored as `dtype`; cpus: () = unpinned."""

    kind: str
    dtype: str
    threads: int
    cpus: tuple[int, ...] = ()

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that records name: the fields that a kind of case adds."""
        return {name: getattr(self, name) for name in type(self).__annotations__}

    @property
    def work(self) -> WorkKey:
        """What it is searched with."""
        return WorkKey.of(self.kind, self.shape, self.dtype, self.threads)


class GemmCase(_Case, frozen=True, kw_only=True, tag="gemm"):
    """One product to time: `kind` as in schedules.py, `dtype` the weight's, `n` columns of C."""

    n: int
    k: int
    m: int


DECODE, PREFILL = "decode_attention", "prefill_attention"
"""Kernel families of attention."""


class AttentionCase(_Case, frozen=True, kw_only=True, tag="attention"):
    """One sequence's attention to time: `kind` is the kernel family, `dtype` that of keys, values.

    rows: the sequence's last tokens, which attend to `context` tokens, themselves included. cap: of
    scores, 0 = none.
    """

    n_q: int
    n_kv: int
    head_dim: int
    rows: int
    context: int
    cap: int = 0

    @property
    def shape(self) -> dict[str, int]:
        """The sizes, and the cap where there is one."""
        return {name: size for name, size in super().shape.items() if name != "cap" or size}


class RowsCase(_Case, frozen=True, kw_only=True, tag="rows"):
    """An operator of rows to time: `kind` as in `row_ops`, `rows` of `width` float32 values."""

    rows: int
    width: int
    eps: float = 1e-5
    dtype: str = "f32"

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that records name, and eps, without which a record says nothing of numbers."""
        return {"rows": self.rows, "width": self.width, "eps_nano": round(1e9 * self.eps)}


class GateCase(GemmCase, frozen=True, kw_only=True, tag="gate"):
    """A gated product, or one that gives gates and ups apart with a user's gate behind it.

    gated: its kind. apart: the kernel of the other product, with the schedule of a candidate.
    """

    gated: str
    apart: str

    @property
    def shape(self) -> dict[str, int]:
        """The product's sizes."""
        return {"n": self.n, "k": self.k, "m": self.m}

    def before(self, kernel: str) -> str | None:
        """The kernel that runs before `kernel`, if that is a gate."""
        return self.apart if kernel.startswith(self.kind) else None


ARRAY_BYTES = 16 << 20
"""Of memory behind each pointer of a kernel without an operator, whatever numbers it takes."""
MOST_ITEM_BYTES = 8


class CallCase(_Case, frozen=True, kw_only=True, tag="call"):
    """A kernel of a user's own to time, `kind`, with the numbers that it takes."""

    sizes: tuple[tuple[str, int], ...]
    dtype: str = "f32"

    @property
    def shape(self) -> dict[str, int]:
        """The numbers by their names."""
        return dict(self.sizes)

    @property
    def may_overrun(self) -> bool:
        """Whether an array with the numbers as its sides may be larger than the memory it gets."""
        return math.prod(size for _, size in self.sizes) * MOST_ITEM_BYTES > ARRAY_BYTES


Case = GemmCase | AttentionCase | RowsCase | GateCase | CallCase
"""What can be timed: operands, and numbers to check against, follow from it."""


class Candidate(msgspec.Struct, frozen=True):
    """A kernel of the library with schedule values."""

    kernel: str
    schedule: tuple[int, ...]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is ok, wrong, crash, timeout or skipped: not run, the budget is spent.

    Times in seconds: median and quartiles of `runs`. Measurements of one case compare, also those
    of different calls. ratio: to what was timed in turns with it, the case's first candidate.
    """

    candidate: Candidate
    status: str
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    runs: int = 0
    ratio: PairedRatio = PairedRatio()


class Measurer(Protocol):
    """Where the times of a search come from: a `Meter`, records, or another machine."""

    def measure(
        self, case: Case, candidates: Sequence[Candidate], *, rounds: int, seconds: float
    ) -> tuple[Measurement, ...]:
        """Return one measurement per candidate, in their order.

        Each candidate is timed in two to `rounds` rounds, with no further one after `seconds`. The
        first candidate of a case that is ever given is what others are compared with: the default.
        Ratios are known where it is the first one of this call.
        """

    def now(self) -> float:
        """Return seconds on the clock that budgets run on."""


class StoppableMeasurer(Measurer, Protocol):
    """A measurer that owns processes."""

    def stop(self) -> None:
        """End the processes now; `measure`, in whichever thread, raises StoppedError from then."""


class StoppedError(Exception):
    """The measurer was stopped; what it was measuring is lost."""


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to the child: the library and how many bytes of weights to cycle through."""

    library: str
    index: KernelIndex
    pool_bytes: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A case and its candidates: two to `rounds` rounds, no further one after `seconds`."""

    case: Case
    candidates: tuple[Candidate, ...]
    rounds: int
    seconds: float


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the child says: that it gets on, that it has checked a candidate, or all times.

    bound: operands are made; from now on what ends the child is the kernel that it runs. What makes
    the child itself unable to go on is an error.
    """

    event: str  # ready | bound | start | checked | round | times
    index: int = 0
    correct: bool = True
    times: tuple[tuple[float, ...], ...] = ()


def summarize(
    candidate: Candidate, times: Sequence[float], beside: Sequence[float] = ()
) -> Measurement:
    """Return median and quartiles of at least one time; beside: the reference's, if right."""
    ordered = sorted(times)
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= 3:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Measurement(
        candidate=candidate,
        status=OK,
        seconds=statistics.median(ordered),
        low=low,
        high=high,
        runs=len(ordered),
        ratio=pair_times(times, beside) if beside else PairedRatio(),
    )


def pool_bytes(hardware: HardwareSpec) -> int:
    """Return how many bytes of weights to cycle through, so that none is found in a cache."""
    return max(MIN_POOL_BYTES, CACHE_FACTOR * hardware.l3_bytes)


class Meter:
    """Times candidates of one library; a context manager that owns the child process."""

    def __init__(
        self,
        library: Path,
        index: KernelIndex,
        *,
        pool_bytes: int,
        timeout: float = 60.0,
        cpus: tuple[int, ...] = (),
    ) -> None:
        """`timeout` bounds the seconds that checking a candidate, or timing a round, may take.

        cpus: PUs that threads run on in the place of a case's own.
        """
        self._mark = tempfile.TemporaryFile()  # shared memory: mapped by the child
        self._mark.truncate(MARK_BYTES)
        self._setup = ChildSetup(library=str(library), index=index, pool_bytes=pool_bytes)
        self._timeout, self._cpus = timeout, cpus
        self._child: Child | None = None
        self._stopped = False
        self._starting = 0.0
        self._prepared = False
        self._bound = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
        self._mark.close()

    def close(self) -> None:
        """End the child process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """Have `measure` end with StoppedError, in whichever thread it runs."""
        self._stopped = True
        if (child := self._child) is not None:
            child.member.kill()

    def now(self) -> float:
        """Return seconds of the machine's clock, less those in which the first child got ready."""
        return time.monotonic() - self._starting

    def measure(
        self, case: Case, candidates: Sequence[Candidate], *, rounds: int, seconds: float
    ) -> tuple[Measurement, ...]:
        """Return one measurement per candidate, in their order.

        All candidates of a call are timed in turns, so that drift of the machine hits them alike.
        Raises ToolchainError where the child fails for another reason than a kernel, of which
        then nothing is known: no memory for the operands, or a signal from elsewhere.
        """
        if self._cpus:
            case = msgspec.structs.replace(case, cpus=self._cpus[: case.threads])
        done: dict[Candidate, Measurement] = {}
        while waiting := tuple(c for c in dict.fromkeys(candidates) if c not in done):
            job = Job(case=case, candidates=waiting, rounds=rounds, seconds=seconds)
            try:
                done.update(self._run(job))
            except ChildLost as lost:
                code = self._reap()
                if self._stopped:
                    raise StoppedError from None
                late = isinstance(lost, ChildLate)
                if not self._bound or not (late or -code in KERNEL_FAULTS):
                    raise self._ended(case, code) from None
                bad = waiting[self._marked()]
                done[bad] = Measurement(candidate=bad, status=TIMEOUT if late else CRASH)
        return tuple(done[c] for c in candidates)

    def _reap(self) -> int:
        """End the child, unless it has, and return how it did: minus the signal, if it was one."""
        assert self._child is not None and isinstance(self._child.member, LocalProcess)
        process = self._child.member.process
        self.close()
        return process.wait()

    def _ended(self, case: Case, code: int) -> ToolchainError:
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        when = "while a kernel ran" if self._bound else "before it ran a kernel"
        return ToolchainError(
            f"the measuring process ended ({how}) {when} of {case.kind} {case.shape}; most often "
            "memory has run out: close other programs, or choose --effort none"
        )

    def _marked(self) -> int:
        """Return the index of the candidate that the child ran last."""
        return int.from_bytes(os.pread(self._mark.fileno(), MARK_BYTES, 0), "little")

    def _run(self, job: Job) -> dict[Candidate, Measurement]:
        """Return measurements of the job; wrong candidates are not timed."""
        self._bound = False
        if self._stopped:
            raise StoppedError
        if self._child is None:
            self._start()
        sent = time.monotonic()
        wrong = dict[Candidate, Measurement]()
        self._ask(job, START_SECONDS)
        self._bound = True
        if not self._prepared:  # the largest operands stay
            self._starting += time.monotonic() - sent
            self._prepared = True
        while True:
            reply = self._ask(None, self._timeout)
            if reply.event == "checked" and not reply.correct:
                bad = job.candidates[reply.index]
                wrong[bad] = Measurement(candidate=bad, status=WRONG)
            if reply.event == "times":
                timed, beside = zip(job.candidates, reply.times, strict=True), reply.times[0]
                return wrong | {c: summarize(c, t, beside) for c, t in timed if c not in wrong}

    def _start(self) -> None:
        begin = time.monotonic()
        self._child = Child.start(MODULE, "the measuring process {}", fds=[self._mark.fileno()])
        if self._stopped:  # meanwhile: `stop` found none to end
            self._child.member.kill()
        try:
            self._ask(self._setup, START_SECONDS)
        except ChildLost:
            self.close()
            if self._stopped:
                raise StoppedError from None
            raise ToolchainError(
                f"the measuring process did not start with {self._setup.library}; most often "
                "memory has run out: close other programs, or choose --effort none"
            ) from None
        self._starting = self._starting or time.monotonic() - begin

    def _ask(self, value: msgspec.Struct | None, seconds: float) -> Reply:
        """Return what the child says next, to `value` if there is one."""
        assert self._child is not None
        try:
            return self._child.ask(value, Reply, seconds)
        except DovetailError as error:
            self.close()
            raise ToolchainError(
                f"the measuring process could not go on: {error}; "
                "choose --effort none to compile without measuring"
            ) from None
