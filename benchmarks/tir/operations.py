"""The vector builtins of the high IR in TensorIR: a table from name to expression.

In: lanes and argument expressions. Out: an expression. Fused and rounding operations are LLVM's
intrinsics, so that results do not hang on what an optimiser contracts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import tirx as tir

from tir.values import Tir, number, ramp, spread, wide

QUIET_NAN, ABOVE_INFINITY = 0x40, 0x7F800000


def intrinsic(name: str, dtype: str, *args: Tir) -> Tir:
    """Return a call of an LLVM intrinsic without side effects."""
    return tir.call_llvm_pure_intrin(dtype, name, *args)


def fused(lanes: int, a: Tir, b: Tir, c: Tir) -> Tir:
    """Return a * b + c, rounded once; twice, as in C, where a vector is one float."""
    if lanes == 1:
        return a * b + c
    return intrinsic("llvm.fma", wide("float32", lanes), a, b, c)


def negated(lanes: int, value: Tir) -> Tir:
    """Return -value; a product keeps the sign of zero right."""
    return value * spread(number(-1.0, "float32"), lanes)


def lesser(a: Tir, b: Tir) -> Tir:
    """Return min(a, b); NaN in either gives b, as the instructions of x86 do."""
    return tir.Select(a < b, a, b)


def greater(a: Tir, b: Tir) -> Tir:
    """Return max(a, b); NaN in either gives b."""
    return tir.Select(b < a, a, b)


def reduced(lanes: int, value: Tir, join: Callable[[Tir, Tir], Tir]) -> Tir:
    """Return all lanes joined pairwise, halves first."""
    if lanes == 1:
        return value
    while lanes > 2:
        lanes //= 2
        half = wide("float32", lanes)
        value = join(tir.vectorlow(half, value), tir.vectorhigh(half, value))
    return join(*(tir.Shuffle([value], [number(lane, "int32")]) for lane in range(2)))


def with_tail(lanes: int, value: Tir, fill: Tir, count: Tir) -> Tir:
    """Return `value` in the first `count` lanes, `fill` in the others."""
    return tir.Select(in_use(lanes, count), value, spread(fill, lanes))


def in_use(lanes: int, count: Tir) -> Tir:
    """Return the mask of the first `count` lanes."""
    return ramp(tir.const(0, "int64"), lanes) < spread(count, lanes)


def widened(elem: str, stored: Tir, lanes: int) -> Tir:
    """Return what memory holds as float32."""
    if elem == "f16":
        return tir.Cast(wide("float32", lanes), stored)
    if elem == "bf16":
        bits = tir.Cast(wide("uint32", lanes), stored)
        shifted = tir.shift_left(bits, spread(tir.const(16, "uint32"), lanes))
        return tir.reinterpret(wide("float32", lanes), shifted)
    return stored


def narrowed(elem: str, value: Tir, lanes: int) -> Tir:
    """Return float32 as memory holds it, rounded to nearest even."""
    if elem == "f16":
        return tir.Cast(wide("float16", lanes), value)
    if elem != "bf16":
        return value

    def word(bits: int) -> Tir:
        return spread(tir.const(bits, "uint32"), lanes)

    bits = tir.reinterpret(wide("uint32", lanes), value)
    high = tir.shift_right(bits, word(16))
    rounded = tir.shift_right(bits + word(0x7FFF) + tir.bitwise_and(high, word(1)), word(16))
    magnitude = tir.bitwise_and(bits, word(0x7FFFFFFF))
    nan = word(ABOVE_INFINITY) < magnitude
    chosen = tir.Select(nan, tir.bitwise_or(high, word(QUIET_NAN)), rounded)
    return tir.Cast(wide("uint16", lanes), chosen)


def pair_low(lanes: int, pairs: Tir) -> Tir:
    """Return the first of two bfloat16 in each 32-bit lane, as float32."""
    bits = tir.shift_left(pairs, spread(tir.const(16, "int32"), lanes))
    return tir.reinterpret(wide("float32", lanes), bits)


def pair_high(lanes: int, pairs: Tir) -> Tir:
    """Return the second of two bfloat16 in each 32-bit lane, as float32."""
    bits = tir.bitwise_and(pairs, spread(tir.const(-65536, "int32"), lanes))
    return tir.reinterpret(wide("float32", lanes), bits)


def pair_firsts(lanes: int, a: Tir, b: Tir) -> Tir:
    """Return pairs of the first bfloat16 of each pair of a and of b."""
    first = tir.bitwise_and(a, spread(tir.const(65535, "int32"), lanes))
    return tir.bitwise_or(first, tir.shift_left(b, spread(tir.const(16, "int32"), lanes)))


def pair_seconds(lanes: int, a: Tir, b: Tir) -> Tir:
    """Return pairs of the second bfloat16 of each pair of a and of b."""
    words = tir.reinterpret(wide("uint32", lanes), a)
    first = tir.shift_right(words, spread(tir.const(16, "uint32"), lanes))
    second = tir.bitwise_and(b, spread(tir.const(-65536, "int32"), lanes))
    return tir.bitwise_or(tir.reinterpret(wide("int32", lanes), first), second)


def dot_pairs(lanes: int, a: Tir, b: Tir, c: Tir) -> Tir:
    """Return c + a . b of pairs; the upper products first, as in the C helpers."""
    upper = fused(lanes, pair_high(lanes, a), pair_high(lanes, b), c)
    return fused(lanes, pair_low(lanes, a), pair_low(lanes, b), upper)


def shifted_down(lanes: int, value: Tir, n: Tir) -> Tir:
    """Return integers shifted right, filled with zeros."""
    words = tir.reinterpret(wide("uint32", lanes), value)
    moved = tir.shift_right(words, spread(tir.Cast("uint32", n), lanes))
    return tir.reinterpret(wide("int32", lanes), moved)


def dot_quads(lanes: int, w: Tir, x: Tir, acc: Tir, *, signed: bool = False) -> Tir:
    """Return acc + w . x of the four bytes of each lane; those of x, and of w if so, signed."""

    def bits(count: int) -> Tir:
        return spread(tir.const(count, "int32"), lanes)

    def signed_byte(quads: Tir, at: int) -> Tir:
        return tir.shift_right(tir.shift_left(quads, bits(24 - at)), bits(24))

    for at in range(0, 32, 8):
        byte = tir.bitwise_and(tir.shift_right(w, bits(at)), bits(255))
        acc = acc + (signed_byte(w, at) if signed else byte) * signed_byte(x, at)
    return acc


def _unary(name: str) -> Callable[..., Tir]:
    return lambda lanes, a: intrinsic(name, wide("float32", lanes), a)


OPERATIONS: dict[str, Callable[..., Tir]] = {
    "vzero": lambda lanes: spread(number(0.0, "float32"), lanes),
    "vbroadcast": lambda lanes, a: spread(a, lanes),
    "vbroadcast_i32": lambda lanes, a: spread(a, lanes),
    "vadd": lambda lanes, a, b: a + b,
    "vsub": lambda lanes, a, b: a - b,
    "vmul": lambda lanes, a, b: a * b,
    "vdiv": lambda lanes, a, b: tir.Div(a, b),
    "vmin": lambda lanes, a, b: lesser(a, b),
    "vmax": lambda lanes, a, b: greater(a, b),
    "vfma": fused,
    "vfnma": lambda lanes, a, b, c: fused(lanes, negated(lanes, a), b, c),
    "vabs": _unary("llvm.fabs"),
    "vneg": negated,
    "vsqrt": _unary("llvm.sqrt"),
    "vround": _unary("llvm.roundeven"),
    **{f"v{name}": _unary(f"llvm.{name}") for name in ("floor", "ceil", "trunc")},
    "vreduce_add": lambda lanes, a: reduced(lanes, a, lambda x, y: x + y),
    "vreduce_max": lambda lanes, a: reduced(lanes, a, greater),
    "vreduce_min": lambda lanes, a: reduced(lanes, a, lesser),
    "vselect_gt": lambda lanes, a, b, x, y: tir.Select(b < a, x, y),
    "vtail": with_tail,
    "vcvt_i32": lambda lanes, a: tir.Cast(
        wide("int32", lanes), intrinsic("llvm.roundeven", wide("float32", lanes), a)
    ),
    "vcvt_f32": lambda lanes, a: tir.Cast(wide("float32", lanes), a),
    "vadd_i32": lambda lanes, a, b: a + b,
    "vsub_i32": lambda lanes, a, b: a - b,
    "vmul_i32": lambda lanes, a, b: a * b,
    "vand_i32": lambda lanes, a, b: tir.bitwise_and(a, b),
    "vor_i32": lambda lanes, a, b: tir.bitwise_or(a, b),
    "vxor_i32": lambda lanes, a, b: tir.bitwise_xor(a, b),
    "vshl_i32": lambda lanes, a, n: tir.shift_left(a, spread(tir.Cast("int32", n), lanes)),
    "vshr_i32": shifted_down,
    "vbitcast_f32": lambda lanes, a: tir.reinterpret(wide("float32", lanes), a),
    "vbitcast_i32": lambda lanes, a: tir.reinterpret(wide("int32", lanes), a),
    "vpair_low": pair_low,
    "vpair_high": pair_high,
    "vpair_firsts": pair_firsts,
    "vpair_seconds": pair_seconds,
    "vdot_pairs": dot_pairs,
    "vdot_quads": dot_quads,
    "vdot_quads_signed": partial(dot_quads, signed=True),
    "viota": lambda lanes: ramp(tir.const(0, "int32"), lanes, "int32"),
}
"""Builtin to its expression; the first argument is the number of lanes."""
REDUCTIONS = ("vreduce_add", "vreduce_max", "vreduce_min")
"""Operations that use their argument many times: it is computed once, before."""
