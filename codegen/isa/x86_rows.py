"""Rows that SSE, AVX and AVX-512 share but for the register width: one list, built for each width.

In: prefix and lane count. Out: `Intrinsic` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic
from dovetail.codegen.isa.memory import Pointer

CONTROLS = (0x00, 0x1B, 0x4E, 0xB1, 0xE4, 0xFF, 0x93)
ROUNDINGS = (0, 8, 9, 10, 11)
SHIFTS = (0, 1, 7, 16, 23, 31, 32)
PREFIXES = {4: "_mm", 8: "_mm256", 16: "_mm512"}
F32, I32, U32 = np.float32, np.int32, np.uint32


def splat(dtype: Any, lanes: int) -> Callable[[Any], m.Array]:
    """Return the meaning of a broadcast of one scalar."""
    return lambda x: np.full(lanes, x, dtype)


def gather(dtype: Any) -> Callable[..., m.Array]:
    """Return the meaning of `setr`: lanes from the first argument up."""
    return lambda *xs: np.array(xs, dtype)


def gather_reversed(dtype: Any) -> Callable[..., m.Array]:
    """Return the meaning of `set`: lanes from the last argument up."""
    return lambda *xs: np.array(xs[::-1], dtype)


def load(dtype: Any, lanes: int) -> Callable[[Pointer], m.Array]:
    """Return the meaning of a full load."""
    return lambda p: p.load(dtype, lanes)


def store(p: Pointer, v: m.Array) -> None:
    """Write every lane."""
    p.store(v)


def first(v: m.Array) -> Any:
    """Return lane 0."""
    return v[0]


def shift_left(v: m.Array, n: int) -> m.Array:
    """Shift 32-bit lanes left; 32 or more gives 0."""
    return np.zeros_like(v) if n > 31 else (v.view(U32) << U32(n)).view(I32)


def shift_right(v: m.Array, n: int) -> m.Array:
    """Shift 32-bit lanes right, filling with 0; 32 or more gives 0."""
    return np.zeros_like(v) if n > 31 else (v.view(U32) >> U32(n)).view(I32)


def shift_right_signed(v: m.Array, n: int) -> m.Array:
    """Shift 32-bit lanes right, filling with the sign."""
    return v >> I32(min(n, 31))


def float_rows(lanes: int) -> Iterator[Intrinsic]:
    """Yield arithmetic, moves and constants on `lanes` float32 lanes."""
    prefix = PREFIXES[lanes]
    vec = f"__m{32 * lanes}"
    i = partial(intrinsic, lanes=lanes)
    two, three = f"{vec}, {vec} -> {vec}", f"{vec}, {vec}, {vec} -> {vec}"
    for name, op in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        yield i(f"{prefix}_{name}_ps", two, op, op=f"v{name}({{0}}, {{1}})")
    yield i(f"{prefix}_div_ps", two, np.divide, op="vdiv({0}, {1})")
    yield i(f"{prefix}_min_ps", two, m.min_second, op="vmin({0}, {1})")
    yield i(f"{prefix}_max_ps", two, m.max_second, op="vmax({0}, {1})")
    yield i(f"{prefix}_sqrt_ps", f"{vec} -> {vec}", np.sqrt, op="vsqrt({0})")
    yield i(f"{prefix}_and_ps", two, m.bitwise(np.bitwise_and))
    yield i(f"{prefix}_or_ps", two, m.bitwise(np.bitwise_or))
    yield i(f"{prefix}_xor_ps", two, m.bitwise(np.bitwise_xor))
    yield i(f"{prefix}_andnot_ps", two, m.bitwise(m.and_not))
    yield i(f"{prefix}_fmadd_ps", three, m.fma, op="vfma({0}, {1}, {2})")
    yield i(
        f"{prefix}_fnmadd_ps", three, lambda a, b, c: m.fma(-a, b, c), op="vfnma({0}, {1}, {2})"
    )
    yield i(
        f"{prefix}_fmsub_ps",
        three,
        lambda a, b, c: m.fma(a, b, -c),
        op="vneg(vfnma({0}, {1}, {2}))",
    )
    zero = np.zeros(lanes, F32)
    yield i(f"{prefix}_setzero_ps", f"-> {vec}", zero.copy, op="vzero()")
    yield i(f"{prefix}_set1_ps", f"float -> {vec}", splat(F32, lanes), op="vbroadcast({0})")
    listed = f"{', '.join(['float'] * lanes)} -> {vec}"
    yield i(f"{prefix}_setr_ps", listed, gather(F32))
    yield i(f"{prefix}_set_ps", listed, gather_reversed(F32))
    for kind in ("loadu", "load"):
        yield i(f"{prefix}_{kind}_ps", f"const float* -> {vec}", load(F32, lanes), op="vload({0})")
    for kind in ("storeu", "store"):
        yield i(f"{prefix}_{kind}_ps", f"float*, {vec} -> void", store, op="vstore({0}, {1})")
    yield i(f"{prefix}_cvtss_f32", f"{vec} -> float", first)
    yield i(f"{prefix}_unpacklo_ps", two, lambda a, b: m.unpack(a, b, 0))
    yield i(f"{prefix}_unpackhi_ps", two, lambda a, b: m.unpack(a, b, 2))
    shuffled = f"{vec}, {vec}, imm -> {vec}"
    yield i(f"{prefix}_shuffle_ps", shuffled, m.shuffle, immediates=CONTROLS)
    yield i(f"{prefix}_permute_ps", f"{vec}, imm -> {vec}", m.permute, immediates=CONTROLS)
    yield i(f"{prefix}_movehdup_ps", f"{vec} -> {vec}", lambda v: v[1::2].repeat(2))
    yield i(f"{prefix}_moveldup_ps", f"{vec} -> {vec}", lambda v: v[0::2].repeat(2))


def integer_rows(lanes: int) -> Iterator[Intrinsic]:
    """Yield operations on `lanes` int32 lanes, and conversions to and from float32."""
    prefix, bits = PREFIXES[lanes], 32 * lanes
    vec, flt, si = f"__m{bits}i", f"__m{bits}", f"si{bits}"
    i = partial(intrinsic, lanes=lanes)
    two = f"{vec}, {vec} -> {vec}"
    yield i(f"{prefix}_add_epi32", two, np.add, op="vadd_i32({0}, {1})")
    yield i(f"{prefix}_sub_epi32", two, np.subtract, op="vsub_i32({0}, {1})")
    yield i(f"{prefix}_mullo_epi32", two, np.multiply, op="vmul_i32({0}, {1})")
    yield i(f"{prefix}_min_epi32", two, np.minimum)
    yield i(f"{prefix}_max_epi32", two, np.maximum)
    for name, op in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        yield i(f"{prefix}_{name}_{si}", two, m.bitwise(op), op=f"v{name}_i32({{0}}, {{1}})")
    yield i(f"{prefix}_andnot_{si}", two, m.bitwise(m.and_not))
    shifted = f"{vec}, imm -> {vec}"
    yield i(f"{prefix}_slli_epi32", shifted, shift_left, op="vshl_i32({0}, {1})", immediates=SHIFTS)
    yield i(
        f"{prefix}_srli_epi32", shifted, shift_right, op="vshr_i32({0}, {1})", immediates=SHIFTS
    )
    yield i(f"{prefix}_srai_epi32", shifted, shift_right_signed, immediates=SHIFTS)
    zero = np.zeros(lanes, I32)
    yield i(f"{prefix}_setzero_{si}", f"-> {vec}", zero.copy, op="vbroadcast_i32(0)")
    yield i(f"{prefix}_set1_epi32", f"int -> {vec}", splat(I32, lanes), op="vbroadcast_i32({0})")
    listed = f"{', '.join(['int'] * lanes)} -> {vec}"
    yield i(f"{prefix}_setr_epi32", listed, gather(I32))
    yield i(f"{prefix}_set_epi32", listed, gather_reversed(I32))
    pointer = "void" if lanes == 16 else vec
    for kind in ("loadu", "load"):
        yield i(
            f"{prefix}_{kind}_{si}",
            f"const {pointer}* -> {vec}",
            load(I32, lanes),
            op="vload_i32({0})",
        )
    for kind in ("storeu", "store"):
        yield i(
            f"{prefix}_{kind}_{si}",
            f"{pointer}*, {vec} -> void",
            store,
            op="vstore_i32({0}, {1})",
        )
    yield i(f"{prefix}_cvtps_epi32", f"{flt} -> {vec}", m.to_i32_x86, op="vcvt_i32({0})")
    yield i(f"{prefix}_cvttps_epi32", f"{flt} -> {vec}", lambda v: m.to_i32_x86(v, np.trunc))
    yield i(f"{prefix}_cvtepi32_ps", f"{vec} -> {flt}", lambda v: v.astype(F32), op="vcvt_f32({0})")
    bit_casts = ((f"castps_{si}", flt, vec, I32, "i32"), (f"cast{si}_ps", vec, flt, F32, "f32"))
    for name, source, result, dtype, kind in bit_casts:
        yield i(
            f"{prefix}_{name}",
            f"{source} -> {result}",
            m.reinterpret(dtype),
            op=f"vbitcast_{kind}({{0}})",
        )
    yield i(f"{prefix}_shuffle_epi32", f"{vec}, imm -> {vec}", m.permute, immediates=CONTROLS)


def widening_rows(lanes: int) -> Iterator[Intrinsic]:
    """Yield conversions of 8- and 16-bit integers and float16 to `lanes` 32-bit lanes, and back."""
    prefix, bits = PREFIXES[lanes], 32 * lanes
    vec, flt = f"__m{bits}i", f"__m{bits}"
    for name, dtype in (
        ("cvtepu16", "uint16"),
        ("cvtepi16", "int16"),
        ("cvtepu8", "uint8"),
        ("cvtepi8", "int8"),
    ):
        width = lanes * np.dtype(dtype).itemsize * 8
        source = f"__m{max(128, width)}i"
        yield intrinsic(f"{prefix}_{name}_epi32", f"{source} -> {vec}", widen(dtype, lanes))
    half = f"__m{max(128, bits // 2)}i"
    yield intrinsic(f"{prefix}_cvtph_ps", f"{half} -> {flt}", partial(half_to_float, lanes))
    yield intrinsic(f"{prefix}_cvtps_ph", f"{flt}, imm -> {half}", float_to_half, immediates=(0, 8))


def widen(dtype: str, lanes: int) -> Callable[[m.Array], m.Array]:
    """Return the meaning of a conversion of the first `lanes` small integers to int32."""
    return lambda v: v.view(dtype)[:lanes].astype(I32)


def half_to_float(lanes: int, v: m.Array) -> m.Array:
    """Widen the first `lanes` float16 of a vector."""
    return m.f32_of_f16(v.view(np.uint16)[:lanes])


def float_to_half(v: m.Array, _mode: int) -> m.Array:
    """Narrow to float16, to nearest even; the upper part of a 128-bit result is 0."""
    bits = m.f16_bits(v)
    padded = np.zeros(max(8, bits.size), np.uint16)
    padded[: bits.size] = bits
    return padded.view(I32)
