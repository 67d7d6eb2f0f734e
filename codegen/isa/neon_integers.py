"""Signatures of NEON's byte and word instructions: of ARMv8.0, and what DotProd and I8MM add.

In: nothing. Out: `Intrinsic` rows without meaning: the lifter follows none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dovetail.codegen.isa.intrinsics import Intrinsic, dot_form, intrinsic, signatures

KINDS = {
    "f32": ("float32", "float"),
    "s32": ("int32", "int32_t"),
    "u32": ("uint32", "uint32_t"),
    "u16": ("uint16", "uint16_t"),
    "s16": ("int16", "int16_t"),
    "u8": ("uint8", "uint8_t"),
    "s8": ("int8", "int8_t"),
    "u64": ("uint64", "uint64_t"),
    "s64": ("int64", "int64_t"),
}
"""NEON suffix: numpy dtype, C element type."""
WIDER = {"s8": "s16", "u8": "u16", "s16": "s32", "u16": "u32"}
LARGEST = 32
"""Bits of the largest lanes that saturate."""
WIDTHS = (("", 64), ("q", 128))


def vector_name(kind: str, bits: int) -> str:
    """Return the C vector type of a suffix at 64 or 128 bits, e.g. `uint16x4_t`."""
    dtype = KINDS[kind][0]
    return f"{dtype}x{bits // (8 * np.dtype(dtype).itemsize)}_t"


def integer_rows() -> Iterator[Intrinsic]:
    """Yield widening products, saturation, joins and windows of ARMv8.0."""
    for kind in KINDS:
        if kind != "f32":
            for q, bits in WIDTHS:
                yield from _rows_of(kind, q, bits)
    for kind, wide in WIDER.items():
        half, whole, long = (
            vector_name(kind, 64),
            vector_name(kind, 128),
            vector_name(wide, 128),
        )
        yield from signatures(
            {
                f"vmull_{kind}": f"{half}, {half} -> {long}",
                f"vmlal_{kind}": f"{long}, {half}, {half} -> {long}",
                f"vpaddq_{kind}": f"{whole}, {whole} -> {whole}",
                f"vpaddlq_{kind}": f"{whole} -> {long}",
                f"vpadalq_{kind}": f"{long}, {whole} -> {long}",
                f"vqmovn_{wide}": f"{long} -> {half}",
                f"vqmovn_high_{wide}": f"{half}, {long} -> {whole}",
            }
        )
    for kind, wide in (("u8", "s16"), ("u16", "s32")):
        half, long = vector_name(kind, 64), vector_name(wide, 128)
        yield intrinsic(f"vqmovun_{wide}", f"{long} -> {half}")
        yield intrinsic(f"vqmovun_high_{wide}", f"{half}, {long} -> {vector_name(kind, 128)}")
    vec = "int32x4_t"
    yield from signatures(
        {
            "vpaddq_s32": f"{vec}, {vec} -> {vec}",
            "vaddvq_s32": f"{vec} -> int32_t",
            "vqtbl1q_u8": "uint8x16_t, uint8x16_t -> uint8x16_t",
            "vabs_s8": "int8x8_t -> int8x8_t",
            "vabsq_s8": "int8x16_t -> int8x16_t",
            "vmulq_lane_s32": f"{vec}, int32x2_t, imm -> {vec}",
            "vmulq_laneq_s32": f"{vec}, {vec}, imm -> {vec}",
        }
    )
    op = "vmul_i32({0}, vbroadcast_i32({1}))"
    yield intrinsic("vmulq_n_s32", f"{vec}, int32_t -> {vec}", op=op, lanes=4)
    op = "vadd_i32({0}, vmul_i32({1}, {2}))"
    yield intrinsic("vmlaq_s32", f"{vec}, {vec}, {vec} -> {vec}", op=op, lanes=4)


def _rows_of(kind: str, q: str, bits: int) -> Iterator[Intrinsic]:
    """Yield what integer vectors of (almost) every type have."""
    vec, width = vector_name(kind, bits), int(kind[1:])
    names = ["qadd", "qsub"] if width <= LARGEST else []
    if bits > width:
        names += [f"{name}{part}" for name in ("zip", "trn", "uzp") for part in (1, 2)]
    joined = " ".join(f"v{name}{q}_{kind}" for name in names)
    return signatures(
        {joined: f"{vec}, {vec} -> {vec}", f"vext{q}_{kind}": f"{vec}, {vec}, imm -> {vec}"}
    )


def _dots(name: str, acc: str, left: str, right: str, form: str = "") -> Iterator[Intrinsic]:
    """Yield a dot product of quads at 64 and 128 bits."""
    for q, bits in WIDTHS:
        total, a, b = (vector_name(kind, bits) for kind in (acc, left, right))
        op, lanes = (form, 4) if bits == 128 else ("", 0)
        yield intrinsic(f"v{name}{q}_{acc}", f"{total}, {a}, {b} -> {total}", op=op, lanes=lanes)


def _lane_dots(name: str, acc: str, left: str, right: str) -> Iterator[Intrinsic]:
    """Yield dot products of quads with one quad of the second operand."""
    for q, bits in WIDTHS:
        for suffix, width in (("lane", 64), ("laneq", 128)):
            total, a = vector_name(acc, bits), vector_name(left, bits)
            operands = f"{total}, {a}, {vector_name(right, width)}, imm"
            yield intrinsic(f"v{name}{q}_{suffix}_{acc}", f"{operands} -> {total}")


def dotprod_rows() -> Iterator[Intrinsic]:
    """Yield what DotProd adds: quads of bytes of one sign."""
    yield from _dots("dot", "s32", "s8", "s8", dot_form("{0}", "{1}", "{2}", "sub"))
    yield from _dots("dot", "u32", "u8", "u8")
    for sign in "su":
        yield from _lane_dots("dot", f"{sign}32", f"{sign}8", f"{sign}8")


def i8mm_rows() -> Iterator[Intrinsic]:
    """Yield what I8MM adds: quads of unsigned and signed bytes, products of 2 x 8 and 8 x 2."""
    yield from _dots("usdot", "s32", "u8", "s8", dot_form("{0}", "{1}", "{2}", "add"))
    yield from _lane_dots("usdot", "s32", "u8", "s8")
    yield from _lane_dots("sudot", "s32", "s8", "u8")
    for name, acc, left, right in (
        ("mmla", "s32", "s8", "s8"),
        ("mmla", "u32", "u8", "u8"),
        ("usmmla", "s32", "u8", "s8"),
    ):
        total, a, b = (vector_name(kind, 128) for kind in (acc, left, right))
        yield intrinsic(f"v{name}q_{acc}", f"{total}, {a}, {b} -> {total}")
