"""The measuring child: right kernels are timed; wrong, crashing, hanging ones are recorded."""

from __future__ import annotations

import os
import platform
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from dovetail.codegen.catalog import HeadShape, KernelRequest, kernel_request
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.codegen.targets import TARGETS, host_features, host_target, runs_on
from dovetail.compiler.measure import meter as measure
from dovetail.compiler.measure.attention import EXACT, ROUNDED, tolerance
from dovetail.compiler.measure.meter import (
    MARK_BYTES,
    AttentionCase,
    Candidate,
    ChildSetup,
    GemmCase,
    Job,
    Measurement,
    Meter,
    Reply,
    StoppedError,
    pool_bytes,
    summarize,
)
from dovetail.compiler.measure.paired import PairedRatio
from dovetail.compiler.rules.schedules import gemm_requests, make_schedule
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import ToolchainError
from dovetail.ir.high.parse import parse_high
from dovetail.runtime.child.child import Child, ChildLate
from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import CacheSpec

HEAD = (
    "M: i64, N: i64, K: i64, A: ptr[f32], lda: i64, B: ptr[f32], panel_stride: i64, "
    "bias: ptr[f32], R: ptr[f32], ldr: i64, C: ptr[f32], ldc: i64, tid: thread, nth: thread"
)
PRODUCT = """
@inline
def product(M: i64, N: i64, K: i64, A: ptr[f32], lda: i64, B: ptr[f32], panel_stride: i64,
            C: ptr[f32], ldc: i64):
    for i in range(M):
        for j in range(N):
            total: f32 = 0.0
            for k in range(K):
                total += A[i * lda + k] * B[j // 16 * panel_stride + k * 16 + j % 16]
            C[i * ldc + j] = total
"""
FAULTY = f"""
@kernel
def wrong({HEAD}):
    for i in range(M * ldc):
        C[i] = 1.0

@kernel
def lazy({HEAD}):
    C[0] = 0.0

@kernel
def crash({HEAD}):
    R[tid] = 1.0
{PRODUCT}
@kernel
def plain({HEAD}):
    if tid == 0:
        product(M, N, K, A, lda, B, panel_stride, C, ldc)

@kernel
def late_crash({HEAD}):
    if tid == 0:
        if C[0] == C[0]:
            R[0] = 1.0
        product(M, N, K, A, lda, B, panel_stride, C, ldc)

@kernel
def late_hang({HEAD}):
    if tid == 0:
        if C[0] == C[0]:
            while M > 0:
                C[0] = C[0] + 1.0
        product(M, N, K, A, lda, B, panel_stride, C, ldc)

@kernel
def last_row({HEAD}):
    if tid == 0:
        product(M, N, K, A, lda, B, panel_stride, C, ldc)
        C[(M - 1) * ldc + 20] = 0.5

@kernel
def last_column({HEAD}):
    if tid == 0:
        product(M, N, K, A, lda, B, panel_stride, C, ldc)
        C[(M - 2) * ldc + N - 1] = 0.5

@kernel
def beside({HEAD}):
    if tid == 0:
        product(M, N, K, A, lda, B, panel_stride, C, ldc)
        C[N] = 0.5

@kernel
def hang({HEAD}):
    while M > 0:
        C[0] = C[0] + 1.0
"""
ROW = """
    if tid == 0:
        for r in range({first}, cast(i64, starts[1])):
            length = cast(i64, lengths[0]) - cast(i64, starts[1]) + {seen}
            for h in range(n_q):
                for d in range(hd):
                    total: f32 = 0.0
                    weights: f32 = 0.0
                    for t in range(length):
                        block = cast(i64, table[t // 16]) * n_kv + h * n_kv // n_q
                        at = (block * 16 + t % 16) * hd
                        score: f32 = 0.0
                        for e in range(hd):
                            score += q[r * ldq + h * hd + e] * load(kpool + (at + e))
                        weight = exp(score * scale)
                        weights += weight
                        total += weight * load(vpool + (at + d))
                    out[r * ldo + h * hd + d] = total / weights
"""
PREFILL = (
    "n: i64, n_q: i64, n_kv: i64, hd: i64, scale: f32, window: i64, sinks: ptr[f32], "
    "q: ptr[f32], ldq: i64, starts: ptr[i32], lengths: ptr[i32], table: ptr[i32], stride: i64, "
    "kpool: ptr[f32], vpool: ptr[f32], out: ptr[f32], ldo: i64, tid: thread, nth: thread"
)
ROWS = {
    "attend": ROW.format(first=0, seen="r + 1"),
    "attend_to_all": ROW.format(first=0, seen="cast(i64, starts[1])"),
    "attend_in_last_row": ROW.format(first="cast(i64, starts[1]) - 1", seen="r + 1"),
    "attend_and_more": ROW.format(first=0, seen="r + 1") + "        out[n_q * hd] = 0.0\n",
}
"""Prefill attention: right; without a mask; in the last row only; with a value too many."""
HALVES = {
    "attend_halves": ROW.format(first=0, seen="r + 1"),
    "attend_but_one": ROW.format(first=0, seen="r"),
}
"""Prefill attention over float16: right; without the last key."""
for head, bodies in (
    (PREFILL, ROWS),
    (PREFILL.replace("pool: ptr[f32]", "pool: ptr[f16]"), HALVES),
):
    FAULTY += "".join(f"\n@kernel\ndef {name}({head}):{body}" for name, body in bodies.items())
BAD = ("wrong", "lazy", "crash", "hang")
HANGING = ("hang", "late_hang")
LATE = {"late_crash": "crash", "late_hang": "timeout"}
SUBTLE = ("last_row", "last_column", "beside")
SCHEDULE = make_schedule(m_tile=2, block_n=1)
SCHEDULES = (SCHEDULE, make_schedule(m_tile=1, block_n=2))
CASE = GemmCase(kind="linear", n=40, k=30, m=5, dtype="f32", threads=2)
ATTENTION = AttentionCase(
    kind="decode_attention", n_q=6, n_kv=2, head_dim=16, rows=1, context=70, dtype="bf16", threads=1
)


@pytest.fixture(scope="module")
def built() -> BuiltLibrary:
    faulty = [
        KernelRequest("faulty", name, {}, name)
        for name in (*BAD, *LATE, *SUBTLE, *ROWS, *HALVES, "plain")
    ]
    target = host_target()
    # of few rows, which are quick to compile
    products = [r for r in gemm_requests(("f32", "bf16"), target) if r.binding.get("MR", 0) <= 6]
    spec = LibrarySpec(
        target=target,
        kernels=(*products, *faulty),
        tvm_ffi=False,
        modules={"faulty": parse_high(Source("faulty.dk", FAULTY))},
    )
    return build_library(spec)


def candidates(built: BuiltLibrary, kind: str, dtype: str) -> tuple[Candidate, ...]:
    prefix = f"gemm_{kind}_{dtype}"
    names = [k.name for k in built.index.kernels if k.name.startswith(prefix)]
    return tuple(Candidate(name, schedule) for name in names for schedule in SCHEDULES)


class PatientMeter(Meter):
    """A meter that gives up on kernels that hang, and on nothing else, however slow the machine."""

    def _run(self, job: Job) -> dict[Candidate, Measurement]:
        self._job = job
        return super()._run(job)

    def _ask(self, value: msgspec.Struct | None, seconds: float) -> Reply:
        while True:
            try:
                return super()._ask(value, 1.0 if value is None else seconds)
            except ChildLate:
                if value is not None or self._job.candidates[self._marked()].kernel in HANGING:
                    raise


@pytest.mark.parametrize("kind", ["linear", "silu"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_products_are_right(built, kind, dtype):
    case = msgspec.structs.replace(CASE, kind=kind, dtype=dtype)
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = meter.measure(case, candidates(built, kind, dtype), rounds=3, seconds=1e6)
    assert {m.status for m in found} == {"ok"}
    assert all(m.runs == 3 and 0 < m.low <= m.seconds <= m.high for m in found)


def test_bad_candidates_are_told_apart_and_the_others_still_timed(built):
    good = candidates(built, "linear", "f32")[:2]
    bad = tuple(Candidate(name, SCHEDULE) for name in BAD)
    with PatientMeter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = meter.measure(CASE, (good[0], *bad, good[1]), rounds=3, seconds=5)
    assert [m.status for m in found] == ["ok", "wrong", "wrong", "crash", "timeout", "ok"]
    assert [m.candidate for m in found] == [good[0], *bad, good[1]]
    assert all((m.seconds > 0) == (m.status == "ok") for m in found)


@pytest.mark.parametrize("name", LATE)
def test_a_kernel_that_fails_only_while_it_is_timed_is_the_one_blamed(built, name):
    good = candidates(built, "linear", "f32")[:2]
    late = Candidate(name, SCHEDULE)
    with PatientMeter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = meter.measure(CASE, (good[0], late, good[1]), rounds=3, seconds=5)
    assert [m.status for m in found] == ["ok", LATE[name], "ok"]


def test_one_wrong_value_at_an_edge_is_found(built):
    case = msgspec.structs.replace(CASE, n=200, m=50)
    some = tuple(Candidate(name, SCHEDULE) for name in ("plain", *SUBTLE))
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = meter.measure(case, some, rounds=2, seconds=5)
    assert [m.status for m in found] == ["ok", "wrong", "wrong", "wrong"]


def test_attention_is_checked_in_every_row_and_beside(built):
    case = msgspec.structs.replace(
        ATTENTION, kind="prefill_attention", rows=20, context=30, dtype="f32"
    )
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        some = [Candidate(name, SCHEDULE) for name in ROWS]
        found = meter.measure(case, some, rounds=2, seconds=5)
    assert [m.status for m in found] == ["ok", "wrong", "wrong", "wrong"]


def test_one_key_of_thousands_left_out_is_found(built):
    case = AttentionCase(
        kind="prefill_attention", n_q=1, n_kv=1, head_dim=16, rows=1, context=4096, dtype="f16",
        threads=1,
    )  # fmt: skip
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = meter.measure(
            case, [Candidate(name, SCHEDULE) for name in HALVES], rounds=2, seconds=5
        )
    assert [m.status for m in found] == ["ok", "wrong"]


def test_only_products_that_are_rounded_may_be_further_from_float64():
    assert tolerance(4096, 0) == tolerance(511, 512) == EXACT
    assert tolerance(512, 512) == ROUNDED
    assert tolerance(2048, 512) == ROUNDED / 2


def test_attention_of_prompts_that_rounds_is_right(tmp_path):
    target = TARGETS["x86-64-avx512bf16"]
    if not runs_on(target, platform.machine(), host_features()):
        pytest.skip("this CPU has no dot products of bfloat16 pairs")
    exact, rounds = (
        kernel_request("prefill_attention", target, "f32", HeadShape(64, 3, rounded))
        for rounded in (False, True)
    )
    library = build_library(LibrarySpec(target, (exact, rounds), name="both", tvm_ffi=False))
    some = [Candidate(request.name, SCHEDULE) for request in (exact, rounds)]
    with Meter(library.path, library.index, pool_bytes=1 << 20) as meter:
        for rows, context in ((64, 64), (256, 1024)):
            case = AttentionCase(
                kind="prefill_attention", n_q=6, n_kv=2, head_dim=64, rows=rows, context=context,
                dtype="f32", threads=1,
            )  # fmt: skip
            found = meter.measure(case, some, rounds=2, seconds=5)
            assert [m.status for m in found] == ["ok", "ok"]


def test_a_library_that_cannot_be_loaded_is_an_error(built):
    with Meter(Path("/nowhere/kernels.so"), built.index, pool_bytes=1 << 20) as meter:
        with pytest.raises(ToolchainError, match="cannot be loaded"):
            meter.measure(CASE, candidates(built, "linear", "f32"), rounds=1, seconds=1)


@pytest.mark.parametrize("case", [CASE, ATTENTION])
def test_operands_that_do_not_fit_in_memory_are_no_kernels_fault(built, case, capfd):
    with Meter(built.path, built.index, pool_bytes=1 << 60) as meter:
        with pytest.raises(ToolchainError, match=r"could not go on: .*(MemoryError|allocate)"):
            meter.measure(case, candidates(built, "linear", "f32"), rounds=1, seconds=1)
    assert capfd.readouterr().err == ""


class Killed(Meter):
    """A meter whose child is killed from outside, as for memory, when it says some word."""

    word = ""

    def _ask(self, value, seconds: float) -> Reply:
        reply = super()._ask(value, seconds)
        if reply.event == self.word:
            os.kill(self._child.pid, signal.SIGKILL)
        return reply


@pytest.mark.parametrize(
    ("word", "when"), [("ready", "before it ran"), ("start", "while a kernel")]
)
def test_a_child_that_others_kill_is_no_kernels_fault(built, word, when):
    with Killed(built.path, built.index, pool_bytes=1 << 20) as meter:
        meter.word = word
        with pytest.raises(ToolchainError, match=when):
            meter.measure(CASE, (Candidate("hang", SCHEDULE),), rounds=1, seconds=1)
        meter.word = ""  # the next child is well
        (found,) = meter.measure(CASE, candidates(built, "linear", "f32")[:1], rounds=2, seconds=1)
    assert found.status == "ok"


def test_summaries_are_medians_with_quartiles():
    found = summarize(Candidate("k", ()), [5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.seconds, found.low, found.high, found.runs) == (3.0, 2.0, 4.0, 5)
    assert summarize(Candidate("k", ()), [2.0]).low == 2.0
    assert found.ratio == PairedRatio()
    assert summarize(Candidate("k", ()), [3.0, 1.0], [2.0, 2.0]).ratio == PairedRatio(1.0, 0.0)


def test_weights_fill_four_times_the_last_level_cache():
    machine = read_hardware()
    for l3_bytes, size in ((4 << 20, 64 << 20), (20 << 20, 80 << 20)):
        cache = CacheSpec(
            level=3, kind="unified", bytes=l3_bytes, line_bytes=64, pus=machine.allowed_pus
        )
        assert pool_bytes(msgspec.structs.replace(machine, caches=(cache,))) == size


class Timed(Meter):
    """A meter on a clock that stands still but while it waits for some words of the child."""

    clock = 0.0
    lasting: ClassVar = {"ready": 1000.0, "bound": 100.0, "times": 1.0}

    def _ask(self, value, seconds: float) -> Reply:
        reply = super()._ask(value, seconds)
        self.clock += self.lasting.get(reply.event, 0.0)
        return reply


def test_ratios_are_to_the_first_and_getting_ready_is_off_the_clock(built, monkeypatch):
    wrong, *good = Candidate("wrong", SCHEDULE), *candidates(built, "linear", "f32")[:2]
    with Timed(built.path, built.index, pool_bytes=1 << 20) as meter:
        monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: meter.clock))
        first, second = meter.measure(CASE, good, rounds=7, seconds=1e6)
        assert first.ratio == PairedRatio(1.0, 1.0) and meter.now() == 1.0
        assert 0 < second.ratio.median <= second.ratio.bound
        _, beside = meter.measure(CASE, (wrong, good[0]), rounds=7, seconds=1e6)
        assert beside.ratio == PairedRatio() and meter.now() == 102.0


def start_child(built):
    """Start a child, and tell it what it measures with."""
    with tempfile.TemporaryFile() as mark:
        mark.truncate(MARK_BYTES)
        child = Child.start(measure.MODULE, "the child {}", fds=[mark.fileno()])
        child.tell(ChildSetup(library=str(built.path), index=built.index, pool_bytes=1 << 20))
    return child


def test_a_child_that_nobody_hears_ends_without_a_word(built, capfd):
    child = start_child(built)
    child.channel.hang_up()  # before it is ready
    assert child.member.wait(60) == ""
    assert capfd.readouterr() == ("", "")


def test_a_hanging_child_ends_with_its_parent(built):
    hang = Job(case=CASE, candidates=(Candidate("hang", SCHEDULE),), rounds=2, seconds=1)
    child = start_child(built)
    child.tell(hang)
    events = [child.ask(None, Reply, 60).event for _ in range(3)]
    assert events == ["ready", "bound", "start"]
    child.channel.hang_up()  # as when the parent is killed
    assert child.member.wait(60) == ""


def test_a_stop_while_the_child_is_started_ends_it(built, monkeypatch):
    start = Child.start

    def start_and_stop(*args, **options):
        child = start(*args, **options)
        meter.stop()
        return child

    monkeypatch.setattr(Child, "start", start_and_stop)
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        with pytest.raises(StoppedError):
            meter.measure(CASE, candidates(built, "linear", "f32"), rounds=1, seconds=1)
