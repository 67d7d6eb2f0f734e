"""AVX-512 F, BW, DQ and VL intrinsics, with the meanings of those that move lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa import x86_integers
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic, meanings, signatures, table
from dovetail.codegen.isa.x86_rows import (
    ARITHMETIC,
    LOGIC,
    PREFIXES,
    first,
    float_rows,
    integer_rows,
    widening_rows,
)

F32, I32, U16 = np.float32, np.int32, np.uint16


def _masked_memory(bits: int, suffix: str) -> Iterator[Intrinsic]:
    """Yield masked loads and stores of `bits`-bit vectors; masked-off lanes are never touched."""
    lanes = bits // (16 if suffix == "epi16" else 32)
    vec = f"__m{bits}" if suffix == "ps" else f"__m{bits}i"
    prefix, mask = f"{PREFIXES[bits // 32]}_mask", f"__mmask{max(8, lanes)}"

    def load(k: int, p: Any) -> Any:
        return p.load_lanes(F32, m.bits_of(k, lanes))

    def put(p: Any, k: int, v: m.Array) -> None:
        p.store_lanes(v, m.bits_of(k, lanes))

    floats = suffix == "ps"
    read, write = f"{mask}, const void* -> {vec}", f"void*, {mask}, {vec} -> void"
    yield intrinsic(f"{prefix}z_loadu_{suffix}", read, load if floats else None)
    yield intrinsic(f"{prefix}_loadu_{suffix}", f"{vec}, {read}")
    yield intrinsic(f"{prefix}_storeu_{suffix}", write, put if floats else None)


def _masked_arithmetic() -> Iterator[Intrinsic]:
    """Yield 512-bit operations under a mask: with zeroing, with merging, and blends."""
    zeroing, merging = "__mmask16, __m512, __m512 -> __m512", "__m512, __mmask16, __m512, __m512"
    for name, op in ARITHMETIC.items():
        merged = _merged(op)
        yield intrinsic(f"_mm512_maskz_{name}_ps", zeroing, partial(merged, F32(0)))
        yield intrinsic(f"_mm512_mask_{name}_ps", f"{merging} -> __m512", merged)
    yield from signatures(
        {
            "maskz_max_ps maskz_min_ps": zeroing,
            "mask_max_ps mask_min_ps mask_fmadd_ps": f"{merging} -> __m512",
            "mask3_fmadd_ps": "__m512, __m512, __m512, __mmask16 -> __m512",
        },
        "_mm512_",
    )
    for suffix, vec in (("ps", "__m512"), ("epi32", "__m512i")):
        yield intrinsic(
            f"_mm512_mask_blend_{suffix}",
            f"__mmask16, {vec}, {vec} -> {vec}",
            lambda k, a, b: np.where(m.bits_of(k, 16), b, a),
        )
    for lanes, prefix in PREFIXES.items():
        vec = f"__m{32 * lanes}"
        yield intrinsic(f"{prefix}_cmp_ps_mask", f"{vec}, {vec}, imm -> __mmask{max(8, lanes)}")
    yield intrinsic(
        "_mm512_cmpgt_epi32_mask",
        "__m512i, __m512i -> __mmask16",
        lambda a, b: U16(m.mask_of(a > b)),
    )


def _merged(op: Callable[[m.Array, m.Array], m.Array]) -> Callable[..., m.Array]:
    return lambda s, k, a, b: np.where(m.bits_of(k, 16), op(a, b), s)


def _parts() -> Iterator[Intrinsic]:
    """Yield moves between 512-bit registers and narrower ones."""
    joined = "{0}, __m512i, {0} -> {0}"
    yield from meanings(
        {
            "_mm512_castps512_ps256": ("__m512 -> __m256", lambda v: v[:8].copy()),
            "_mm512_castps512_ps128": ("__m512 -> __m128", lambda v: v[:4].copy()),
            "_mm512_castsi512_si256": ("__m512i -> __m256i", lambda v: v[:8].copy()),
            "_mm512_castps256_ps512": ("__m256 -> __m512", _pad_f32),
            "_mm512_castps128_ps512": ("__m128 -> __m512", _pad_f32),
            "_mm512_extractf32x8_ps": (
                "__m512, imm -> __m256",
                lambda v, i: v[8 * (i & 1) : 8 * (i & 1) + 8].copy(),
            ),
            "_mm512_shuffle_f32x4": ("__m512, __m512, imm -> __m512", m.shuffle_blocks),
            "_mm512_extractf32x4_ps": (
                "__m512, imm -> __m128",
                lambda v, i: v[4 * (i & 3) : 4 * (i & 3) + 4].copy(),
            ),
            "_mm512_insertf32x8": (
                "__m512, __m256, imm -> __m512",
                lambda v, w, i: np.concatenate([v[:8], w] if i & 1 else [w, v[8:]]),
            ),
            "_mm512_broadcast_f32x4": ("__m128 -> __m512", lambda v: np.tile(v, 4)),
            "_mm512_broadcastd_epi32": ("__m128i -> __m512i", lambda v: np.full(16, v[0], I32)),
            "_mm512_permutexvar_ps": ("__m512i, __m512 -> __m512", lambda i, v: v[i & 15]),
            "_mm512_permutex2var_ps": (joined.format("__m512"), _pick),
            "_mm512_permutex2var_epi32": (joined.format("__m512i"), _pick),
            "_mm512_setzero_epi32": ("-> __m512i", lambda: np.zeros(16, I32)),
            "_mm512_cvtsi512_si32": ("__m512i -> int", first),
        }
    )
    yield from signatures(
        {
            "broadcastss_ps": "__m128 -> __m512",
            "load_epi32": "const void* -> __m512i",
            "cvtepi32_epi16": "__m512i -> __m256i",
            "cvtepi32_epi8": "__m512i -> __m128i",
        },
        "_mm512_",
    )
    for name, act in LOGIC.items():
        op = f"v{name}_i32({{0}}, {{1}})"
        for bits in (32, 64):
            signature = "__m512i, __m512i -> __m512i"
            yield intrinsic(f"_mm512_{name}_epi{bits}", signature, act, op=op, lanes=16)


def _pick(a: m.Array, i: m.Array, b: m.Array) -> Any:
    return np.concatenate([a, b])[i & 31]


def _pad_f32(v: m.Array) -> m.Array:
    return np.concatenate([v, np.zeros(16 - v.size, F32)])


INTRINSICS = table(
    [
        *float_rows(16),
        *integer_rows(16),
        *widening_rows(16),
        *(row for bits in (128, 256, 512) for row in _masked_memory(bits, "ps")),
        *(row for bits in (128, 256, 512) for row in _masked_memory(bits, "epi32")),
        *(row for bits in (128, 256) for row in _masked_memory(bits, "epi16")),
        *_masked_arithmetic(),
        *x86_integers.integer_rows(16),
        *x86_integers.wide_rows(),
        *(
            intrinsic(
                f"_mm512_reduce_{n}_ps", "__m512 -> float", op=f"vreduce_{n}({{0}})", lanes=16
            )
            for n in ("add", "max", "min")
        ),
        *_parts(),
        intrinsic("_mm512_abs_ps", "__m512 -> __m512", op="vabs({0})", lanes=16),
        intrinsic("_mm512_roundscale_ps", "__m512, imm -> __m512"),
        intrinsic("_cvtu32_mask16", "unsigned -> __mmask16", lambda x: U16(int(x) & 0xFFFF)),
        intrinsic("_cvtmask16_u32", "__mmask16 -> unsigned", np.uint32),
        intrinsic("_cvtu32_mask8", "unsigned -> __mmask8", lambda x: np.uint8(int(x) & 0xFF)),
    ]
)
