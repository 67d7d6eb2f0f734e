"""Rows that integer kernels have around their products: saturation, packing, widening, 64 bits.

In: lane count, of 32 bits. Out: `Meant` rows. Registers are int32 lanes, seen as others here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dovetail.codegen.isa.x86_rows import PREFIXES
from tests.codegen.interp import meaning as m
from tests.codegen.interp.meant import Meant, meant
from tests.codegen.interp.memory import Pointer
from tests.codegen.interp.x86_bytes import lanewise

I8, U8, I16, U16, I32, I64 = np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64
U64 = np.uint64
_SIGNED: Mapping[int, Any] = {8: I8, 16: I16, 32: I32, 64: I64}


def saturated(dtype: Any, act: Callable[..., m.Array]) -> Callable[..., m.Array]:
    """Return the meaning of an operation on lanes of `dtype` that stops at their ends."""
    return lanewise(dtype, lambda a, b: narrowed(dtype, act(a.astype(I32), b.astype(I32))))


def narrowed(dtype: Any, v: m.Array) -> m.Array:
    """Return integers as the nearest that `dtype` holds."""
    ends = np.iinfo(dtype)
    out: m.Array = np.clip(v, ends.min, ends.max).astype(dtype)
    return out


def packed(source: Any, dtype: Any) -> Callable[[m.Array, m.Array], m.Array]:
    """Return the meaning of `pack`: a, then b, in each 128-bit block, saturated to `dtype`."""
    count = 16 // np.dtype(source).itemsize

    def meaning(a: m.Array, b: m.Array) -> m.Array:
        blocks = [v.view(source).reshape(-1, count) for v in (a, b)]
        return narrowed(dtype, np.concatenate(blocks, axis=1).reshape(-1)).view(I32)

    return meaning


def interleaved(dtype: Any, upper: int) -> Callable[[m.Array, m.Array], m.Array]:
    """Return the meaning of `unpack`: the lower or upper halves of each 128-bit block in turns."""
    count = 16 // np.dtype(dtype).itemsize
    half = slice(count // 2 * upper, count // 2 * (upper + 1))

    def meaning(a: m.Array, b: m.Array) -> m.Array:
        x, y = (v.view(dtype).reshape(-1, count)[:, half] for v in (a, b))
        return np.ascontiguousarray(np.stack([x, y], axis=2)).reshape(-1).view(I32)

    return meaning


def shifted(dtype: Any, left: bool) -> Callable[[m.Array, int], m.Array]:
    """Return the meaning of a shift by an immediate; signed lanes keep their sign to the right."""
    bits = 8 * np.dtype(dtype).itemsize

    def meaning(v: m.Array, n: int) -> m.Array:
        lanes = v.view(dtype)
        if n >= bits and (left or lanes.dtype.kind == "u"):
            return np.zeros_like(v)
        by = dtype(min(n, bits - 1))
        moved: m.Array = lanes << by if left else lanes >> by
        return moved.view(I32)

    return meaning


def word_rows(lanes: int) -> Iterator[Meant]:
    """Yield what has one form at 128, 256 and 512 bits."""
    prefix = PREFIXES[lanes]
    for name, dtype in (("epi8", I8), ("epi16", I16), ("epu8", U8), ("epu16", U16)):
        yield meant(f"{prefix}_adds_{name}", saturated(dtype, np.add))
        yield meant(f"{prefix}_subs_{name}", saturated(dtype, np.subtract))
        yield meant(f"{prefix}_min_{name}", lanewise(dtype, np.minimum))
        yield meant(f"{prefix}_max_{name}", lanewise(dtype, np.maximum))
    yield meant(f"{prefix}_mullo_epi16", lanewise(I16, np.multiply))
    for name, dtype in (("epi16", I16), ("epu16", U16)):
        yield meant(f"{prefix}_mulhi_{name}", lanewise(dtype, _upper_product))
    for name, source, dtype in (
        ("packs_epi16", I16, I8),
        ("packus_epi16", I16, U8),
        ("packs_epi32", I32, I16),
    ):
        yield meant(f"{prefix}_{name}", packed(source, dtype))
    for bits, lane in _SIGNED.items():
        for half, upper in (("lo", 0), ("hi", 1)):
            yield meant(f"{prefix}_unpack{half}_epi{bits}", interleaved(lane, upper))
    yield from _shifts(prefix)
    yield from _wider(prefix, lanes)


def _upper_product(a: m.Array, b: m.Array) -> m.Array:
    return (a.astype(I64) * b.astype(I64)) >> 16


def _shifts(prefix: str) -> Iterator[Meant]:
    for bits, unsigned in ((16, U16), (64, U64)):
        tried = (0, 1, 4, bits - 1, bits)
        for name, left in (("slli", True), ("srli", False)):
            yield meant(f"{prefix}_{name}_epi{bits}", shifted(unsigned, left), immediates=tried)
    yield meant(f"{prefix}_srai_epi16", shifted(I16, left=False), immediates=(0, 1, 15, 16))


def _wider(prefix: str, lanes: int) -> Iterator[Meant]:
    for name, source, dtype in (
        ("cvtepi8_epi16", I8, I16),
        ("cvtepu8_epi16", U8, I16),
        ("cvtepi32_epi64", I32, I64),
        ("cvtepu32_epi64", np.uint32, I64),
    ):
        count = 4 * lanes // np.dtype(dtype).itemsize
        yield meant(
            f"{prefix}_{name}",
            lambda v, s=source, d=dtype, n=count: v.view(s)[:n].astype(d).view(I32),
        )
    for name in ("add", "sub"):
        act = np.add if name == "add" else np.subtract
        yield meant(f"{prefix}_{name}_epi64", lanewise(I64, act))
    yield meant(
        f"{prefix}_set1_epi64{'' if lanes == 16 else 'x'}",
        lambda x: np.full(lanes // 2, x, I64).view(I32),
    )
    yield meant(
        f"{prefix}_broadcastq_epi64",
        lambda v: np.tile(v[:2], lanes // 2),
    )


def narrow_rows(lanes: int) -> Iterator[Meant]:
    """Yield what ends with 256 bits: sums of neighbours, blends of words."""
    prefix = PREFIXES[lanes]
    for bits, dtype in ((16, I16), (32, I32)):
        yield meant(f"{prefix}_hadd_epi{bits}", _neighbours(dtype))
    yield meant(
        f"{prefix}_blend_epi16",
        lambda a, b, k: np.where(
            np.tile(m.bits_of(k, 8), lanes // 4), b.view(I16), a.view(I16)
        ).view(I32),
        immediates=(0x00, 0xCC, 0x55, 0xFF),
    )


def _neighbours(dtype: Any) -> Callable[[m.Array, m.Array], m.Array]:
    count = 16 // np.dtype(dtype).itemsize

    def meaning(a: m.Array, b: m.Array) -> m.Array:
        x, y = (v.view(dtype).reshape(-1, count) for v in (a, b))
        sums = [v[:, 0::2] + v[:, 1::2] for v in (x, y)]
        return np.concatenate(sums, axis=1).reshape(-1).view(I32)

    return meaning


def move_rows() -> Iterator[Meant]:
    """Yield moves of parts of 128- and 256-bit registers."""
    for bits, dtype in ((8, U8), (16, U16), (32, I32)):
        yield meant(
            f"_mm_extract_epi{bits}",
            lambda v, i, dtype=dtype: I32(v.view(dtype)[i]),
            immediates=range(128 // bits),
        )
    for bits in (16, 32, 64):
        yield meant(
            f"_mm_storeu_si{bits}",
            lambda p, v, lane=_SIGNED[bits]: p.store(v.view(lane)[:1]),
        )
    yield meant("_mm_loadu_si64", _load_half)
    yield meant(
        "_mm256_permute4x64_epi64",
        lambda v, k: v.reshape(4, 2)[[(k >> (2 * i)) & 3 for i in range(4)]].reshape(-1),
        immediates=(0x00, 0xD8, 0x4E, 0x1B),
    )


def _load_half(p: Pointer) -> m.Array:
    return np.concatenate([p.load(I32, 2), np.zeros(2, I32)])


def wide_rows() -> Iterator[Meant]:
    """Yield what AVX-512 adds: saturating conversions, moves over 512 bits, other names."""
    for name, dtype in (("epi8", I8), ("epi16", I16)):
        yield meant(
            f"_mm512_cvtsepi32_{name}",
            lambda v, dtype=dtype: narrowed(dtype, v).view(I32),
        )
    yield meant(
        "_mm512_extracti64x4_epi64",
        lambda v, i: v[8 * (i & 1) : 8 * (i & 1) + 8].copy(),
        immediates=(0, 1),
    )
    yield meant(
        "_mm_mask_storeu_epi8",
        lambda p, k, v: p.store_lanes(v.view(U8), m.bits_of(k, 16)),
    )


def masked_rows() -> Iterator[Meant]:
    """Yield operations on 64 bytes under a mask, and that of their signs."""
    for name, op in (("add", np.add), ("sub", np.subtract)):
        yield meant(
            f"_mm512_mask_{name}_epi8",
            lambda s, k, a, b, op=op: lanewise(
                I8, lambda s, a, b: np.where(m.bits_of(k, 64), op(a, b), s)
            )(s, a, b),
        )
    yield meant(
        "_mm512_movepi8_mask",
        lambda v: np.uint64(m.mask_of(v.view(I8) < 0)),
    )
