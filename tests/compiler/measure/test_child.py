"""The measuring child in this process: what it calls in what order, on which operands and CPUs."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure import child as measure_child
from dovetail.compiler.measure import kernel_call
from dovetail.compiler.measure.child import (
    MOST_CALLS,
    TIMED_SECONDS,
    Bench,
    WeightPool,
    count_calls,
)
from dovetail.compiler.measure.kernel_call import KernelCall
from dovetail.compiler.measure.meter import (
    MARK_BYTES,
    AttentionCase,
    Candidate,
    ChildSetup,
    GemmCase,
    Job,
    Reply,
)
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.ir.diagnostics import Source
from dovetail.ir.high.parse import parse_high
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.machine.library import KernelLibrary
from tests.compiler.measure.test_meter import HEAD, PREFILL, PRODUCT, ROW

COUNTING = f"""{PRODUCT}
@kernel
def count({HEAD}):
    if tid == 0:
        if C[0] == C[0]:
            B[0] = B[0] + 1000.0
        product(M, N, K, A, lda, B, panel_stride, C, ldc)

@kernel
def wrong({HEAD}):
    C[0] = 0.0

@kernel
def count_layers({PREFILL}):
    if tid == 0:
        if out[0] == out[0]:
            vpool[0] = vpool[0] + 1000.0
{ROW.format(first=0, seen="r + 1")}"""
"""Right kernels that note in their operand how often they read it, but for the check, which finds
NaN where they are to write.
"""
NOTED = 1000.0
GEMM = GemmCase(kind="linear", n=40, k=30, m=2, dtype="f32", threads=1)
ATTENTION = AttentionCase(
    kind="prefill_attention", n_q=1, n_kv=1, head_dim=16, rows=1, context=16, dtype="f32", threads=1
)
POOL_BYTES = 50_000
GOOD = tuple(Candidate("count", make_schedule(m_tile=2, block_n=n)) for n in (1, 2, 3))
WRONG = Candidate("wrong", make_schedule(m_tile=2))
LONG, SHORT = 1e9, 0.0
"""Seconds that a time is taken over, so that it takes the most calls, or one."""


@pytest.fixture(scope="module")
def built() -> BuiltLibrary:
    names = ("count", "wrong", "count_layers")
    spec = LibrarySpec(
        target=host_target(),
        kernels=tuple(KernelRequest("counting", name, {}, name) for name in names),
        tvm_ffi=False,
        modules={"counting": parse_high(Source("counting.dk", COUNTING))},
    )
    return build_library(spec)


class NotingRun:
    """A run that notes whom it is asked to call, and how often."""

    def __init__(self, run, notes):
        self.run, self.notes, self.check = run, notes, run.check

    def bind(self, candidate, calls):
        self.notes.append((candidate, calls))
        return self.run.bind(candidate, calls)


class NotingBench(Bench):
    """A bench that shows what it has bound, and notes what it calls."""

    def _bind(self, case):
        self.bound, self.notes = super()._bind(case), []
        return NotingRun(self.bound, self.notes)


@pytest.fixture
def bench(built):
    with tempfile.TemporaryFile() as mark:
        mark.truncate(MARK_BYTES)
        told: list[Reply] = []
        found = NotingBench(
            ChildSetup(
                library=str(built.path),
                index=built.index,
                pool_bytes=POOL_BYTES,
            ),
            mark.fileno(),
            told.append,
        )
        found.told = told
        yield found


def job(case=GEMM, candidates=GOOD[:1], rounds=3, seconds=60.0) -> Job:
    return Job(case=case, candidates=candidates, rounds=rounds, seconds=seconds)


def test_copies_of_a_weight_fill_the_pool_and_do_not_overlap():
    pool = WeightPool("f32", POOL_BYTES)
    for panels, count in ((3, 7), (100, 2)):  # of 5760 bytes in two pages, and of 192000
        copies = pool.copies(panels, 30)
        starts = np.array([copy.ctypes.data for copy in copies])
        assert len(copies) == count and {copy.nbytes for copy in copies} == {panels * 30 * 16 * 4}
        assert (np.diff(starts) >= copies[0].nbytes).all() and not (starts % 4096).any()


@pytest.mark.parametrize(("seconds", "calls"), [(LONG, MOST_CALLS), (SHORT, 1)])
def test_each_call_reads_the_next_copy_of_the_weight(bench, monkeypatch, seconds, calls):
    monkeypatch.setattr(measure_child, "TIMED_SECONDS", seconds)
    assert all(map(len, bench.run(job(candidates=GOOD[:2])).times))
    before = WeightPool("f32", POOL_BYTES).copies(bench.bound.panels, GEMM.k)
    first = [[w[:4].view(np.float32)[0] for w in ws] for ws in (bench.bound.weights, before)]
    noted = np.round((np.array(first[0]) - first[1]) / NOTED)
    warm = calls if calls == 1 else calls + 1
    turns = Counter(turn % 7 for turn in range(1, 2 + 3 * 2 * warm))  # 0 was the last check's
    assert noted.tolist() == [turns[i] for i in range(7)]


def test_each_call_reads_the_next_layer(bench, monkeypatch):
    monkeypatch.setattr(measure_child, "TIMED_SECONDS", LONG)
    candidate = Candidate("count_layers", make_schedule())
    assert len(bench.run(job(ATTENTION, (candidate,))).times[0]) == 3
    layers, size = POOL_BYTES // (2 * KV_BLOCK * 16 * 4), KV_BLOCK * 16
    values = bench.bound.pools[1]
    turns = Counter(turn % layers for turn in range(1, 2 + 3 * (MOST_CALLS + 1)))
    assert np.round(values[::size] / NOTED).tolist() == [turns[i] for i in range(layers)]


def test_right_candidates_take_turns_in_another_order_each_round(bench, monkeypatch):
    monkeypatch.setattr(measure_child, "TIMED_SECONDS", LONG)
    times = bench.run(job(candidates=(GOOD[0], WRONG, *GOOD[1:]), rounds=6)).times
    assert [len(each) for each in times] == [6, 0, 6, 6]
    probe, *turns = bench.notes
    assert probe == (turns[0][0], 1) and {calls for _, calls in turns} == {MOST_CALLS + 1}
    rounds = [tuple(c for c, _ in turns[i : i + 3]) for i in range(0, 18, 3)]
    assert all(set(each) == set(GOOD) for each in rounds)
    assert {each[0] for each in rounds} == set(GOOD)


@pytest.mark.parametrize(("rounds", "seconds", "runs"), [(5, -1.0, 2), (1, -1.0, 1), (5, 1e6, 5)])
def test_no_round_begins_after_its_seconds_but_the_second(bench, rounds, seconds, runs):
    times = bench.run(job(candidates=(WRONG, GOOD[0]), rounds=rounds, seconds=seconds)).times
    assert [len(each) for each in times] == [0, runs]
    told = bench.told
    assert [reply.event for reply in told[:5]] == ["bound", *["start", "checked"] * 2]
    assert [reply.correct for reply in told[2:5:2]] == [False, True]
    rests = [reply.event for reply in told[5:]]
    assert set(rests) == {"round"} and len(rests) == runs - (rounds > runs)


def test_where_nothing_is_right_nothing_is_timed(bench):
    assert bench.run(job(candidates=(WRONG,))).times == ((),)
    assert bench.notes == []


def threads() -> set[int]:
    """Return this process's threads."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def test_threads_are_pinned_to_the_cpus_of_the_case(bench):
    for cpu in sorted(os.sched_getaffinity(0))[:2]:
        before, case = threads(), msgspec.structs.replace(GEMM, threads=2, cpus=(cpu, cpu))
        bench.run(job(case, rounds=1))
        bench.run(job(case, rounds=1))  # by the same threads
        assert [os.sched_getaffinity(made) for made in threads() - before] == [{cpu}]


def test_one_time_is_taken_over_as_many_calls_as_last_long_enough():
    assert [count_calls(TIMED_SECONDS * part) for part in (2, 1, 0.6, 0.1, 1e-3, 0)] == [
        1, 1, 2, 10, MOST_CALLS, MOST_CALLS
    ]  # fmt: skip


def test_the_call_that_wakes_the_team_is_not_timed(built, monkeypatch):
    """By a clock on which the first call takes 100 seconds, and each other one 2."""
    library, clock = KernelLibrary(built.path, built.index), [0.0]

    def run(tape, args, span):
        clock[0] += sum(2.0 if i else 100.0 for i in span)

    team = SimpleNamespace(run=run)
    monkeypatch.setattr(kernel_call, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    several = KernelCall(library, GOOD[0], None, *[[0] * 12] * 4, rows=1)
    assert (several.run_warm(team), several.run(team)) == (2.0, 106.0)
    assert KernelCall(library, GOOD[0], None, [0] * 12, rows=1).run_warm(team) == 100.0
