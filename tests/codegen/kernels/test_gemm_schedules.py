"""Schedules of GEMM kernels: each gives the product; bits depend on the parts of K alone.

And on its slices where K is not innermost.
"""

from __future__ import annotations

import ctypes
import itertools
from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.rules.schedules import (
    LINEAR,
    SILU,
    SUMS,
    built_tiles,
    kernel_name,
    make_schedule,
)
from dovetail.ir.schedule import ORDERS
from dovetail.runtime.machine import abi
from tests.codegen.kernels.gemm_problem import (
    NATIVE,
    OWN,
    PLAIN,
    TEXTS,
    Problem,
    entry,
    kernel_names,
    slot,
)
from tests.shares import share

SCHEDULES = [
    {"m_tile": 3, "block_n": 1, "prefetch": 256},
    {"m_tile": 3, "block_n": 0, "prefetch": -1},
    {"m_tile": 1, "block_m": 4, "block_n": 1, "prefetch": -1},
    {"m_tile": 99, "grid_n": 2, "block_n": 1},
    {"m_tile": 2, "grid_n": 3, "block_m": 2},
    {"m_tile": 2, "grid_m": 3, "block_n": 1},
    {"m_tile": 2, "grid_m": 2, "grid_n": 2, "block_k": 7},
    {"m_tile": 0, "block_k": 1, "block_n": 1},
    {"m_tile": 3, "block_n": 2, "block_k": 16, "block_m": 5},
    {"m_tile": 3, "grid_k": 2, "block_n": 1},
    {"m_tile": 4, "grid_k": 3, "grid_n": 2, "block_k": 8},
    {},
]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("target", PLAIN)
def test_every_schedule_gives_the_product(
    target: str, schedule: dict[str, int], threads: int
) -> None:
    for kind in (LINEAR, SILU):
        tile = built_tiles(kind, TARGETS[target])[2 if kind == SILU else 1]
        name = f"gemm_{kind}_f32_{tile.rows}x{tile.panels}"
        problem = Problem(11, 16 * 7 + 3, 20, "f32", kind, bias=True, residual=kind == LINEAR)
        problem.check(target, name, threads, **schedule)


def first_of(target: str, dtype: str, kind: str = LINEAR) -> str:
    """Return the first kernel of a target and dtype, which the bits of others are those of."""
    return next(name for _, name in kernel_names(kind, [target]) if f"_{dtype}_" in name)


@pytest.mark.parametrize(("target", "name"), share(kernel_names(LINEAR), 3), ids=str)
def test_bits_do_not_depend_on_tile_rows_or_threads(target: str, name: str) -> None:
    dtype = name.split("_")[2]
    whole = Problem(23, 16 * 9 + 5, 301, dtype, bias=True, residual=True)
    reference = whole.run(target, first_of(target, dtype), m_tile=2, block_n=1)
    for threads in (1, 3):
        got = whole.run(target, name, threads, m_tile=14, grid_n=threads, block_n=threads == 1)
        assert (got.view(np.uint32) == reference.view(np.uint32)).all()


@pytest.mark.parametrize(("target", "name"), share(kernel_names(LINEAR), 3), ids=str)
def test_split_k_adds_its_parts_in_one_order(target: str, name: str) -> None:
    """Whatever M, tile, grid and threads: for one grid_k the bits are the same."""
    dtype = name.split("_")[2]
    whole = Problem(9, 16 * 5 + 7, 133, dtype, bias=True, residual=True, in_place=True)
    first = first_of(target, dtype)
    reference = whole.run(target, first, m_tile=2, grid_k=3)
    whole.assert_right(reference, target)
    assert (reference != whole.run(target, first, m_tile=2)).any()  # K was really split
    for threads in (1, 4):
        got = whole.run(target, name, threads, m_tile=5, grid_k=3, grid_n=2, grid_m=2, block_n=1)
        assert (got.view(np.uint32) == reference.view(np.uint32)).all()


@pytest.mark.parametrize("slices", [(9, 2, 64), (5, 1, 7), (0, 3, 16), (8, 0, 32)], ids=str)
@pytest.mark.parametrize("kind", [LINEAR, SILU])
@pytest.mark.parametrize(("target", "dtype"), OWN, ids=str)
def test_bits_do_not_depend_on_the_order_of_slices(
    target: str, dtype: str, kind: str, slices: tuple[int, int, int]
) -> None:
    """Rounded rows (from 16 on) and plain ones, edges in M, N and K, and in place."""
    name = first_of(target, dtype, kind)
    block_m, block_n, block_k = slices
    schedule = {"m_tile": 4, "block_m": block_m, "block_n": block_n, "block_k": block_k}
    for m, in_place in ((37, kind == LINEAR), (11, False)):
        problem = Problem(m, 16 * 9 + 5, 301, dtype, kind, bias=True, residual=kind == LINEAR)
        problem = replace(problem, in_place=in_place)
        for grid in ({"grid_n": 2}, {"grid_k": 2} if kind == LINEAR else {"grid_m": 2}):
            first = problem.run(target, name, 2, **schedule, **grid)
            problem.assert_right(first, target)
            chain = problem.run(target, name, 2, **(schedule | {"block_k": 0}), **grid)
            for order, nest in enumerate(ORDERS):
                got = problem.run(target, name, 2, **schedule, **grid, order=order)
                same = chain if nest[-1] == "k" else first
                assert (got.view(np.uint32) == same.view(np.uint32)).all()


def test_k_innermost_stays_whole_without_room_for_sums() -> None:
    """A slice of C with room, and one with a row too many: the interpreter checks every access."""
    target, sums = "generic", 128
    name = kernel_name(LINEAR, "f32", built_tiles(LINEAR, TARGETS[target])[1])
    for m in (sums // 16, sums // 16 + 1):
        problem = Problem(m, 16, 5, "f32", bias=True, residual=True)
        schedule = {"m_tile": 2, "block_n": 1, "order": ORDERS.index("mnk")}
        whole, got = (
            problem.interpret(target, name, sums=sums, **schedule, block_k=block)
            for block in (0, 2)
        )
        assert (got.view(np.uint32) == whole.view(np.uint32)).all()


@pytest.mark.parametrize("target", PLAIN)
def test_bits_of_a_row_do_not_depend_on_how_many_there_are(target: str) -> None:
    """With K innermost and room for the sums of all rows, or not."""
    tile = built_tiles(LINEAR, TARGETS[target])[1]
    most = Problem(2 * SUMS // 16, 16, 20, "f32", bias=True, residual=True)
    schedule = {"m_tile": 2, "block_n": 1, "block_k": 8, "order": ORDERS.index("mnk")}
    runs = []
    for m in (3, SUMS // 16, most.m):
        some = copy(most)
        some.m = m
        runs.append(some.run(target, kernel_name(LINEAR, "f32", tile), **schedule))
    for fewer, more in itertools.pairwise(runs):
        assert (fewer.view(np.uint32) == more[: len(fewer)].view(np.uint32)).all()


@pytest.mark.parametrize("kind", [LINEAR, SILU])
@pytest.mark.parametrize("target", [t for t in NATIVE if TARGETS[t].rounds_rows])
def test_bits_of_rounded_rows_depend_on_nothing(target: str, kind: str) -> None:
    """With m_tile below 0 neither on M, where rows are padded, nor on blocks, slices, threads."""
    whole = Problem(130, 16 * 5 + 3, 301, "bf16", kind, bias=True, residual=kind == LINEAR)
    names = [name for _, name in kernel_names(kind, [target])]
    reference = whole.run(target, names[0], m_tile=-4, block_n=1)
    whole.assert_right(reference, target)
    for m, name, block, threads in (
        (1, names[0], 0, 1),
        (15, names[-1], 1, 2),
        (130, names[1], 2, 3),
    ):
        some = copy(whole)
        some.m = m
        schedule = {"block_m": 48 * block, "block_n": block, "block_k": 64 * block, "order": 1}
        got = some.run(
            target, name, threads, m_tile=-9, grid_n=threads, prefetch=-512 * block, **schedule
        )
        assert (got.view(np.uint32) == reference[:m].view(np.uint32)).all()


@pytest.mark.parametrize("kind", [LINEAR, SILU])
@pytest.mark.parametrize("target", TEXTS)
def test_orders_are_right_on_every_target(target: str, kind: str) -> None:
    name = kernel_names(kind, [target])[0][1]
    problem = Problem(5, 33, 20, name.split("_")[2], kind)
    schedule = {"m_tile": 2, "block_m": 2, "block_n": 1, "block_k": 8}
    for order in range(1, len(ORDERS)):
        problem.assert_right(problem.interpret(target, name, **schedule, order=order), target)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [LINEAR, SILU])
@pytest.mark.parametrize("target", PLAIN)
def test_slices_come_in_the_order_asked_for(target: str, kind: str, order: str) -> None:
    """C's rows lie a slice of columns apart, R one to the left: so memory tells the order."""
    tile = next(iter(built_tiles(kind, TARGETS[target]).values()))
    width = tile.panels * (16 if kind == LINEAR else 8)
    problem = Problem(3, 3 * width, 6, "f32", kind)
    memory = np.zeros(6 * width, np.float32)
    c, weight = memory[width:], problem.packed()
    values = [3, 3 * width, 6, problem.a, problem.a.shape[1], weight, 6 * 16, None]
    values += [memory, width, c, width, None, 0] if kind == LINEAR else [c, width]
    slots = (abi.Slot * len(values))(*(slot(value) for value in values))
    schedule = {"m_tile": 1, "block_m": 1, "block_n": 1, "block_k": 2}
    row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(
        *make_schedule(**schedule, order=ORDERS.index(order))
    )
    run = entry(target, kernel_name(kind, "f32", tile))
    run(slots, row, ctypes.c_int64(0), ctypes.c_int64(1))
    outcomes = {other: in_order(problem, width, other) for other in ORDERS}
    assert len({v.tobytes() for v in outcomes.values()}) == (4 if kind == LINEAR else 2)
    np.testing.assert_allclose(memory, outcomes[order], atol=1e-4)


def in_order(problem: Problem, width: int, order: str) -> np.ndarray:
    """Return the memory above as three slices of each side leave it."""
    memory = np.zeros(6 * width)
    whole, _ = problem.wanted(dot=False)
    for at in itertools.product(range(3), repeat=3):
        m, n, k = (at[order.index(side)] for side in "mnk")
        columns, left = slice(n * width, (n + 1) * width), (m + n) * width
        if problem.kind == SILU:
            memory[left + width :][:width] = whole[m, columns]
            continue
        if order[-1] == "k":  # C is written once
            product = problem.weights[0][columns] @ problem.a[m, :6]
            if k == 2:
                memory[left + width :][:width] = memory[left:][:width] + product
            continue
        depth = slice(2 * k, 2 * k + 2)
        base = memory[left + (width if k else 0) :][:width]
        product = problem.weights[0][columns, depth] @ problem.a[m, depth]
        memory[left + width :][:width] = base + product
    return memory


@pytest.mark.parametrize("target", PLAIN)
def test_k_is_not_split_without_room_for_its_parts(target: str) -> None:
    """And nothing is written past the room there is."""
    name = kernel_names(LINEAR, [target])[0][1]
    for room in (0, 3 * 48 - 1, 3 * 48):
        problem = Problem(3, 40, 64, "f32", bias=True, partial_size=room)
        got = problem.run(target, name, 2, m_tile=2, grid_k=2)
        problem.assert_right(got, target)
        whole = problem.run(target, name, m_tile=2)
        assert (got == whole).all() == (room < 3 * 48)


@pytest.mark.parametrize("target", TEXTS)
def test_split_k_is_right_on_every_target(target: str) -> None:
    name = kernel_names(LINEAR, [target])[0][1]
    problem = Problem(2, 21, 37, name.split("_")[2], bias=True, residual=True)
    got = problem.interpret(target, name, 2, m_tile=2, grid_k=2, grid_n=2, block_n=1)
    problem.assert_right(got, target)
