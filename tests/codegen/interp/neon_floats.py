"""What NEON does that the lifter follows by `op`, or not: floats, and vectors of integers.

In: nothing. Out: `Meant` rows of ARMv8.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa.neon_integers import KINDS, WIDTHS
from dovetail.codegen.isa.neon_intrinsics import INTEGERS, WORDS
from tests.codegen.interp import meaning as m
from tests.codegen.interp.meant import Meant, meant

F32 = np.float32


def rows() -> Iterator[Meant]:
    """Yield all of them."""
    for kind, (dtype, _) in KINDS.items():
        for q, bits in WIDTHS:
            yield from _memory_rows(kind, dtype, q, bits // (8 * np.dtype(dtype).itemsize))
            for source in KINDS:
                if source != kind and not (kind == "f32" and source in WORDS):
                    yield meant(f"vreinterpret{q}_{kind}_{source}", m.reinterpret(dtype))
        if kind != "f32":
            half = 8 // np.dtype(dtype).itemsize
            yield meant(f"vget_low_{kind}", lambda v, n=half: v[:n].copy())
            yield meant(f"vget_high_{kind}", lambda v, n=half: v[n:].copy())
            yield meant(f"vcombine_{kind}", lambda a, b: np.concatenate([a, b]))
    for q, bits in WIDTHS:
        yield from _float_rows(q, bits)
        for kind in INTEGERS:
            yield from _integer_rows(kind, q)
        for kind in ("f32", *INTEGERS):
            yield meant(f"vbsl{q}_{kind}", _select)
    yield from _width_rows()


def _memory_rows(kind: str, dtype: str, q: str, lanes: int) -> Iterator[Meant]:
    def splat(x: Any) -> m.Array:
        return np.full(lanes, x, dtype)

    yield meant(f"vld1{q}_dup_{kind}", lambda p: splat(p.load(dtype, 1)[0]))
    if kind not in WORDS:
        yield meant(f"vdup{q}_n_{kind}", splat)
        yield meant(f"vmov{q}_n_{kind}", splat)
    if kind != "f32":
        yield meant(f"vdup{q}_lane_{kind}", lambda v, lane: splat(v[lane]))
        yield meant(f"vld1{q}_{kind}", lambda p: p.load(dtype, lanes))
        yield meant(
            f"vld1{q}_lane_{kind}", lambda p, v, lane: _set_lane(p.load(dtype, 1)[0], v, lane)
        )
        yield meant(f"vst1{q}_{kind}", lambda p, v: p.store(v))
        yield meant(f"vst1{q}_lane_{kind}", lambda p, v, lane: p.store(v[lane : lane + 1]))
        yield meant(f"vget{q}_lane_{kind}", lambda v, lane: v[lane])
        yield meant(f"vset{q}_lane_{kind}", _set_lane)


def _set_lane(x: Any, v: m.Array, lane: int) -> m.Array:
    out = v.copy()
    out[lane] = x
    return out


def _float_rows(q: str, bits: int) -> Iterator[Meant]:
    add = m.pairs_tree if bits == 128 else m.halves_tree
    found: dict[str, Callable[..., Any]] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "min": m.min_nan,
        "max": m.max_nan,
        **dict.fromkeys(("fma", "fma_n"), lambda a, b, c: m.fma(b, c, a)),
        "fms": lambda a, b, c: m.fma(-b, c, a),
        "mla": lambda a, b, c: a + b * c,
        "mls": lambda a, b, c: a - b * c,
        "mul_n": np.multiply,
        **dict.fromkeys(("fma_lane", "fma_laneq"), lambda a, b, v, i: m.fma(b, v[i], a)),
        **dict.fromkeys(("fms_lane", "fms_laneq"), lambda a, b, v, i: m.fma(-b, v[i], a)),
        "mla_lane": lambda a, b, v, i: a + b * v[i],
        "mls_lane": lambda a, b, v, i: a - b * v[i],
        "mul_lane": lambda a, v, i: a * v[i],
        "abs": np.abs,
        "neg": np.negative,
        "sqrt": np.sqrt,
        "rndn": np.rint,
        "rndm": np.floor,
        "rndp": np.ceil,
        "rnd": np.trunc,
        **{f"c{name}": partial(_compare, act) for name, act in COMPARES.items()},
        "addv": partial(add, np.add),
        "maxv": partial(m.halves_tree, m.max_nan),
        "minv": partial(m.halves_tree, m.min_nan),
        "pmax": partial(_pairwise, m.max_nan),
        "pmin": partial(_pairwise, m.min_nan),
    }
    for name, act in found.items():
        base, _, lane = name.partition("_")
        yield meant(f"v{base}{q}{'_' * bool(lane)}{lane}_f32", act)
    yield meant(f"vcvt{q}_s32_f32", lambda v: m.to_i32_saturating(v, np.trunc))
    yield meant(f"vcvtn{q}_s32_f32", m.to_i32_saturating)


COMPARES = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
}


def _compare(op: Callable[[m.Array, m.Array], m.Array], a: m.Array, b: m.Array) -> m.Array:
    return m.lane_mask(op(a, b), f"uint{a.dtype.itemsize * 8}")


def _pairwise(op: Callable[[m.Array, m.Array], m.Array], a: m.Array, b: m.Array) -> m.Array:
    joined = np.concatenate([a, b])
    return op(joined[0::2], joined[1::2])


def _integer_rows(kind: str, q: str) -> Iterator[Meant]:
    for name, act in (
        ("add", np.add),
        ("sub", np.subtract),
        ("mul", np.multiply),
        ("min", np.minimum),
        ("max", np.maximum),
        ("and", np.bitwise_and),
        ("orr", np.bitwise_or),
        ("eor", np.bitwise_xor),
        ("bic", lambda a, b: a & ~b),
    ):
        yield meant(f"v{name}{q}_{kind}", act)
    yield meant(f"vshl{q}_n_{kind}", lambda v, n: v << v.dtype.type(n))
    yield meant(f"vshr{q}_n_{kind}", _shift_right)
    for name in ("gt", "eq", "lt"):
        yield meant(f"vc{name}{q}_{kind}", partial(_compare, COMPARES[name]))


def _shift_right(v: m.Array, n: int) -> m.Array:
    step = min(n, 8 * v.dtype.itemsize - 1)
    return np.right_shift(np.right_shift(v, v.dtype.type(step)), v.dtype.type(n - step))


def _select(mask: m.Array, a: m.Array, b: m.Array) -> m.Array:
    chosen = (mask & a.view(mask.dtype)) | (~mask & b.view(mask.dtype))
    return chosen.view(a.dtype)


def _width_rows() -> Iterator[Meant]:
    for kind, wide in (("u16", "u32"), ("s16", "s32"), ("u8", "u16"), ("s8", "s16")):
        dtype, narrow = KINDS[wide][0], KINDS[kind][0]
        yield meant(f"vmovl_{kind}", lambda v, dtype=dtype: v.astype(dtype))
        yield meant(f"vmovn_{wide}", lambda v, narrow=narrow: v.astype(narrow))
    yield meant("vcvt_f32_f16", lambda v: m.f32_of_f16(v.view(np.uint16)))
    yield meant("vcvt_f16_f32", lambda v: m.f16_bits(v).view(np.float16))
    yield meant("vreinterpret_f16_u16", m.reinterpret(np.float16))
    yield meant("vreinterpret_u16_f16", m.reinterpret(np.uint16))
