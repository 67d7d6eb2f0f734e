"""GEMM kernels against float64 at every tile edge: compiled, and interpreted for all targets."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.rules.schedules import (
    LINEAR,
    SILU,
    SPREAD_PREFETCH,
    built_tiles,
    dot_rows,
    kernel_name,
    make_schedule,
)
from dovetail.ir.formats import FORMATS
from dovetail.runtime.machine import abi
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.codegen.kernels.gemm_problem import (
    DTYPES,
    NATIVE,
    PLAIN,
    TEXTS,
    Problem,
    entry,
    kernel_names,
    listen,
    sizes,
    tile_of,
)
from tests.shares import share


@pytest.mark.parametrize(("target", "name"), share(kernel_names(LINEAR), 12), ids=str)
def test_linear_at_tile_edges(target: str, name: str) -> None:
    rows, _ = tile_of(name)
    dtype = name.split("_")[2]
    epilogues = itertools.cycle([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1)])
    for size, (bias, residual, in_place) in zip(sizes(name), epilogues, strict=False):
        problem = Problem(*size, dtype, LINEAR, bool(bias), bool(residual), bool(in_place))
        problem.check(target, name, m_tile=rows, block_n=1)


@pytest.mark.parametrize(("target", "name"), share(kernel_names(SILU), 8), ids=str)
def test_silu_at_tile_edges(target: str, name: str) -> None:
    rows, _ = tile_of(name)
    dtype = name.split("_")[2]
    for i, size in enumerate(sizes(name)):
        Problem(*size, dtype, SILU, bias=bool(i % 2)).check(target, name, m_tile=rows, block_n=1)


PAIRED = [
    (target, name)
    for kind in (LINEAR, SILU)
    for target, name in kernel_names(kind, list(FLOAT_TARGETS))
    if dot_rows(name.split("_")[2], TARGETS[target])
]


@pytest.mark.parametrize(
    ("target", "name"), share([p for p in PAIRED if p[0] in NATIVE], 4), ids=str
)
def test_rounded_rows_at_tile_edges(target: str, name: str) -> None:
    """Where bfloat16 pairs are multiplied at once: M from the first that is, odd and even K."""
    rows, panels = tile_of(name)
    kind = name.split("_")[1]
    for m, n, k in itertools.product((16, 17, 2 * rows + 17), (1, 16 * panels + 17), (1, 2, 33)):
        problem = Problem(m, n, k, "bf16", kind, bias=n == 1)
        problem.check(target, name, 2, m_tile=rows, block_n=k % 2, grid_n=2, block_k=8)


@pytest.mark.parametrize(
    ("target", "name"), share([p for p in PAIRED if tile_of(p[1])[1] > 2], 6), ids=str
)
def test_rounded_rows_are_right_in_the_text(target: str, name: str) -> None:
    rows, panels = tile_of(name)
    problem = Problem(17, 16 * panels + 1, 3, "bf16", name.split("_")[1])
    problem.assert_right(problem.interpret(target, name, m_tile=rows, block_n=1), target)


@pytest.mark.parametrize("kind", [LINEAR, SILU])
def test_tiles_are_right_in_the_text(kind: str) -> None:
    """One past a tile of rows, a panel and a slice of K, or with K in two parts."""
    target, linear = "x86-64-amx", kind == LINEAR
    name = kernel_names(kind, [target])[0][1]
    problem = Problem(17, 17, 33, "bf16", kind, bias=True, residual=linear)
    schedule = {"block_m": 16, "block_k": 32, "block_n": 1, "grid_k": 1 + linear, "order": 3}
    got = problem.interpret(target, name, m_tile=4, prefetch=-1, **schedule)
    problem.assert_right(got, target)


def test_rows_that_do_not_fit_are_rounded_in_parts() -> None:
    """K so large that the buffer of rounded rows holds 3 of them, or some of a block in tiles."""
    for target in NATIVE:
        if dot_rows("bf16", TARGETS[target]):
            name = kernel_names(LINEAR, [target])[0][1]
            for m, k in ((17, 70_001), (100, 9_001)):
                Problem(m, 18, k, "bf16").check(target, name, m_tile=8, block_n=1)


@pytest.mark.parametrize("kind", [LINEAR, SILU])
def test_rows_of_which_none_fits_stay_as_they_are_in_lower_tiles(kind: str) -> None:
    """There are none so high of rows that are not rounded."""
    for target in NATIVE:
        if dot_rows("bf16", TARGETS[target]) and not TARGETS[target].tiles:
            name = max(kernel_names(kind, [target]), key=lambda pair: tile_of(pair[1])[0])[1]
            problem = Problem(17, 18, 262_144, "bf16", kind)
            problem.a /= 256
            wanted, bound = problem.wanted(dot=False)
            got = problem.run(target, name, m_tile=14, block_n=1)
            assert (np.abs(got - wanted) <= bound).all()


def test_panels_may_lie_further_apart_than_k() -> None:
    """A K-view of a packed weight: the first 8 of 20 values of each row."""
    problem = Problem(3, 40, 20, "f32")
    target = PLAIN[0]
    name = kernel_names(LINEAR, [target])[0][1]
    packed, c = problem.packed(), np.empty((3, 40), np.float32)
    values = [3, 40, 8, problem.a.ctypes.data, 23, packed.ctypes.data, 320, 0, 0, 0]
    values += [c.ctypes.data, 40, 0, 0]
    slots = (abi.Slot * len(values))(*(abi.Slot(i=v) for v in values))
    row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*make_schedule(m_tile=4, block_n=1))
    entry(target, name)(slots, row, ctypes.c_int64(0), ctypes.c_int64(1))
    wanted = problem.a[:, :8].astype(np.float64) @ problem.weights[0][:, :8].T
    np.testing.assert_allclose(c, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("k", "schedule"), [(128, {}), (127, {}), (127, {"block_k": 64, "order": 1})], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_weights_fetch_the_first_of_what_follows(
    monkeypatch: pytest.MonkeyPatch, dtype: str, k: int, schedule: dict[str, int]
) -> None:
    name, panels, ahead = "x86-64-avx512", 2, 1024
    target, asked = TARGETS[name], listen(monkeypatch, name)[1]
    tile = built_tiles(LINEAR, target)[panels]
    kernel = kernel_name(LINEAR, dtype, tile)
    problem = Problem(1, 2 * panels * 16, k, dtype)
    got = problem.interpret(name, kernel, m_tile=1, block_n=1, prefetch=ahead, **schedule)
    problem.assert_right(got, name)
    lines, first = FORMATS[dtype].panel_bytes(k) // 64, ahead // 64
    alone = dtype == "bf16" and k % 2  # the last weight of no pair fetches nothing
    wanted = [  # of each panel its later lines, then the first ones of that in the next group
        panel * lines + line
        for panel in range(2 * panels)
        for line in (*range(first, lines), *range(panels * lines, panels * lines + first - alone))
    ]
    assert sorted(asked) == sorted(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_wait_in_the_second_cache_and_come_into_the_first_as_far_ahead_as_told(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Two groups: of each all lines from 256 bytes on, while the second one is asked for."""
    name, panels, k, near = "x86-64-avx512", 2, 64, 256
    asked = listen(monkeypatch, name)
    kernel = kernel_name(LINEAR, dtype, built_tiles(LINEAR, TARGETS[name])[panels])
    problem = Problem(1, 2 * panels * 16, k, dtype)
    schedule = {"m_tile": 1, "block_n": 1}
    got = problem.interpret(name, kernel, prefetch=-near, **schedule)
    problem.assert_right(got, name)
    lines = FORMATS[dtype].panel_bytes(k) // 64
    soon = [p * lines + n + near // 64 for p in range(2 * panels) for n in range(lines)]
    assert sorted(asked[1]) == sorted(soon)
    assert sorted(asked[2]) == [panels * lines + n for n in range(2 * panels * lines)]
    asked[1].clear()
    asked[2].clear()
    problem.interpret(name, kernel, prefetch=SPREAD_PREFETCH, **schedule)
    assert asked[1] and not asked[2]


EVERYWHERE = [*kernel_names(LINEAR, TEXTS), *kernel_names(SILU, TEXTS)]


@pytest.mark.parametrize(("target", "name"), share(EVERYWHERE, 12), ids=str)
def test_lowered_text_is_right_on_every_target(target: str, name: str) -> None:
    rows, panels = tile_of(name)
    kind, dtype = name.split("_")[1:3]
    for m, n, k, threads in ((rows, 16 * panels, 3, 1), (rows + 1, 16 * panels + 17, 1, 2)):
        problem = Problem(m, n, k, dtype, kind, bias=k == 1, residual=k == 1, in_place=k == 1)
        ahead = 64 if threads == 1 else SPREAD_PREFETCH
        got = problem.interpret(
            target, name, threads, m_tile=rows, block_n=1, grid_n=threads, prefetch=ahead
        )
        problem.assert_right(got, target)
