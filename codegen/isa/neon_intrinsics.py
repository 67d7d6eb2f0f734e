"""Advanced SIMD (NEON) intrinsics of ARMv8.0 AArch64, with the meanings of those that move floats.

Of vectors of integers the lifter follows constants, whose bits or values may become floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa import generic
from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import Intrinsic, Meaning, intrinsic, signatures, table
from dovetail.codegen.isa.neon_integers import KINDS, WIDTHS, integer_rows, vector_name

F32 = np.float32
INTEGERS = ("s32", "u32", "u16", "s16", "u8", "s8")
WORDS = ("s32", "u32")
SUFFIXES = {"f32": "", "s32": "_i32"}
"""Kinds whose full vectors the high IR has, and how it calls their moves."""


def _set_lane(x: Any, v: m.Array, lane: int) -> m.Array:
    out = v.copy()
    out[lane] = x
    return out


def _load_lane(p: Any, v: m.Array, lane: int) -> m.Array:
    return _set_lane(p.load(F32, 1)[0], v, lane)


def _store_lane(p: Any, v: m.Array, lane: int) -> None:
    p.store(v[lane : lane + 1])


def _memory_rows(kind: str, q: str, bits: int) -> Iterator[Intrinsic]:
    """Yield loads, stores, broadcasts and lane moves of one vector type."""
    dtype, element = KINDS[kind]
    vec, lanes = vector_name(kind, bits), bits // (8 * np.dtype(dtype).itemsize)
    read, write = f"const {element}* -> {vec}", f"{element}*, {vec} -> void"
    s, full = SUFFIXES.get(kind, ""), bits == 128 and kind in SUFFIXES
    splat = _splat(dtype, lanes) if kind in WORDS else None
    rows: tuple[tuple[str, str, str, Meaning | None], ...] = (
        ("vld1{q}", read, f"vload{s}({{0}})", lambda p: p.load(F32, lanes)),
        ("vld1{q}_dup", read, f"vbroadcast{s}({{0}}[0])", None),
        ("vst1{q}", write, f"vstore{s}({{0}}, {{1}})", lambda p, v: p.store(v)),
        ("vdup{q}_n", f"{element} -> {vec}", f"vbroadcast{s}({{0}})", splat),
        ("vmov{q}_n", f"{element} -> {vec}", f"vbroadcast{s}({{0}})", splat),
        ("vld1{q}_lane", f"const {element}*, {vec}, imm -> {vec}", "", _load_lane),
        ("vst1{q}_lane", f"{element}*, {vec}, imm -> void", "", _store_lane),
        ("vdup{q}_lane", f"{vector_name(kind, 64)}, imm -> {vec}", "", lambda v, i: v[[i] * lanes]),
        ("vget{q}_lane", f"{vec}, imm -> {element}", "", lambda v, lane: v[lane]),
        ("vset{q}_lane", f"{element}, {vec}, imm -> {vec}", "", _set_lane),
    )
    for name, signature, op, meaning in rows:
        followed = meaning if kind == "f32" or meaning is splat else None
        form = op if full else ""
        yield intrinsic(f"{name.format(q=q)}_{kind}", signature, followed, op=form, lanes=lanes)


def _splat(dtype: str, lanes: int) -> Meaning:
    return lambda x: np.full(lanes, x, dtype)


def _half_rows(kind: str) -> Iterator[Intrinsic]:
    """Yield moves between the halves of a 128-bit vector and 64-bit vectors."""
    whole, half = vector_name(kind, 128), vector_name(kind, 64)
    rows: dict[str, tuple[str, Meaning]] = {
        f"vget_low_{kind}": (f"{whole} -> {half}", lambda v: v[:2].copy()),
        f"vget_high_{kind}": (f"{whole} -> {half}", lambda v: v[2:].copy()),
        f"vcombine_{kind}": (f"{half}, {half} -> {whole}", lambda a, b: np.concatenate([a, b])),
    }
    for name, (signature, meaning) in rows.items():
        yield intrinsic(name, signature, meaning if kind == "f32" else None)


ROUNDINGS = {"n": "round", "m": "floor", "p": "ceil", "": "trunc"}
"""How a name ends to the way it rounds."""


def _float_rows(q: str, bits: int) -> Iterator[Intrinsic]:
    """Yield float32 arithmetic at 64 or 128 bits."""
    vec, lanes = vector_name("f32", bits), bits // 32
    integers, mask = vector_name("s32", bits), vector_name("u32", bits)
    one, two, three = (f"{', '.join([vec] * count)} -> {vec}" for count in (1, 2, 3))
    computed = {
        **{name: (two, f"v{name}({{0}}, {{1}})") for name in "add sub mul div min max".split()},
        "fma": (three, "vfma({1}, {2}, {0})"),
        "fms": (three, "vfnma({1}, {2}, {0})"),
        "mla": (three, "vadd({0}, vmul({1}, {2}))"),
        "mls": (three, "vsub({0}, vmul({1}, {2}))"),
        **{name: (one, f"v{name}({{0}})") for name in ("abs", "neg", "sqrt")},
        **{f"rnd{way}": (one, f"v{name}({{0}})") for way, name in ROUNDINGS.items()},
        **{f"{n}v": (f"{vec} -> float", f"vreduce_{n}({{0}})") for n in ("add", "max", "min")},
    }
    i = partial(intrinsic, lanes=lanes)
    for name, (signature, op) in computed.items():
        yield i(f"v{name}{q}_f32", signature, op=op)
    scalar = f"{vec}, {vec}, float -> {vec}"
    yield i(f"vfma{q}_n_f32", scalar, op="vfma({1}, vbroadcast({2}), {0})")
    yield i(f"vmul{q}_n_f32", f"{vec}, float -> {vec}", op="vmul({0}, vbroadcast({1}))")
    by_lane = [(name, "lane", 2) for name in ("fma", "fms", "mla", "mls")]
    for name, form, count in (*by_lane, ("fma", "laneq", 4), ("fms", "laneq", 4)):
        op = computed[name][1].replace("{2}", "vbroadcast({2}[{3}])")
        yield i(f"v{name}{q}_{form}_f32", f"{vec}, {vec}, float32x{count}_t, imm -> {vec}", op=op)
    of_two = f"{vec}, float32x2_t, imm -> {vec}"
    yield i(f"vmul{q}_lane_f32", of_two, op="vmul({0}, vbroadcast({1}[{2}]))")
    yield i(f"vcvtn{q}_s32_f32", f"{vec} -> {integers}", op="vcvt_i32({0})")
    yield i(f"vcvt{q}_f32_s32", f"{integers} -> {vec}", _values, op="vcvt_f32({0})")
    yield i(f"vcvt{q}_f32_u32", f"{mask} -> {vec}", _values)
    compared = " ".join(f"v{name}{q}_f32" for name in ("cgt", "cge", "clt", "cle", "ceq"))
    yield from signatures(
        {
            compared: f"{vec}, {vec} -> {mask}",
            f"vpmax{q}_f32 vpmin{q}_f32": two,
            f"vcvt{q}_s32_f32": f"{vec} -> {integers}",
        },
        lanes=lanes,
    )
    yield i(f"vpadd{q}_f32", two, _pair_add)
    yield i(f"vrev64{q}_f32", one, lambda v: v.reshape(-1, 2)[:, ::-1].reshape(-1).copy())
    for name, first in (("zip1", 0), ("zip2", lanes // 2)):
        yield i(f"v{name}{q}_f32", two, partial(_zip, first))
    yield intrinsic(
        f"vext{q}_f32",
        f"{vec}, {vec}, imm -> {vec}",
        lambda a, b, n: np.concatenate([a, b])[n : n + a.size],
    )


def _values(v: m.Array) -> m.Array:
    return v.astype(F32)


def _pair_add(a: m.Array, b: m.Array) -> m.Array:
    joined = np.concatenate([a, b])
    total: m.Array = joined[0::2] + joined[1::2]
    return total


def _zip(first: int, a: m.Array, b: m.Array) -> m.Array:
    half = a.size // 2
    return np.stack([a[first : first + half], b[first : first + half]], axis=1).reshape(-1)


def _integer_rows(kind: str, q: str, bits: int) -> Iterator[Intrinsic]:
    """Yield integer arithmetic, logic, shifts and comparisons of one vector type."""
    width, vec = int(kind[1:]), vector_name(kind, bits)
    two, full = f"{vec}, {vec} -> {vec}", kind == "s32" and bits == 128
    mask = vector_name(f"u{width}", bits)
    forms = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "orr": "or", "eor": "xor"}
    for name, form in forms.items():
        op = f"v{form}_i32({{0}}, {{1}})" if full else ""
        yield intrinsic(f"v{name}{q}_{kind}", two, op=op, lanes=bits // width)
    shifted = "vshl_i32({0}, {1})" if full else ""
    yield intrinsic(f"vshl{q}_n_{kind}", f"{vec}, imm -> {vec}", op=shifted, lanes=bits // width)
    yield from signatures(
        {
            f"vmin{q}_{kind} vmax{q}_{kind} vbic{q}_{kind}": two,
            f"vshr{q}_n_{kind}": f"{vec}, imm -> {vec}",
            f"vcgt{q}_{kind} vceq{q}_{kind} vclt{q}_{kind}": f"{vec}, {vec} -> {mask}",
        },
        lanes=bits // width,
    )


def _select_row(kind: str, q: str, bits: int) -> Intrinsic:
    """Return the bitwise select of one vector type."""
    vec, unsigned = vector_name(kind, bits), vector_name(f"u{kind[1:]}", bits)
    return intrinsic(f"vbsl{q}_{kind}", f"{unsigned}, {vec}, {vec} -> {vec}")


def _cast_rows(q: str, bits: int) -> Iterator[Intrinsic]:
    """Yield bit casts between vector types."""
    forms = {("f32", "s32"): "vbitcast_f32({0})", ("s32", "f32"): "vbitcast_i32({0})"}
    for result in KINDS:
        for source in KINDS:
            if result != source:
                followed = result == "f32" and source in WORDS
                yield intrinsic(
                    f"vreinterpret{q}_{result}_{source}",
                    f"{vector_name(source, bits)} -> {vector_name(result, bits)}",
                    m.reinterpret(F32) if followed else None,
                    op=forms.get((result, source), "") if bits == 128 else "",
                    lanes=bits // 32,
                )


def _width_rows() -> Iterator[Intrinsic]:
    """Yield conversions between widths: 8, 16 and 32 bits, float16 and float32."""
    for kind, wide in (("u16", "u32"), ("s16", "s32"), ("u8", "u16"), ("s8", "s16")):
        half, whole = vector_name(kind, 64), vector_name(wide, 128)
        yield intrinsic(f"vmovl_{kind}", f"{half} -> {whole}")
        yield intrinsic(f"vmovn_{wide}", f"{whole} -> {half}")
    yield from signatures(
        {
            "vcvt_f32_f16": "float16x4_t -> float32x4_t",
            "vcvt_f16_f32": "float32x4_t -> float16x4_t",
            "vreinterpret_f16_u16": "uint16x4_t -> float16x4_t",
            "vreinterpret_u16_f16": "float16x4_t -> uint16x4_t",
        }
    )


INTRINSICS = {
    **generic.INTRINSICS,
    **table(
        [
            *(row for kind in KINDS for width in WIDTHS for row in _memory_rows(kind, *width)),
            *(row for kind in KINDS for row in _half_rows(kind)),
            *(row for width in WIDTHS for row in _float_rows(*width)),
            *(row for kind in INTEGERS for width in WIDTHS for row in _integer_rows(kind, *width)),
            *(_select_row(kind, *width) for kind in ("f32", *INTEGERS) for width in WIDTHS),
            *(row for width in WIDTHS for row in _cast_rows(*width)),
            *_width_rows(),
            *integer_rows(),
        ]
    ),
}
