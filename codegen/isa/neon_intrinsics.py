"""Advanced SIMD (NEON) intrinsics of ARMv8.0 AArch64 with their numpy meanings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa import generic
from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import VECTOR_TYPES, Intrinsic, intrinsic, table
from dovetail.codegen.isa.memory import Pointer
from dovetail.codegen.isa.neon_bytes import byte_rows
from dovetail.codegen.isa.neon_words import word_rows

F32 = np.float32
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
INTEGERS = ("s32", "u32", "u16", "s16", "u8", "s8")


def vector_name(kind: str, bits: int) -> str:
    """Return the C vector type of a suffix at 64 or 128 bits, e.g. `uint16x4_t`."""
    dtype = KINDS[kind][0]
    return f"{dtype}x{bits // (8 * np.dtype(dtype).itemsize)}_t"


def _lanes(kind: str, bits: int) -> int:
    return VECTOR_TYPES[vector_name(kind, bits)].lanes


def _set_lane(x: Any, v: m.Array, lane: int) -> m.Array:
    out = v.copy()
    out[lane] = x
    return out


def _memory_rows(kind: str, bits: int) -> Iterator[Intrinsic]:
    """Yield loads, stores, broadcasts and lane moves of one vector type."""
    dtype, element = KINDS[kind]
    q, vec, lanes = "q" if bits == 128 else "", vector_name(kind, bits), _lanes(kind, bits)
    op = partial(_op_for, kind, bits)
    read = f"const {element}*"

    def broadcast(p: Pointer) -> m.Array:
        return np.full(lanes, p.load(dtype, 1)[0], dtype)

    def splat(x: Any) -> m.Array:
        return np.full(lanes, x, dtype)

    def load_lane(p: Pointer, v: m.Array, lane: int) -> m.Array:
        return _set_lane(p.load(dtype, 1)[0], v, lane)

    index = range(lanes)
    i = partial(intrinsic, lanes=lanes)
    yield i(f"vld1{q}_{kind}", f"{read} -> {vec}", lambda p: p.load(dtype, lanes), op=op("vload"))
    yield i(f"vld1{q}_dup_{kind}", f"{read} -> {vec}", broadcast, op=op("vbroadcast_at"))
    yield i(f"vld1{q}_lane_{kind}", f"{read}, {vec}, imm -> {vec}", load_lane, immediates=index)
    yield i(
        f"vst1{q}_{kind}", f"{element}*, {vec} -> void", lambda p, v: p.store(v), op=op("vstore")
    )
    yield i(
        f"vst1{q}_lane_{kind}",
        f"{element}*, {vec}, imm -> void",
        lambda p, v, lane: p.store(v[lane : lane + 1]),
        immediates=index,
    )
    yield i(f"vdup{q}_n_{kind}", f"{element} -> {vec}", splat, op=op("vbroadcast"))
    yield i(f"vmov{q}_n_{kind}", f"{element} -> {vec}", splat, op=op("vbroadcast"))
    half = vector_name(kind, 64)
    yield i(
        f"vdup{q}_lane_{kind}",
        f"{half}, imm -> {vec}",
        lambda v, lane: splat(v[lane]),
        immediates=range(_lanes(kind, 64)),
    )
    yield i(
        f"vget{q}_lane_{kind}",
        f"{vec}, imm -> {element}",
        lambda v, lane: v[lane],
        immediates=index,
    )
    yield i(f"vset{q}_lane_{kind}", f"{element}, {vec}, imm -> {vec}", _set_lane, immediates=index)


FLOAT_OPS = {
    "vload": "vload({0})",
    "vstore": "vstore({0}, {1})",
    "vbroadcast": "vbroadcast({0})",
    "vbroadcast_at": "vbroadcast({0}[0])",
}
INT_OPS = {
    "vload": "vload_i32({0})",
    "vstore": "vstore_i32({0}, {1})",
    "vbroadcast": "vbroadcast_i32({0})",
    "vbroadcast_at": "vbroadcast_i32({0}[0])",
}


def _op_for(kind: str, bits: int, key: str) -> str:
    """Return the high-IR form of a move, which exists for full float32 and int32 vectors."""
    table_of = {"f32": FLOAT_OPS, "s32": INT_OPS}.get(kind, {})
    return table_of.get(key, "") if bits == 128 else ""


def _half_rows(kind: str) -> Iterator[Intrinsic]:
    """Yield moves between the halves of a 128-bit vector and 64-bit vectors."""
    whole, half, n = vector_name(kind, 128), vector_name(kind, 64), _lanes(kind, 64)
    yield intrinsic(f"vget_low_{kind}", f"{whole} -> {half}", lambda v: v[:n].copy())
    yield intrinsic(f"vget_high_{kind}", f"{whole} -> {half}", lambda v: v[n:].copy())
    yield intrinsic(
        f"vcombine_{kind}", f"{half}, {half} -> {whole}", lambda a, b: np.concatenate([a, b])
    )


def _float_rows(bits: int) -> Iterator[Intrinsic]:
    """Yield float32 arithmetic at 64 or 128 bits."""
    q, vec, lanes = "q" if bits == 128 else "", vector_name("f32", bits), bits // 32
    two, three = f"{vec}, {vec} -> {vec}", f"{vec}, {vec}, {vec} -> {vec}"
    i = partial(intrinsic, lanes=lanes)
    for name, act in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        yield i(f"v{name}{q}_f32", two, act, op=f"v{name}({{0}}, {{1}})")
    yield i(f"vdiv{q}_f32", two, np.divide, op="vdiv({0}, {1})")
    yield i(f"vmin{q}_f32", two, m.min_nan, op="vmin({0}, {1})")
    yield i(f"vmax{q}_f32", two, m.max_nan, op="vmax({0}, {1})")
    yield i(f"vfma{q}_f32", three, _fma, op="vfma({1}, {2}, {0})")
    yield i(f"vfms{q}_f32", three, _fms, op="vfnma({1}, {2}, {0})")
    yield i(f"vmla{q}_f32", three, lambda a, b, c: a + b * c, op="vadd({0}, vmul({1}, {2}))")
    yield i(f"vmls{q}_f32", three, lambda a, b, c: a - b * c, op="vsub({0}, vmul({1}, {2}))")
    scalar = f"{vec}, {vec}, float -> {vec}"
    yield i(f"vfma{q}_n_f32", scalar, _fma, op="vfma({1}, vbroadcast({2}), {0})")
    yield i(
        f"vmul{q}_n_f32", f"{vec}, float -> {vec}", np.multiply, op="vmul({0}, vbroadcast({1}))"
    )
    for name, base in (("fma", _fma), ("fms", _fms)):
        for suffix, source in (("lane", "float32x2_t"), ("laneq", "float32x4_t")):
            yield i(
                f"v{name}{q}_{suffix}_f32",
                f"{vec}, {vec}, {source}, imm -> {vec}",
                lambda a, b, v, lane, base=base: base(a, b, v[lane]),
                immediates=range(VECTOR_TYPES[source].lanes),
            )
    for name, join in (("mla", np.add), ("mls", np.subtract)):
        yield i(
            f"v{name}{q}_lane_f32",
            f"{vec}, {vec}, float32x2_t, imm -> {vec}",
            lambda a, b, v, lane, join=join: join(a, b * v[lane]),
            immediates=(0, 1),
        )
    yield i(
        f"vmul{q}_lane_f32",
        f"{vec}, float32x2_t, imm -> {vec}",
        lambda a, v, lane: a * v[lane],
        immediates=(0, 1),
    )
    one = f"{vec} -> {vec}"
    yield i(f"vabs{q}_f32", one, np.abs, op="vabs({0})")
    yield i(f"vneg{q}_f32", one, np.negative, op="vneg({0})")
    yield i(f"vsqrt{q}_f32", one, np.sqrt, op="vsqrt({0})")
    for name, rounding, op in (
        ("rndn", np.rint, "vround({0})"),
        ("rndm", np.floor, ""),
        ("rndp", np.ceil, ""),
        ("rnd", np.trunc, ""),
    ):
        yield i(f"v{name}{q}_f32", one, rounding, op=op)
    yield i(f"vpadd{q}_f32", two, _pair_add)
    yield i(f"vrev64{q}_f32", one, lambda v: v.reshape(-1, 2)[:, ::-1].reshape(-1).copy())
    for name, first in (("zip1", 0), ("zip2", lanes // 2)):
        yield i(f"v{name}{q}_f32", two, partial(_zip, first))
    mask = vector_name("u32", bits)
    for name, compare in (
        ("cgt", np.greater),
        ("cge", np.greater_equal),
        ("clt", np.less),
        ("cle", np.less_equal),
        ("ceq", np.equal),
    ):
        yield i(f"v{name}{q}_f32", f"{vec}, {vec} -> {mask}", partial(_compare, compare))
    integers = vector_name("s32", bits)
    yield i(f"vcvt{q}_s32_f32", f"{vec} -> {integers}", lambda v: m.to_i32_saturating(v, np.trunc))
    yield i(f"vcvtn{q}_s32_f32", f"{vec} -> {integers}", m.to_i32_saturating, op="vcvt_i32({0})")
    yield i(f"vcvt{q}_f32_s32", f"{integers} -> {vec}", lambda v: v.astype(F32), op="vcvt_f32({0})")
    yield i(f"vcvt{q}_f32_u32", f"{mask} -> {vec}", lambda v: v.astype(F32))
    add = m.pairs_tree if bits == 128 else m.halves_tree
    yield i(f"vaddv{q}_f32", f"{vec} -> float", partial(add, np.add), op="vreduce_add({0})")
    for name, better in (("max", m.max_nan), ("min", m.min_nan)):
        meaning = partial(m.halves_tree, better)
        yield i(f"v{name}v{q}_f32", f"{vec} -> float", meaning, op=f"vreduce_{name}({{0}})")
        yield i(f"vp{name}{q}_f32", two, partial(_pairwise, better))


def _fma(a: m.Array, b: m.Array, c: Any) -> m.Array:
    return m.fma(b, c, a)


def _fms(a: m.Array, b: m.Array, c: Any) -> m.Array:
    return m.fma(-b, c, a)


def _pairwise(op: Callable[[m.Array, m.Array], m.Array], a: m.Array, b: m.Array) -> m.Array:
    joined = np.concatenate([a, b])
    return op(joined[0::2], joined[1::2])


_pair_add = partial(_pairwise, np.add)


def _zip(first: int, a: m.Array, b: m.Array) -> m.Array:
    half = a.size // 2
    return np.stack([a[first : first + half], b[first : first + half]], axis=1).reshape(-1)


def _compare(op: Callable[[m.Array, m.Array], m.Array], a: m.Array, b: m.Array) -> m.Array:
    return m.lane_mask(op(a, b), f"uint{a.dtype.itemsize * 8}")


def _integer_rows(kind: str, bits: int) -> Iterator[Intrinsic]:
    """Yield integer arithmetic, logic, shifts and comparisons of one vector type."""
    dtype = KINDS[kind][0]
    width = 8 * np.dtype(dtype).itemsize
    q, vec = "q" if bits == 128 else "", vector_name(kind, bits)
    two, full = f"{vec}, {vec} -> {vec}", kind == "s32" and bits == 128
    i = partial(intrinsic, lanes=bits // width)
    yield i(f"vadd{q}_{kind}", two, np.add, op="vadd_i32({0}, {1})" if full else "")
    yield i(f"vsub{q}_{kind}", two, np.subtract, op="vsub_i32({0}, {1})" if full else "")
    for name, op, form in (
        ("mul", np.multiply, "mul"),
        ("min", np.minimum, ""),
        ("max", np.maximum, ""),
        ("and", np.bitwise_and, "and"),
        ("orr", np.bitwise_or, "or"),
        ("eor", np.bitwise_xor, "xor"),
        ("bic", lambda a, b: a & ~b, ""),
    ):
        known = f"v{form}_i32({{0}}, {{1}})" if full and form else ""
        yield i(f"v{name}{q}_{kind}", two, op, op=known)
    shifted = f"{vec}, imm -> {vec}"
    yield i(
        f"vshl{q}_n_{kind}",
        shifted,
        lambda v, n: v << v.dtype.type(n),
        op="vshl_i32({0}, {1})" if full else "",
        immediates=(0, 1, width - 1),
    )
    yield i(f"vshr{q}_n_{kind}", shifted, _shift_right, immediates=(1, width // 2, width))
    mask = vector_name(f"u{width}", bits)
    for name, compare in (("cgt", np.greater), ("ceq", np.equal), ("clt", np.less)):
        yield i(f"v{name}{q}_{kind}", f"{vec}, {vec} -> {mask}", partial(_compare, compare))


def _shift_right(v: m.Array, n: int) -> m.Array:
    step = min(n, 8 * v.dtype.itemsize - 1)
    out: m.Array = np.right_shift(v, v.dtype.type(step))
    out = np.right_shift(out, v.dtype.type(n - step))
    return out


def _select_rows(kind: str, bits: int) -> Iterator[Intrinsic]:
    """Yield the bitwise select of one vector type."""
    q, vec = "q" if bits == 128 else "", vector_name(kind, bits)
    unsigned = vector_name(f"u{kind[1:]}", bits)

    def select(mask: m.Array, a: m.Array, b: m.Array) -> m.Array:
        chosen = (mask & a.view(mask.dtype)) | (~mask & b.view(mask.dtype))
        return chosen.view(a.dtype)

    yield intrinsic(f"vbsl{q}_{kind}", f"{unsigned}, {vec}, {vec} -> {vec}", select)


def _cast_rows(bits: int) -> Iterator[Intrinsic]:
    """Yield bit casts between vector types."""
    q = "q" if bits == 128 else ""
    names = tuple(KINDS)
    forms = {("f32", "s32"): "vbitcast_f32({0})", ("s32", "f32"): "vbitcast_i32({0})"}
    for result in names:
        for source in names:
            if result != source:
                yield intrinsic(
                    f"vreinterpret{q}_{result}_{source}",
                    f"{vector_name(source, bits)} -> {vector_name(result, bits)}",
                    m.reinterpret(KINDS[result][0]),
                    op=forms.get((result, source), "") if bits == 128 else "",
                    lanes=bits // 32,
                )


def _width_rows() -> Iterator[Intrinsic]:
    """Yield conversions between widths: 8, 16 and 32 bits, float16 and float32."""
    for kind, wide in (("u16", "u32"), ("s16", "s32"), ("u8", "u16"), ("s8", "s16")):
        dtype = KINDS[wide][0]
        yield intrinsic(
            f"vmovl_{kind}",
            f"{vector_name(kind, 64)} -> {vector_name(wide, 128)}",
            lambda v, dtype=dtype: v.astype(dtype),
        )
        narrow = KINDS[kind][0]
        yield intrinsic(
            f"vmovn_{wide}",
            f"{vector_name(wide, 128)} -> {vector_name(kind, 64)}",
            lambda v, narrow=narrow: v.astype(narrow),
        )
    half, quad = "float16x4_t", "float32x4_t"
    yield intrinsic("vcvt_f32_f16", f"{half} -> {quad}", lambda v: m.f32_of_f16(v.view(np.uint16)))
    yield intrinsic("vcvt_f16_f32", f"{quad} -> {half}", lambda v: m.f16_bits(v).view(np.float16))
    yield intrinsic("vreinterpret_f16_u16", f"uint16x4_t -> {half}", m.reinterpret(np.float16))
    yield intrinsic("vreinterpret_u16_f16", f"{half} -> uint16x4_t", m.reinterpret(np.uint16))


def _extract_rows() -> Iterator[Intrinsic]:
    """Yield `vext`: a window over two joined vectors."""
    for bits in (64, 128):
        q, vec, lanes = "q" if bits == 128 else "", vector_name("f32", bits), bits // 32
        yield intrinsic(
            f"vext{q}_f32",
            f"{vec}, {vec}, imm -> {vec}",
            lambda a, b, n: np.concatenate([a, b])[n : n + a.size],
            immediates=range(lanes),
        )


INTRINSICS = {
    **generic.INTRINSICS,
    **table(
        [
            *(row for kind in KINDS for bits in (64, 128) for row in _memory_rows(kind, bits)),
            *(row for kind in KINDS for row in _half_rows(kind)),
            *(row for bits in (64, 128) for row in _float_rows(bits)),
            *(row for kind in INTEGERS for bits in (64, 128) for row in _integer_rows(kind, bits)),
            *(
                row
                for kind in ("f32", *INTEGERS)
                for bits in (64, 128)
                for row in _select_rows(kind, bits)
            ),
            *(row for bits in (64, 128) for row in _cast_rows(bits)),
            *_width_rows(),
            *byte_rows(),
            *word_rows(),
            *_extract_rows(),
        ]
    ),
}
