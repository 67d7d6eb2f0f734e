"""SSE, AVX, AVX2, FMA and F16C intrinsics with their numpy meanings.

In: nothing. Out: `INTRINSICS` by name, and `CONSTANTS` that the C headers define.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dovetail.codegen.isa import generic
from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic, table
from dovetail.codegen.isa.memory import Pointer
from dovetail.codegen.isa.x86_bytes import byte_rows, sign_rows
from dovetail.codegen.isa.x86_rows import (
    ROUNDINGS,
    first,
    float_rows,
    integer_rows,
    splat,
    widening_rows,
)
from dovetail.codegen.isa.x86_words import move_rows, narrow_rows, word_rows

F32, I32 = np.float32, np.int32

CONSTANTS = {
    **{
        f"_CMP_{name}": value
        for value, name in enumerate(
            "EQ_OQ LT_OS LE_OS UNORD_Q NEQ_UQ NLT_US NLE_US ORD_Q EQ_UQ NGE_US NGT_US FALSE_OQ "
            "NEQ_OQ GE_OS GT_OS TRUE_UQ EQ_OS LT_OQ LE_OQ UNORD_S NEQ_US NLT_UQ NLE_UQ ORD_S EQ_US "
            "NGE_UQ NGT_UQ FALSE_OS NEQ_OS GE_OQ GT_OQ TRUE_US".split()
        )
    },
    "_MM_HINT_T0": 3,
    "_MM_HINT_T1": 2,
    "_MM_HINT_T2": 1,
    "_MM_HINT_NTA": 0,
    "_MM_FROUND_TO_NEAREST_INT": 0,
    "_MM_FROUND_TO_NEG_INF": 1,
    "_MM_FROUND_TO_POS_INF": 2,
    "_MM_FROUND_TO_ZERO": 3,
    "_MM_FROUND_NO_EXC": 8,
}


def _sign_bits(mask: m.Array) -> m.Array:
    return np.less(mask.view(I32), 0)


def _blend_bytes(a: m.Array, b: m.Array, mask: m.Array) -> m.Array:
    chosen = np.where(mask.view(np.int8) < 0, b.view(np.int8), a.view(np.int8))
    out: m.Array = chosen.view(a.dtype)
    return out


def _hadd(a: m.Array, b: m.Array) -> m.Array:
    x, y = m.by_blocks(a), m.by_blocks(b)
    return np.concatenate([x[:, 0::2] + x[:, 1::2], y[:, 0::2] + y[:, 1::2]], axis=1).reshape(-1)


def _insert_half(a: m.Array, b: m.Array, which: int) -> m.Array:
    out = a.copy()
    out[4 * (which & 1) : 4 * (which & 1) + 4] = b
    return out


def _permute_halves(a: m.Array, b: m.Array, control: int) -> m.Array:
    parts = (a[:4], a[4:], b[:4], b[4:])
    zero = np.zeros(4, a.dtype)
    pick = [zero if c & 8 else parts[c & 3] for c in (control, control >> 4)]
    return np.concatenate(pick)


def _low_lane(op: Callable[..., Any]) -> Callable[..., m.Array]:
    """Return the meaning of a `_ss` instruction: lane 0 by `op`, the rest from operand one."""

    def meaning(a: m.Array, *others: m.Array) -> m.Array:
        out = a.copy()
        out[0] = op(a[:1], *(b[:1] for b in others))[0]
        return out

    return meaning


def _pack_unsigned(a: m.Array, b: m.Array) -> m.Array:
    x, y = m.by_blocks(a), m.by_blocks(b)
    joined = np.concatenate([x, y], axis=1).reshape(-1)
    packed: m.Array = np.clip(joined, 0, 0xFFFF).astype(np.uint16).view(I32)
    return packed


def _first_lane_f32(x: Any) -> m.Array:
    return np.array([x, 0, 0, 0], F32)


def _vector_pair(lanes: int) -> Iterator[Intrinsic]:
    """Yield what exists at 128 and 256 bits but not in the same form at 512."""
    prefix, flt, vec = ("_mm", "_mm256")[lanes // 8], f"__m{32 * lanes}", f"__m{32 * lanes}i"
    yield intrinsic(
        f"{prefix}_cmp_ps",
        f"{flt}, {flt}, imm -> {flt}",
        lambda a, b, mode: m.lane_mask(m.compare_mode(a, b, mode), F32),
        immediates=range(32),
    )
    yield intrinsic(
        f"{prefix}_blendv_ps",
        f"{flt}, {flt}, {flt} -> {flt}",
        lambda a, b, c: np.where(_sign_bits(c), b, a),
    )
    yield intrinsic(f"{prefix}_blendv_epi8", f"{vec}, {vec}, {vec} -> {vec}", _blend_bytes)
    yield intrinsic(
        f"{prefix}_round_ps",
        f"{flt}, imm -> {flt}",
        m.round_mode,
        immediates=ROUNDINGS,
    )
    yield intrinsic(f"{prefix}_floor_ps", f"{flt} -> {flt}", np.floor)
    yield intrinsic(f"{prefix}_ceil_ps", f"{flt} -> {flt}", np.ceil)
    yield intrinsic(f"{prefix}_hadd_ps", f"{flt}, {flt} -> {flt}", _hadd)
    yield intrinsic(
        f"{prefix}_broadcast_ss",
        f"const float* -> {flt}",
        lambda p: np.full(lanes, p.load(F32, 1)[0], F32),
        op="vbroadcast({0}[0])",
        lanes=lanes,
    )
    yield intrinsic(
        f"{prefix}_movemask_ps", f"{flt} -> int", lambda v: I32(m.mask_of(_sign_bits(v)))
    )
    for suffix, dtype, element, value in (("ps", F32, "float", flt), ("epi32", I32, "int", vec)):
        yield intrinsic(
            f"{prefix}_maskload_{suffix}",
            f"const {element}*, {vec} -> {value}",
            lambda p, mask, dtype=dtype: p.load_lanes(dtype, mask < 0),
        )
        yield intrinsic(
            f"{prefix}_maskstore_{suffix}",
            f"{element}*, {vec}, {value} -> void",
            lambda p, mask, v: p.store_lanes(v, mask < 0),
        )
    for name, compare in (("cmpgt", np.greater), ("cmpeq", np.equal)):
        yield intrinsic(
            f"{prefix}_{name}_epi32",
            f"{vec}, {vec} -> {vec}",
            lambda a, b, compare=compare: m.lane_mask(compare(a, b), I32),
        )
    yield intrinsic(f"{prefix}_packus_epi32", f"{vec}, {vec} -> {vec}", _pack_unsigned)


def _sse_compares() -> Iterator[Intrinsic]:
    """Yield SSE's comparisons, one name for each predicate."""
    for name, mode in (("eq", 0), ("lt", 1), ("le", 2), ("neq", 4), ("ge", 13), ("gt", 14)):
        yield intrinsic(
            f"_mm_cmp{name}_ps",
            "__m128, __m128 -> __m128",
            lambda a, b, mode=mode: m.lane_mask(m.compare_mode(a, b, mode), F32),
        )


def _lane_zero() -> Iterator[Intrinsic]:
    """Yield the `_ss` instructions and single-lane moves."""
    two = "__m128, __m128 -> __m128"
    for name, op in (
        ("add", np.add),
        ("sub", np.subtract),
        ("mul", np.multiply),
        ("div", np.divide),
        ("min", m.min_second),
        ("max", m.max_second),
    ):
        yield intrinsic(f"_mm_{name}_ss", two, _low_lane(op))
    yield intrinsic("_mm_sqrt_ss", "__m128 -> __m128", _low_lane(np.sqrt))
    yield intrinsic("_mm_fmadd_ss", "__m128, __m128, __m128 -> __m128", _low_lane(m.fma))
    yield intrinsic("_mm_undefined_ps", "-> __m128", lambda: np.zeros(4, F32))
    yield intrinsic("_mm_set_ss", "float -> __m128", _first_lane_f32)
    yield intrinsic(
        "_mm_load_ss", "const float* -> __m128", lambda p: _first_lane_f32(p.load(F32, 1)[0])
    )
    for name in ("_mm_load1_ps", "_mm_load_ps1"):
        yield intrinsic(
            name,
            "const float* -> __m128",
            lambda p: np.full(4, p.load(F32, 1)[0], F32),
            op="vbroadcast({0}[0])",
            lanes=4,
        )
    yield intrinsic("_mm_set_ps1", "float -> __m128", splat(F32, 4), op="vbroadcast({0})", lanes=4)
    yield intrinsic("_mm_store_ss", "float*, __m128 -> void", lambda p, v: p.store(v[:1]))
    yield intrinsic("_mm_storel_pi", "__m64*, __m128 -> void", lambda p, v: p.store(v[:2]))
    yield intrinsic("_mm_storeh_pi", "__m64*, __m128 -> void", lambda p, v: p.store(v[2:]))
    yield intrinsic(
        "_mm_loadl_pi",
        "__m128, const __m64* -> __m128",
        lambda v, p: np.concatenate([p.load(F32, 2), v[2:]]),
    )
    yield intrinsic(
        "_mm_loadh_pi",
        "__m128, const __m64* -> __m128",
        lambda v, p: np.concatenate([v[:2], p.load(F32, 2)]),
    )
    yield intrinsic("_mm_movehl_ps", two, lambda a, b: np.concatenate([b[2:], a[2:]]))
    yield intrinsic("_mm_movelh_ps", two, lambda a, b: np.concatenate([a[:2], b[:2]]))
    yield intrinsic("_mm_move_ss", two, lambda a, b: np.concatenate([b[:1], a[1:]]))
    yield intrinsic("_mm_cvtsi128_si32", "__m128i -> int", first)
    yield intrinsic("_mm_cvtsi32_si128", "int -> __m128i", lambda x: np.array([x, 0, 0, 0], I32))
    yield intrinsic("_mm_loadl_epi64", "const __m128i* -> __m128i", _load_low_half)
    yield intrinsic("_mm_storel_epi64", "__m128i*, __m128i -> void", lambda p, v: p.store(v[:2]))
    yield intrinsic("_cvtsh_ss", "unsigned short -> float", lambda h: m.f32_of_f16(h)[()])
    yield intrinsic(
        "_cvtss_sh",
        "float, imm -> unsigned short",
        lambda x, _mode: m.f16_bits(np.array(x, F32))[()],
        immediates=(0, 8),
    )


def _load_low_half(p: Pointer) -> m.Array:
    return np.concatenate([p.load(I32, 2), np.zeros(2, I32)])


def _halves() -> Iterator[Intrinsic]:
    """Yield moves between 128- and 256-bit registers and across 128-bit blocks."""
    for half, whole, name in (("__m128", "__m256", "ps"), ("__m128i", "__m256i", "si")):
        narrow, wide = (
            ("castps256_ps128", "castps128_ps256")
            if name == "ps"
            else ("castsi256_si128", "castsi128_si256")
        )
        extract = "_mm256_extractf128_ps" if name == "ps" else "_mm256_extracti128_si256"
        insert = "_mm256_insertf128_ps" if name == "ps" else "_mm256_inserti128_si256"
        yield intrinsic(f"_mm256_{narrow}", f"{whole} -> {half}", lambda v: v[:4].copy())
        yield intrinsic(
            f"_mm256_{wide}",
            f"{half} -> {whole}",
            lambda v: np.concatenate([v, np.zeros_like(v)]),
        )
        yield intrinsic(
            extract,
            f"{whole}, imm -> {half}",
            lambda v, i: v[4 * (i & 1) : 4 * (i & 1) + 4].copy(),
            immediates=(0, 1),
        )
        yield intrinsic(insert, f"{whole}, {half}, imm -> {whole}", _insert_half, immediates=(0, 1))
    yield intrinsic(
        "_mm256_permute2f128_ps",
        "__m256, __m256, imm -> __m256",
        _permute_halves,
        immediates=(0x00, 0x01, 0x20, 0x21, 0x31, 0x12, 0x08, 0x80),
    )
    yield intrinsic(
        "_mm256_set_m128", "__m128, __m128 -> __m256", lambda high, low: np.concatenate([low, high])
    )
    yield intrinsic(
        "_mm256_broadcast_ps", "const __m128* -> __m256", lambda p: np.tile(p.load(F32, 4), 2)
    )
    yield intrinsic(
        "_mm256_broadcastss_ps",
        "__m128 -> __m256",
        lambda v: np.full(8, v[0], F32),
    )
    yield intrinsic(
        "_mm256_broadcastd_epi32", "__m128i -> __m256i", lambda v: np.full(8, v[0], I32)
    )
    yield intrinsic("_mm_broadcastss_ps", "__m128 -> __m128", lambda v: np.full(4, v[0], F32))
    for suffix, kind in (("ps", "__m256"), ("epi32", "__m256i")):
        yield intrinsic(
            f"_mm256_permutevar8x32_{suffix}", f"{kind}, __m256i -> {kind}", lambda v, i: v[i & 7]
        )
    yield intrinsic(
        "_mm_loadu_si32",
        "const void* -> __m128i",
        lambda p: np.concatenate([p.load(I32, 1), np.zeros(3, I32)]),
    )


def _shuffle_constant(a: int, b: int, c: int, d: int) -> int:
    return int(a) << 6 | int(b) << 4 | int(c) << 2 | int(d)


def _hint(_pointer: Pointer, _kind: int) -> None:
    """Prefetching changes no value."""


INTRINSICS = {
    **generic.INTRINSICS,
    **table(
        [
            *(row for lanes in (4, 8) for row in float_rows(lanes)),
            *(row for lanes in (4, 8) for row in integer_rows(lanes)),
            *(row for lanes in (4, 8) for row in widening_rows(lanes)),
            *(row for lanes in (4, 8) for row in byte_rows(lanes)),
            *(row for lanes in (4, 8) for row in sign_rows(lanes)),
            *(row for lanes in (4, 8) for row in word_rows(lanes)),
            *(row for lanes in (4, 8) for row in narrow_rows(lanes)),
            *move_rows(),
            *(row for lanes in (4, 8) for row in _vector_pair(lanes)),
            *_sse_compares(),
            *_lane_zero(),
            *_halves(),
            intrinsic(
                "_mm_prefetch",
                "const char*, imm -> void",
                _hint,
                op="prefetch({0})",
                immediates=(0, 1, 2, 3),
            ),
            intrinsic(
                "_MM_SHUFFLE",
                "imm, imm, imm, imm -> int",
                _shuffle_constant,
                immediates=(0, 1, 2, 3),
            ),
        ]
    ),
}
