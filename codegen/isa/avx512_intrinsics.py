"""AVX-512 F, BW, DQ and VL intrinsics with their numpy meanings, on top of those of AVX2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic, table
from dovetail.codegen.isa.memory import Pointer
from dovetail.codegen.isa.x86_bytes import byte_rows, lanewise
from dovetail.codegen.isa.x86_rows import (
    ROUNDINGS,
    first,
    float_rows,
    integer_rows,
    widening_rows,
)
from dovetail.codegen.isa.x86_words import wide_rows, word_rows

F32, I32, U16 = np.float32, np.int32, np.uint16
ELEMENTS = {"ps": F32, "epi32": I32, "epi16": U16}


def _mask_load(p: Pointer, mask: int, dtype: Any, lanes: int) -> m.Array:
    return p.load_lanes(dtype, m.bits_of(mask, lanes))


def _masked_memory(bits: int, suffix: str) -> Iterator[Intrinsic]:
    """Yield masked loads and stores of `bits`-bit vectors; masked-off lanes are never touched."""
    dtype = ELEMENTS[suffix]
    lanes = bits // (8 * np.dtype(dtype).itemsize)
    prefix = {128: "_mm", 256: "_mm256", 512: "_mm512"}[bits]
    vec = f"__m{bits}" if suffix == "ps" else f"__m{bits}i"
    result: Any = F32 if suffix == "ps" else I32
    mask = f"__mmask{max(8, lanes)}"

    def maskz(k: int, p: Pointer) -> m.Array:
        return _mask_load(p, k, dtype, lanes).view(result)

    def keep(source: m.Array, k: int, p: Pointer) -> m.Array:
        loaded = _mask_load(p, k, dtype, lanes)
        return np.where(m.bits_of(k, lanes), loaded, source.view(dtype)).view(result)

    def put(p: Pointer, k: int, v: m.Array) -> None:
        p.store_lanes(v.view(dtype), m.bits_of(k, lanes))

    yield intrinsic(f"{prefix}_maskz_loadu_{suffix}", f"{mask}, const void* -> {vec}", maskz)
    yield intrinsic(f"{prefix}_mask_loadu_{suffix}", f"{vec}, {mask}, const void* -> {vec}", keep)
    yield intrinsic(f"{prefix}_mask_storeu_{suffix}", f"void*, {mask}, {vec} -> void", put)


def _masked_arithmetic() -> Iterator[Intrinsic]:
    """Yield 512-bit operations under a mask: with zeroing, with merging, and blends."""
    for name, op in (
        ("add", np.add),
        ("sub", np.subtract),
        ("mul", np.multiply),
        ("div", np.divide),
        ("max", m.max_second),
        ("min", m.min_second),
    ):
        yield intrinsic(
            f"_mm512_maskz_{name}_ps",
            "__mmask16, __m512, __m512 -> __m512",
            lambda k, a, b, op=op: np.where(m.bits_of(k, 16), op(a, b), F32(0)),
        )
        yield intrinsic(
            f"_mm512_mask_{name}_ps",
            "__m512, __mmask16, __m512, __m512 -> __m512",
            lambda s, k, a, b, op=op: np.where(m.bits_of(k, 16), op(a, b), s),
        )
    yield intrinsic(
        "_mm512_mask_fmadd_ps",
        "__m512, __mmask16, __m512, __m512 -> __m512",
        lambda a, k, b, c: np.where(m.bits_of(k, 16), m.fma(a, b, c), a),
    )
    yield intrinsic(
        "_mm512_mask3_fmadd_ps",
        "__m512, __m512, __m512, __mmask16 -> __m512",
        lambda a, b, c, k: np.where(m.bits_of(k, 16), m.fma(a, b, c), c),
    )
    for suffix, vec in (("ps", "__m512"), ("epi32", "__m512i")):
        yield intrinsic(
            f"_mm512_mask_blend_{suffix}",
            f"__mmask16, {vec}, {vec} -> {vec}",
            lambda k, a, b: np.where(m.bits_of(k, 16), b, a),
        )
    for bits, mask in ((128, "__mmask8"), (256, "__mmask8"), (512, "__mmask16")):
        prefix = "_mm" if bits == 128 else f"_mm{bits}"
        yield intrinsic(
            f"{prefix}_cmp_ps_mask",
            f"__m{bits}, __m{bits}, imm -> {mask}",
            lambda a, b, mode: m.mask_of(m.compare_mode(a, b, mode)),
            immediates=range(32),
        )
    yield intrinsic(
        "_mm512_cmpgt_epi32_mask",
        "__m512i, __m512i -> __mmask16",
        lambda a, b: U16(m.mask_of(a > b)),
    )


def _masked_bytes() -> Iterator[Intrinsic]:
    """Yield operations on 64 bytes under a mask, and that of their signs."""
    for name, op in (("add", np.add), ("sub", np.subtract)):
        yield intrinsic(
            f"_mm512_mask_{name}_epi8",
            "__m512i, __mmask64, __m512i, __m512i -> __m512i",
            lambda s, k, a, b, op=op: lanewise(
                np.int8, lambda s, a, b: np.where(m.bits_of(k, 64), op(a, b), s)
            )(s, a, b),
        )
    yield intrinsic(
        "_mm512_movepi8_mask",
        "__m512i -> __mmask64",
        lambda v: np.uint64(m.mask_of(v.view(np.int8) < 0)),
    )


def _reductions() -> Iterator[Intrinsic]:
    """Yield the reductions: upper half onto lower half until one lane is left."""
    for name, op in (("add", np.add), ("max", m.max_second), ("min", m.min_second)):
        yield intrinsic(
            f"_mm512_reduce_{name}_ps",
            "__m512 -> float",
            lambda v, op=op: m.halves_tree(op, v),
            op=f"vreduce_{name}({{0}})",
            lanes=16,
        )


def _parts() -> Iterator[Intrinsic]:
    """Yield moves between 512-bit registers and narrower ones."""
    yield intrinsic("_mm512_castps512_ps256", "__m512 -> __m256", lambda v: v[:8].copy())
    yield intrinsic("_mm512_castps512_ps128", "__m512 -> __m128", lambda v: v[:4].copy())
    yield intrinsic("_mm512_castsi512_si256", "__m512i -> __m256i", lambda v: v[:8].copy())
    yield intrinsic("_mm512_castps256_ps512", "__m256 -> __m512", _pad_f32)
    yield intrinsic("_mm512_castps128_ps512", "__m128 -> __m512", _pad_f32)
    yield intrinsic(
        "_mm512_extractf32x8_ps",
        "__m512, imm -> __m256",
        lambda v, i: v[8 * (i & 1) : 8 * (i & 1) + 8].copy(),
        immediates=(0, 1),
    )
    yield intrinsic(
        "_mm512_shuffle_f32x4",
        "__m512, __m512, imm -> __m512",
        m.shuffle_blocks,
        immediates=(0x4E, 0xB1),
    )
    yield intrinsic(
        "_mm512_extractf32x4_ps",
        "__m512, imm -> __m128",
        lambda v, i: v[4 * (i & 3) : 4 * (i & 3) + 4].copy(),
        immediates=range(4),
    )
    yield intrinsic(
        "_mm512_insertf32x8",
        "__m512, __m256, imm -> __m512",
        lambda v, w, i: np.concatenate([v[:8], w] if i & 1 else [w, v[8:]]),
        immediates=(0, 1),
    )
    yield intrinsic("_mm512_broadcast_f32x4", "__m128 -> __m512", lambda v: np.tile(v, 4))
    yield intrinsic("_mm512_broadcastss_ps", "__m128 -> __m512", lambda v: np.full(16, v[0], F32))
    yield intrinsic(
        "_mm512_broadcastd_epi32", "__m128i -> __m512i", lambda v: np.full(16, v[0], I32)
    )
    yield intrinsic("_mm512_permutexvar_ps", "__m512i, __m512 -> __m512", lambda i, v: v[i & 15])
    yield intrinsic(
        "_mm512_permutex2var_ps",
        "__m512, __m512i, __m512 -> __m512",
        lambda a, i, b: np.concatenate([a, b])[i & 31],
    )
    for bits, dtype, half in ((16, U16, "__m256i"), (8, np.uint8, "__m128i")):
        yield intrinsic(
            f"_mm512_cvtepi32_epi{bits}",
            f"__m512i -> {half}",
            lambda v, dtype=dtype: v.view(np.uint32).astype(dtype).view(I32),
        )
    yield intrinsic("_mm512_cvtsi512_si32", "__m512i -> int", first)


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
        *byte_rows(16),
        *word_rows(16),
        *wide_rows(),
        *_masked_bytes(),
        *_reductions(),
        *_parts(),
        intrinsic("_mm512_abs_ps", "__m512 -> __m512", np.abs, op="vabs({0})", lanes=16),
        intrinsic(
            "_mm512_roundscale_ps",
            "__m512, imm -> __m512",
            m.round_mode,
            immediates=ROUNDINGS,
        ),
        intrinsic("_cvtu32_mask16", "unsigned -> __mmask16", lambda x: U16(int(x) & 0xFFFF)),
        intrinsic("_cvtmask16_u32", "__mmask16 -> unsigned", np.uint32),
        intrinsic("_cvtu32_mask8", "unsigned -> __mmask8", lambda x: np.uint8(int(x) & 0xFF)),
    ]
)
