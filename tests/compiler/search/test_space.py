"""The space: tiles that differ, grids that use all threads, one spelling of each program."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.measure.meter import Candidate
from dovetail.compiler.rules.schedules import LINEAR, SILU, MicroKernel, micro_kernels
from dovetail.compiler.search.space import Program, Scheme, Slice
from dovetail.ir.model import SPLIT_K_ELEMENTS
from dovetail.ir.schedule import ORDERS
from tests.compiler.search.landscape import TARGET, task


@given(m=st.integers(1, 600), kind=st.sampled_from([LINEAR, SILU]))
def test_every_micro_kernel_is_there_once_by_its_true_height(m, kind):
    tiles = task(kind=kind).problem(m).tiles()
    assert len(set(tiles)) == len(tiles)
    cuts = {(t.panels, -(-m // t.rows)) for t in tiles}
    assert len(cuts) == len(tiles)
    assert cuts == {(t.panels, -(-m // t.rows)) for t in micro_kernels(kind, TARGET)}


def test_rows_in_tile_registers_have_one_micro_kernel():
    for m, dtype, count in ((15, "bf16", 2), (16, "bf16", 1), (512, "bf16", 1), (512, "f32", 2)):
        problem = task(kind=SILU).problem(m)
        op = replace(problem.op, dtype=dtype)
        problem = replace(problem, target=TARGETS["x86-64-amx"], op=op)
        assert len({tile.panels for tile in problem.tiles()}) == count
        assert len(problem.tiles()) == 1 or count > 1


@given(m=st.integers(1, 2000), n=st.integers(1, 5000), k=st.integers(1, 5000), t=st.integers(1, 12))
def test_schemes_give_every_thread_a_share(m, n, k, t):
    problem = task(n=n, k=k, threads=t).problem(m)
    schemes = problem.schemes()
    assert schemes
    used = {s.m * s.n * s.k for s in schemes}
    assert len(used) == 1 and used.pop() <= t
    for scheme in schemes:
        assert scheme.m <= m and scheme.n <= problem.units
        sums = (scheme.k - 1) * m * problem.units * 16
        assert scheme.k == 1 or (scheme.k * 64 <= k and sums <= SPLIT_K_ELEMENTS)
    assert all(s.k == 1 for s in problem.schemes(split_k=False))


def test_two_threads_have_three_schemes():
    assert set(task(threads=2).problem(8).schemes()) == {
        Scheme(2, 1, 1),
        Scheme(1, 2, 1),
        Scheme(1, 1, 2),
    }


def test_whole_sides_are_spelled_zero():
    problem, tile = task(n=512, k=1024).problem(64), MicroKernel(14, 2)
    assert problem.extents(tile, Scheme(1, 2, 1)) == Slice(64, 8, 1024)
    assert problem.canonical(tile, Slice(64, 8, 1024), Scheme(1, 2, 1)) == Slice(0, 0, 0)
    assert problem.canonical(tile, Slice(28, 1, 128), Scheme(1, 2, 1)) == Slice(28, 1, 128)
    gated = task(n=512, k=1024, kind=SILU).problem(64)
    assert gated.extents(tile, Scheme(1, 2, 1)).n == 16
    assert gated.canonical(tile, Slice(28, 1, 128), Scheme()).k == 0


def test_orders_differ_in_loops_of_several_slices_only():
    one, tile = task(n=512, k=1024), MicroKernel(14, 2)

    def orders(m, n, k, kind=LINEAR):
        problem = replace(one, op=replace(one.op, kind=kind)).problem(64)
        program = Program(tile, Slice(m, n, k), Scheme(1, 2, 1), 0)
        return tuple(other.order for other in problem.orders(program))

    assert orders(14, 1, 128) == ORDERS
    assert orders(0, 1, 0) == orders(14, 0, 0) == orders(0, 0, 0) == ("mkn",)
    assert orders(14, 1, 0) == orders(14, 1, 0, SILU) == ("mkn", "nmk")
    assert orders(0, 1, 128) == ("mkn", "mnk")
    assert orders(14, 0, 128) == ("mkn", "nkm")
    assert orders(64, 8, 1024) == ("mkn",)  # one slice, however spelled


def test_programs_are_read_back_with_their_order_and_older_ones_in_the_first():
    problem = task(n=512, k=1024).problem(64)
    program = Program(MicroKernel(14, 2), Slice(14, 1, 128), Scheme(1, 2, 1), 1024)
    for other in problem.orders(program):
        candidate = problem.candidate(other)
        assert problem.program(candidate) == other
        older = Candidate(candidate.kernel, candidate.schedule[:-1])
        assert problem.program(older) == program
    for wrong in ((), candidate.schedule[:-2], (*candidate.schedule[:-1], 4)):
        assert problem.program(Candidate(candidate.kernel, wrong)) is None


def test_programs_that_do_the_same_at_an_m_are_one():
    one = task()
    problem, rule = one.problem(8), one.default(8)
    low = Program(MicroKernel(8, 3), Slice(0, 1, 0), Scheme(1, 2, 1), rule.prefetch)
    assert rule.tile == MicroKernel(9, 3)  # one tile of 8 rows, too
    assert problem.effective(low) == problem.effective(rule) == problem.effective(low)
    for other in (
        replace(low, tile=MicroKernel(4, 3)),
        replace(low, slice=Slice(0, 2, 0)),
        replace(low, scheme=Scheme(2, 1, 1)),
        replace(low, prefetch=0),
    ):
        assert problem.effective(other) != problem.effective(rule)
