"""What x86 instructions on floats, masks and halves do that the lifter follows by `op`, or not.

In: lane count, of 32 bits. Out: `Meant` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa.x86_rows import PREFIXES
from tests.codegen.interp import meaning as m
from tests.codegen.interp.meant import Meant, meant

F32, I32, U16 = np.float32, np.int32, np.uint16
TWO = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": m.min_second,
    "max": m.max_second,
}
COMPARES = {"eq": 0, "lt": 1, "le": 2, "neq": 4, "ge": 13, "gt": 14}


def float_rows(lanes: int) -> Iterator[Meant]:
    """Yield what has one form at 128, 256 and 512 bits."""
    rows: dict[str, Callable[..., Any]] = {
        **{f"{name}_ps": act for name, act in TWO.items()},
        "sqrt_ps": np.sqrt,
        "and_ps": m.bitwise(np.bitwise_and),
        "or_ps": m.bitwise(np.bitwise_or),
        "xor_ps": m.bitwise(np.bitwise_xor),
        "andnot_ps": m.bitwise(lambda a, b: ~a & b),
        "fmadd_ps": m.fma,
        "fnmadd_ps": lambda a, b, c: m.fma(-a, b, c),
        "fmsub_ps": lambda a, b, c: m.fma(a, b, -c),
        "setzero_ps": np.zeros(lanes, F32).copy,
        "set1_ps": lambda x: np.full(lanes, x, F32),
        "setr_ps": lambda *xs: np.array(xs, F32),
        "set_ps": lambda *xs: np.array(xs[::-1], F32),
        **dict.fromkeys(("loadu_ps", "load_ps"), lambda p: p.load(F32, lanes)),
        **dict.fromkeys(("storeu_ps", "store_ps"), lambda p, v: p.store(v)),
        "cvtps_epi32": m.to_i32_x86,
        "cvttps_epi32": lambda v: m.to_i32_x86(v, np.trunc),
        f"castps_si{32 * lanes}": m.reinterpret(I32),
        "cvtph_ps": lambda v: m.f32_of_f16(v.view(U16)[:lanes]),
        "cvtps_ph": _float_to_half,
    }
    for name, act in rows.items():
        yield meant(f"{PREFIXES[lanes]}_{name}", act)


def _float_to_half(v: m.Array, _mode: int) -> m.Array:
    """Narrow to float16, to nearest even; the upper part of a 128-bit result is 0."""
    bits = m.f16_bits(v)
    padded = np.zeros(max(8, bits.size), U16)
    padded[: bits.size] = bits
    return padded.view(I32)


def narrow_rows(lanes: int) -> Iterator[Meant]:
    """Yield what exists at 128 and 256 bits."""
    prefix = PREFIXES[lanes]
    yield meant(f"{prefix}_cmp_ps", lambda a, b, mode: _compared(mode, a, b))
    yield meant(f"{prefix}_round_ps", m.round_mode)
    yield meant(f"{prefix}_floor_ps", np.floor)
    yield meant(f"{prefix}_ceil_ps", np.ceil)
    yield meant(f"{prefix}_maskload_epi32", lambda p, mask: p.load_lanes(I32, mask < 0))
    yield meant(f"{prefix}_packus_epi32", _pack_unsigned)
    yield meant(f"{prefix}_broadcast_ss", lambda p: np.full(lanes, p.load(F32, 1)[0], F32))
    yield meant(f"{prefix}_broadcastss_ps", lambda v: np.full(lanes, v[0], F32))


def _compared(mode: int, a: m.Array, b: m.Array) -> m.Array:
    return m.lane_mask(m.compare_mode(a, b, mode), F32)


def _pack_unsigned(a: m.Array, b: m.Array) -> m.Array:
    joined = np.concatenate([a.reshape(-1, 4), b.reshape(-1, 4)], axis=1).reshape(-1)
    return np.clip(joined, 0, 0xFFFF).astype(U16).view(I32)


def scalar_rows() -> Iterator[Meant]:
    """Yield comparisons of SSE, `_ss` instructions and single lanes."""
    for name, mode in COMPARES.items():
        yield meant(f"_mm_cmp{name}_ps", partial(_compared, mode))
    for name, act in (("min", m.min_second), ("max", m.max_second)):
        yield meant(f"_mm_{name}_ss", _low_lane(act))
    yield meant("_mm_sqrt_ss", _low_lane(np.sqrt))
    yield meant("_mm_fmadd_ss", _low_lane(m.fma))
    yield meant("_mm_undefined_ps", lambda: np.zeros(4, F32))
    yield meant("_mm_set_ss", _first_lane)
    yield meant("_mm_load_ss", lambda p: _first_lane(p.load(F32, 1)[0]))
    for name in ("_mm_load1_ps", "_mm_load_ps1"):
        yield meant(name, lambda p: np.full(4, p.load(F32, 1)[0], F32))
    yield meant("_mm_set_ps1", lambda x: np.full(4, x, F32))
    yield meant("_mm_loadu_si32", lambda p: np.concatenate([p.load(I32, 1), np.zeros(3, I32)]))
    yield meant("_cvtsh_ss", lambda h: m.f32_of_f16(h)[()])
    yield meant("_cvtss_sh", lambda x, _mode: m.f16_bits(np.array(x, F32))[()])
    yield meant("_mm_prefetch", lambda _pointer, _kind: None)


def _low_lane(op: Callable[..., Any]) -> Callable[..., m.Array]:
    def meaning(a: m.Array, *others: m.Array) -> m.Array:
        out = a.copy()
        out[0] = op(a[:1], *(b[:1] for b in others))[0]
        return out

    return meaning


def _first_lane(x: Any) -> m.Array:
    return np.array([x, 0, 0, 0], F32)


def masked_rows() -> Iterator[Meant]:
    """Yield what AVX-512 does under a mask, and its reductions."""
    for bits, prefix in ((128, "_mm"), (256, "_mm256"), (512, "_mm512")):
        yield from _masked_memory(prefix, "ps", F32, F32, bits // 32)
        yield from _masked_memory(prefix, "epi32", I32, I32, bits // 32)
        if bits < 512:
            yield from _masked_memory(prefix, "epi16", U16, I32, bits // 16)
        yield meant(
            f"{prefix}_cmp_ps_mask", lambda a, b, mode: m.mask_of(m.compare_mode(a, b, mode))
        )
    for name, act in (("min", m.min_second), ("max", m.max_second)):
        yield meant(
            f"_mm512_maskz_{name}_ps",
            lambda k, a, b, act=act: np.where(m.bits_of(k, 16), act(a, b), F32(0)),
        )
        yield meant(
            f"_mm512_mask_{name}_ps",
            lambda s, k, a, b, act=act: np.where(m.bits_of(k, 16), act(a, b), s),
        )
    yield meant(
        "_mm512_mask_fmadd_ps",
        lambda a, k, b, c: np.where(m.bits_of(k, 16), m.fma(a, b, c), a),
    )
    yield meant(
        "_mm512_mask3_fmadd_ps",
        lambda a, b, c, k: np.where(m.bits_of(k, 16), m.fma(a, b, c), c),
    )
    for name, act in (("add", np.add), ("max", m.max_second), ("min", m.min_second)):
        yield meant(f"_mm512_reduce_{name}_ps", partial(m.halves_tree, act))
    yield meant("_mm512_broadcastss_ps", lambda v: np.full(16, v[0], F32))
    yield meant("_mm512_load_epi32", lambda p: p.load(I32, 16))
    for bits, dtype in ((16, U16), (8, np.uint8)):
        yield meant(
            f"_mm512_cvtepi32_epi{bits}",
            lambda v, dtype=dtype: v.view(np.uint32).astype(dtype).view(I32),
        )
    yield meant("_mm512_abs_ps", np.abs)
    yield meant("_mm512_roundscale_ps", m.round_mode)


def _masked_memory(
    prefix: str, suffix: str, dtype: Any, result: Any, lanes: int
) -> Iterator[Meant]:
    def keep(source: m.Array, k: int, p: Any) -> m.Array:
        loaded = p.load_lanes(dtype, m.bits_of(k, lanes))
        return np.where(m.bits_of(k, lanes), loaded, source.view(dtype)).view(result)

    yield meant(f"{prefix}_mask_loadu_{suffix}", keep)
    if suffix != "ps":
        yield meant(
            f"{prefix}_maskz_loadu_{suffix}",
            lambda k, p: p.load_lanes(dtype, m.bits_of(k, lanes)).view(result),
        )
        yield meant(
            f"{prefix}_mask_storeu_{suffix}",
            lambda p, k, v: p.store_lanes(v.view(dtype), m.bits_of(k, lanes)),
        )
