"""Tile registers: interpreted, against float64; bit for bit as compiled, where a CPU has them."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.high.parse import parse_high
from dovetail.ir.low.nodes import Unit
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low
from tests.codegen.interp.values import InterpretError
from tests.codegen.interpret import interpret
from tests.codegen.lift.native import build
from tests.codegen.lower.native import NATIVE, run

TARGET = "x86-64-amx"
TILE_TEXT = """
@kernel
def k(s: ptr[f32], lds: i64, begun: i64, rows: i64, n: i64, a: ptr[bf16], a_stride: i64,
      b: ptr[bf16], panel_stride: i64):
    tiles_begin()
    tile_dots(s, lds, begun, rows, n, a, a_stride, b, panel_stride, b, 2)
    tiles_end()

@kernel
def unprepared(s: ptr[f32], a: ptr[bf16], b: ptr[bf16]):
    tile_dots(s, 32, 0, 16, 32, a, 0, b, 0, b, 0)
"""
RNG = np.random.default_rng(3)
SHAPES = [(1, 1, 0), (16, 32, 0), (17, 33, 1), (32, 70, 1), (5, 64, 1)]
"""Rows, values of K, whether sums are there already."""


def interpreted(kernel: str, *args: object) -> None:
    unit = parse_high(Source("test.dk", TILE_TEXT))
    interpret(lower(unit, kernel, {}, TARGETS[TARGET], name=kernel), kernel, args, TARGETS[TARGET])


def operands(rows: int, k: int, a: np.ndarray, b: np.ndarray, s: np.ndarray, begun: int) -> tuple:
    """A [32][k] in tiles, zero past k; panels of b [2][k][16], which end where K does, in pairs."""
    deep, pairs = -(-k // 32) * 32, -(-k // 2)
    left = np.zeros((32, deep), np.uint16)
    left[:rows, :k] = a[:rows, :k]
    tiles = left.reshape(2, 16, -1, 32).swapaxes(1, 2)
    panels = np.zeros((2, 2 * pairs, 16), np.uint16)
    panels[:, :k] = b[:, :k]
    panels = panels.reshape(2, pairs, 2, 16).swapaxes(2, 3)
    high = 16 if rows <= 16 else 32
    sums = s[:high].copy()  # what is past them would be a fault
    return (
        *(sums, 34, begun, rows, k, np.ascontiguousarray(tiles)[: high // 16].copy(), 16 * deep),
        *(np.ascontiguousarray(panels), 2 * pairs * 16),
    )


@pytest.mark.parametrize(("rows", "k", "begun"), SHAPES)
def test_blocks_of_products(rows: int, k: int, begun: int) -> None:
    a, b = (narrow_bf16(RNG.standard_normal(n, np.float32)) for n in ((32, 96), (2, 96, 16)))
    before = RNG.standard_normal((32, 34), np.float32)
    given = operands(rows, k, a, b, before, begun)
    interpreted("k", *given)
    columns = widen_bf16(b).astype(np.float64)[:, :k].swapaxes(0, 1).reshape(k, 32)
    wanted = widen_bf16(a).astype(np.float64)[:rows, :k] @ columns + begun * before[:rows, :32]
    np.testing.assert_allclose(given[0][:rows, :32], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(given[0][:, 32:], before[: len(given[0]), 32:])


@pytest.mark.parametrize(("rows", "k", "begun"), SHAPES)
def test_the_meaning_has_the_bits_of_the_instructions(rows: int, k: int, begun: int) -> None:
    """Of all bfloat16 there are, too: infinite, subnormal, no numbers."""
    if TARGET not in NATIVE:
        pytest.skip(f"this machine does not run {TARGET}, or refuses tile registers")
    for all_bits in (False, True):
        sides = [narrow_bf16(RNG.standard_normal(n, np.float32)) for n in ((32, 96), (2, 96, 16))]
        if all_bits:
            sides = [RNG.integers(0, 1 << 16, side.shape, np.uint16) for side in sides]
            few = RNG.random(sides[0].shape) < 0.97  # else each sum has one that is no number
            sides[0] = np.where(few, sides[0] & 0x3FFF, sides[0]).astype(np.uint16)
            sides[1] &= 0xBFFF
        before = RNG.standard_normal((32, 34), np.float32)
        before[:2] *= np.float32(1e-39)
        given, other = (operands(rows, k, *sides, before, begun) for _ in range(2))
        interpreted("k", *given)
        run(TILE_TEXT, "k", TARGET, *other)
        same = given[0].view(np.uint32) == other[0].view(np.uint32)
        assert (same | (np.isnan(given[0]) & np.isnan(other[0])))[:rows].all()


BYTES = """
void {signs}(int32_t* s, const uint8_t* a, const uint8_t* b) {{
  dt_tiles_begin();
  _tile_loadd(0, s, 64);
  _tile_loadd(4, a, 64);
  _tile_loadd(6, b, 64);
  _tile_dpb{signs}d(0, 4, 6);
  _tile_stored(0, s, 64);
  _tile_release();
}}
"""
SIGNS = ("ss", "su", "us", "uu")


def byte_products() -> Unit:
    """A C function for each instruction that multiplies tiles of bytes, called as its signs."""
    text = "".join(BYTES.format(signs=signs) for signs in SIGNS)
    begin = TARGETS[TARGET].prelude_functions(["dt_tiles_begin"])
    return Unit(items=(*begin, *parse_low(Source("bytes.c", text)).items))


@pytest.mark.parametrize("signs", SIGNS)
def test_products_of_tiles_of_bytes(signs: str) -> None:
    a, b = (RNG.integers(0, 256, 1024, np.uint8) for _ in range(2))
    a[:64] = 128
    b[::16] = 255
    before = RNG.integers(-(2**31), 2**31, (16, 16), np.int32)
    left, right = (
        v.view(np.uint8 if sign == "u" else np.int8).astype(np.int64)
        for v, sign in zip((a, b), signs, strict=True)
    )
    columns = right.reshape(16, 16, 4).swapaxes(1, 2).reshape(64, 16)
    wanted = (before + left.reshape(16, 64) @ columns).astype(np.int32)
    unit, sums = byte_products(), before.copy()
    interpret(unit, signs, (sums, a, b), TARGETS[TARGET])
    np.testing.assert_array_equal(sums, wanted)
    if TARGET in NATIVE:
        sums = before.copy()
        getattr(build(print_low(unit), TARGET), signs)(*(v.ctypes for v in (sums, a, b)))
        np.testing.assert_array_equal(sums, wanted)


def test_tiles_are_used_between_begin_and_end() -> None:
    a, b = np.zeros(512, np.uint16), np.zeros(512, np.uint16)
    with pytest.raises(InterpretError, match="before they are configured"):
        interpreted("unprepared", np.zeros((16, 32), np.float32), a, b)
