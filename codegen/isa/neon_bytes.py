"""NEON instructions that multiply bytes: of ARMv8.0, of DotProd and of I8MM.

In: nothing. Out: `Intrinsic` rows with their numpy meanings; those that DotProd and I8MM add stand
apart, as the targets that have them do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic


def byte_rows() -> Iterator[Intrinsic]:
    """Yield widening products and sums of neighbours (ARMv8.0)."""
    for kind, wide in (("s8", "int16"), ("u8", "uint16"), ("s16", "int32"), ("u16", "uint32")):
        bits = int(kind[1:])
        lanes, c = 64 // bits, f"{'u' if kind[0] == 'u' else ''}int{bits}x{64 // bits}_t"
        whole = f"{wide}x{lanes}_t"
        product = partial(_product, wide)
        yield intrinsic(f"vmull_{kind}", f"{c}, {c} -> {whole}", product)
        yield intrinsic(
            f"vmlal_{kind}",
            f"{whole}, {c}, {c} -> {whole}",
            lambda acc, a, b, product=product: acc + product(a, b),
        )
        full = c.replace(f"x{lanes}", f"x{2 * lanes}")
        yield intrinsic(f"vpaddq_{kind}", f"{full}, {full} -> {full}", _add_neighbours)
        paired = f"{wide}x{lanes}_t"
        yield intrinsic(f"vpaddlq_{kind}", f"{full} -> {paired}", partial(_widened_sums, wide))
        yield intrinsic(
            f"vpadalq_{kind}",
            f"{paired}, {full} -> {paired}",
            lambda acc, v, wide=wide: acc + _widened_sums(wide, v),
        )
    yield intrinsic("vpaddq_s32", "int32x4_t, int32x4_t -> int32x4_t", _add_neighbours)
    yield intrinsic(
        "vaddvq_s32", "int32x4_t -> int32_t", lambda v: v.astype(np.int64).sum().astype(np.int32)
    )
    for q, lanes in (("", 8), ("q", 16)):
        yield intrinsic(f"vabs{q}_s8", f"int8x{lanes}_t -> int8x{lanes}_t", np.abs)


def _product(wide: str, a: m.Array, b: m.Array) -> m.Array:
    out: m.Array = a.astype(wide) * b.astype(wide)
    return out


def _add_neighbours(a: m.Array, b: m.Array) -> m.Array:
    joined = np.concatenate([a, b])
    out: m.Array = joined[0::2] + joined[1::2]
    return out


def _widened_sums(wide: str, v: m.Array) -> m.Array:
    out: m.Array = v[0::2].astype(wide) + v[1::2].astype(wide)
    return out


def _dot_lane(acc: m.Array, a: m.Array, b: m.Array, lane: int) -> m.Array:
    return m.dot_quads(acc, a, np.tile(b.reshape(-1, 4)[lane], acc.size))


def multiply_tiles(acc: m.Array, a: m.Array, b: m.Array) -> m.Array:
    """Return acc + a b^T: acc 2 x 2, a and b two rows of eight bytes, wrapping."""
    left, right = (v.astype(np.int64).reshape(2, 8) for v in (a, b))
    total: m.Array = (acc + (left @ right.T).reshape(-1)).astype(acc.dtype)
    return total


def _vector(kind: str, bits: int) -> str:
    width = int(kind[1:])
    return f"{'u' if kind[0] == 'u' else ''}int{width}x{bits // width}_t"


def _dots(name: str, acc: str, left: str, right: str, form: str = "") -> Iterator[Intrinsic]:
    """Yield a dot product of quads at 64 and 128 bits."""
    for q, bits in (("", 64), ("q", 128)):
        total, a, b = _vector(acc, bits), _vector(left, bits), _vector(right, bits)
        op, lanes = (form, 4) if bits == 128 else ("", 0)
        yield intrinsic(
            f"v{name}{q}_{acc}", f"{total}, {a}, {b} -> {total}", m.dot_quads, op=op, lanes=lanes
        )


def _lane_dots(name: str, acc: str, left: str, right: str) -> Iterator[Intrinsic]:
    """Yield dot products of quads with one quad of the second operand."""
    for q, bits in (("", 64), ("q", 128)):
        for suffix, width in (("lane", 64), ("laneq", 128)):
            total, a, b = _vector(acc, bits), _vector(left, bits), _vector(right, width)
            yield intrinsic(
                f"v{name}{q}_{suffix}_{acc}",
                f"{total}, {a}, {b}, imm -> {total}",
                _dot_lane,
                immediates=range(width // 32),
            )


def dotprod_rows() -> Iterator[Intrinsic]:
    """Yield what DotProd adds: quads of bytes of one sign."""
    yield from _dots("dot", "s32", "s8", "s8", m.dot_form("{0}", "{1}", "{2}", "sub"))
    yield from _dots("dot", "u32", "u8", "u8")
    for sign in "su":
        yield from _lane_dots("dot", f"{sign}32", f"{sign}8", f"{sign}8")


def i8mm_rows() -> Iterator[Intrinsic]:
    """Yield what I8MM adds: quads of unsigned and signed bytes, products of 2 x 8 and 8 x 2."""
    yield from _dots("usdot", "s32", "u8", "s8", m.dot_form("{0}", "{1}", "{2}", "add"))
    yield from _lane_dots("usdot", "s32", "u8", "s8")
    yield from _lane_dots("sudot", "s32", "s8", "u8")
    for name, acc, left, right in (
        ("mmla", "s32", "s8", "s8"),
        ("mmla", "u32", "u8", "u8"),
        ("usmmla", "s32", "u8", "s8"),
    ):
        total = _vector(acc, 128)
        yield intrinsic(
            f"v{name}q_{acc}",
            f"{total}, {_vector(left, 128)}, {_vector(right, 128)} -> {total}",
            multiply_tiles,
        )
