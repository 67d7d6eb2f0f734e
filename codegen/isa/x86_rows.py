"""Rows that SSE, AVX and AVX-512 share but for the register width: one list, built for each width.

In: lane count. Out: `Intrinsic` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic, signatures

PREFIXES = {4: "_mm", 8: "_mm256", 16: "_mm512"}
F32, I32, U32 = np.float32, np.int32, np.uint32
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def splat(lanes: int) -> Callable[[Any], m.Array]:
    """Return the meaning of a broadcast of one integer."""
    return lambda x: np.full(lanes, x, I32)


def store(p: Any, v: m.Array) -> None:
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
    one, two, three = (f"{', '.join([vec] * count)} -> {vec}" for count in (1, 2, 3))
    for name in ("add", "sub", "mul", "div", "min", "max"):
        yield i(f"{prefix}_{name}_ps", two, op=f"v{name}({{0}}, {{1}})")
    yield i(f"{prefix}_sqrt_ps", one, op="vsqrt({0})")
    yield i(f"{prefix}_fmadd_ps", three, op="vfma({0}, {1}, {2})")
    yield i(f"{prefix}_fnmadd_ps", three, op="vfnma({0}, {1}, {2})")
    yield i(f"{prefix}_fmsub_ps", three, op="vneg(vfnma({0}, {1}, {2}))")
    yield i(f"{prefix}_setzero_ps", f"-> {vec}", op="vzero()")
    yield i(f"{prefix}_set1_ps", f"float -> {vec}", op="vbroadcast({0})")
    listed = f"{', '.join(['float'] * lanes)} -> {vec}"
    unfollowed = {"and_ps or_ps xor_ps andnot_ps": two, "setr_ps set_ps": listed}
    yield from signatures(unfollowed, f"{prefix}_", lanes)
    for kind in ("loadu", "load"):
        yield i(f"{prefix}_{kind}_ps", f"const float* -> {vec}", op="vload({0})")
    for kind in ("storeu", "store"):
        yield i(f"{prefix}_{kind}_ps", f"float*, {vec} -> void", op="vstore({0}, {1})")
    yield i(f"{prefix}_cvtss_f32", f"{vec} -> float", first)
    yield i(f"{prefix}_unpacklo_ps", two, lambda a, b: m.unpack(a, b, 0))
    yield i(f"{prefix}_unpackhi_ps", two, lambda a, b: m.unpack(a, b, 2))
    yield i(f"{prefix}_shuffle_ps", f"{vec}, {vec}, imm -> {vec}", m.shuffle)
    yield i(f"{prefix}_permute_ps", f"{vec}, imm -> {vec}", m.permute)
    yield i(f"{prefix}_movehdup_ps", one, lambda v: v[1::2].repeat(2))
    yield i(f"{prefix}_moveldup_ps", one, lambda v: v[0::2].repeat(2))


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
    for name, act in LOGIC.items():
        yield i(f"{prefix}_{name}_{si}", two, act, op=f"v{name}_i32({{0}}, {{1}})")
    yield i(f"{prefix}_andnot_{si}", two, lambda a, b: ~a & b)
    shifted = f"{vec}, imm -> {vec}"
    yield i(f"{prefix}_slli_epi32", shifted, shift_left, op="vshl_i32({0}, {1})")
    yield i(f"{prefix}_srli_epi32", shifted, shift_right, op="vshr_i32({0}, {1})")
    yield i(f"{prefix}_srai_epi32", shifted, shift_right_signed)
    zero = np.zeros(lanes, I32)
    yield i(f"{prefix}_setzero_{si}", f"-> {vec}", zero.copy, op="vbroadcast_i32(0)")
    yield i(f"{prefix}_set1_epi32", f"int -> {vec}", splat(lanes), op="vbroadcast_i32({0})")
    listed = f"{', '.join(['int'] * lanes)} -> {vec}"
    yield i(f"{prefix}_setr_epi32", listed, lambda *xs: np.array(xs, I32))
    yield i(f"{prefix}_set_epi32", listed, lambda *xs: np.array(xs[::-1], I32))
    pointer = "void" if lanes == 16 else vec
    read, write = f"const {pointer}* -> {vec}", f"{pointer}*, {vec} -> void"
    for kind in ("loadu", "load"):
        load = f"{prefix}_{kind}_{si}"
        yield i(load, read, lambda p: p.load(I32, lanes), op="vload_i32({0})")
    for kind in ("storeu", "store"):
        yield i(f"{prefix}_{kind}_{si}", write, store, op="vstore_i32({0}, {1})")
    yield i(f"{prefix}_cvtps_epi32", f"{flt} -> {vec}", op="vcvt_i32({0})")
    yield i(f"{prefix}_cvttps_epi32", f"{flt} -> {vec}")
    floats = f"{vec} -> {flt}"
    yield i(f"{prefix}_cvtepi32_ps", floats, lambda v: v.astype(F32), op="vcvt_f32({0})")
    yield i(f"{prefix}_castps_{si}", f"{flt} -> {vec}", op="vbitcast_i32({0})")
    yield i(f"{prefix}_cast{si}_ps", floats, m.reinterpret(F32), op="vbitcast_f32({0})")
    yield i(f"{prefix}_shuffle_epi32", f"{vec}, imm -> {vec}", m.permute)


def widening_rows(lanes: int) -> Iterator[Intrinsic]:
    """Yield conversions of 8- and 16-bit integers and float16 to `lanes` 32-bit lanes, and back."""
    prefix, bits = PREFIXES[lanes], 32 * lanes
    vec, flt = f"__m{bits}i", f"__m{bits}"
    narrow = {"epu16": "uint16", "epi16": "int16", "epu8": "uint8", "epi8": "int8"}
    for name, dtype in narrow.items():
        source = f"__m{max(128, lanes * np.dtype(dtype).itemsize * 8)}i"
        yield intrinsic(f"{prefix}_cvt{name}_epi32", f"{source} -> {vec}", widen(dtype, lanes))
    half = f"__m{max(128, bits // 2)}i"
    yield intrinsic(f"{prefix}_cvtph_ps", f"{half} -> {flt}")
    yield intrinsic(f"{prefix}_cvtps_ph", f"{flt}, imm -> {half}")


def widen(dtype: str, lanes: int) -> Callable[[m.Array], m.Array]:
    """Return the meaning of a conversion of the first `lanes` small integers to int32."""
    return lambda v: v.view(dtype)[:lanes].astype(I32)
