"""SSE, AVX, AVX2, FMA and F16C intrinsics, with the meanings of those that move lanes.

In: nothing. Out: `INTRINSICS` by name, and `CONSTANTS` that the C headers define.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dovetail.codegen.isa import generic, x86_integers
from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import (
    Intrinsic,
    Meaning,
    intrinsic,
    meanings,
    signatures,
    table,
)
from dovetail.codegen.isa.x86_rows import (
    ARITHMETIC,
    PREFIXES,
    first,
    float_rows,
    integer_rows,
    widening_rows,
)

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

    def meaning(a: m.Array, b: m.Array) -> m.Array:
        out = a.copy()
        out[0] = op(a[:1], b[:1])[0]
        return out

    return meaning


def _vector_pair(lanes: int) -> Iterator[Intrinsic]:
    """Yield what exists at 128 and 256 bits but not in the same form at 512."""
    prefix, flt, vec = PREFIXES[lanes], f"__m{32 * lanes}", f"__m{32 * lanes}i"
    two = f"{vec}, {vec} -> {vec}"
    yield intrinsic(
        f"{prefix}_broadcast_ss", f"const float* -> {flt}", op="vbroadcast({0}[0])", lanes=lanes
    )
    yield from signatures(
        {
            "cmp_ps": f"{flt}, {flt}, imm -> {flt}",
            "round_ps": f"{flt}, imm -> {flt}",
            "floor_ps ceil_ps": f"{flt} -> {flt}",
            "maskload_epi32": f"const int*, {vec} -> {vec}",
            "packus_epi32": two,
        },
        f"{prefix}_",
    )
    rows: dict[str, tuple[str, Meaning]] = {
        "blendv_ps": (
            f"{flt}, {flt}, {flt} -> {flt}",
            lambda a, b, c: np.where(_sign_bits(c), b, a),
        ),
        "blendv_epi8": (f"{vec}, {vec}, {vec} -> {vec}", _blend_bytes),
        "hadd_ps": (f"{flt}, {flt} -> {flt}", _hadd),
        "movemask_ps": (f"{flt} -> int", lambda v: I32(m.mask_of(_sign_bits(v)))),
        "maskload_ps": (
            f"const float*, {vec} -> {flt}",
            lambda p, mask: p.load_lanes(F32, mask < 0),
        ),
        "maskstore_ps": (f"float*, {vec}, {flt} -> void", _mask_store),
        "maskstore_epi32": (f"int*, {vec}, {vec} -> void", _mask_store),
        "cmpgt_epi32": (two, lambda a, b: m.lane_mask(a > b, I32)),
        "cmpeq_epi32": (two, lambda a, b: m.lane_mask(a == b, I32)),
    }
    yield from meanings({f"{prefix}_{name}": row for name, row in rows.items()})


def _mask_store(p: Any, mask: m.Array, v: m.Array) -> None:
    p.store_lanes(v, mask < 0)


def _lane_zero() -> Iterator[Intrinsic]:
    """Yield SSE's comparisons, the `_ss` instructions and single-lane moves."""
    one, two = "__m128 -> __m128", "__m128, __m128 -> __m128"
    for name in ("_mm_load1_ps", "_mm_load_ps1"):
        yield intrinsic(name, "const float* -> __m128", op="vbroadcast({0}[0])", lanes=4)
    yield intrinsic("_mm_set_ps1", "float -> __m128", op="vbroadcast({0})", lanes=4)
    compares = " ".join(f"cmp{name}_ps" for name in ("eq", "lt", "le", "neq", "ge", "gt"))
    yield from signatures(
        {
            f"{compares} min_ss max_ss": two,
            "sqrt_ss": one,
            "fmadd_ss": "__m128, __m128, __m128 -> __m128",
            "undefined_ps": "-> __m128",
            "set_ss": "float -> __m128",
            "load_ss": "const float* -> __m128",
            "loadu_si32": "const void* -> __m128i",
            "broadcastss_ps": one,
        },
        "_mm_",
    )
    yield from signatures(
        {
            "_cvtsh_ss": "unsigned short -> float",
            "_cvtss_sh": "float, imm -> unsigned short",
        }
    )
    yield from meanings(
        {
            **{f"_mm_{name}_ss": (two, _low_lane(op)) for name, op in ARITHMETIC.items()},
            "_mm_store_ss": ("float*, __m128 -> void", lambda p, v: p.store(v[:1])),
            "_mm_storel_pi": ("__m64*, __m128 -> void", lambda p, v: p.store(v[:2])),
            "_mm_storeh_pi": ("__m64*, __m128 -> void", lambda p, v: p.store(v[2:])),
            "_mm_loadl_pi": (
                "__m128, const __m64* -> __m128",
                lambda v, p: np.concatenate([p.load(F32, 2), v[2:]]),
            ),
            "_mm_loadh_pi": (
                "__m128, const __m64* -> __m128",
                lambda v, p: np.concatenate([v[:2], p.load(F32, 2)]),
            ),
            "_mm_movehl_ps": (two, lambda a, b: np.concatenate([b[2:], a[2:]])),
            "_mm_movelh_ps": (two, lambda a, b: np.concatenate([a[:2], b[:2]])),
            "_mm_move_ss": (two, lambda a, b: np.concatenate([b[:1], a[1:]])),
            "_mm_cvtsi128_si32": ("__m128i -> int", first),
            "_mm_cvtsi32_si128": ("int -> __m128i", lambda x: np.array([x, 0, 0, 0], I32)),
            "_mm_loadl_epi64": (
                "const __m128i* -> __m128i",
                lambda p: np.concatenate([p.load(I32, 2), np.zeros(2, I32)]),
            ),
            "_mm_storel_epi64": ("__m128i*, __m128i -> void", lambda p, v: p.store(v[:2])),
        }
    )


def _halves() -> Iterator[Intrinsic]:
    """Yield moves between 128- and 256-bit registers and across 128-bit blocks."""
    for half, whole, narrow, wide, part, name in (
        ("__m128", "__m256", "ps128", "ps256", "f128", "ps"),
        ("__m128i", "__m256i", "si128", "si256", "i128", "si256"),
    ):
        yield from meanings(
            {
                f"_mm256_cast{wide}_{narrow}": (f"{whole} -> {half}", lambda v: v[:4].copy()),
                f"_mm256_cast{narrow}_{wide}": (
                    f"{half} -> {whole}",
                    lambda v: np.concatenate([v, np.zeros_like(v)]),
                ),
                f"_mm256_extract{part}_{name}": (
                    f"{whole}, imm -> {half}",
                    lambda v, i: v[4 * (i & 1) : 4 * (i & 1) + 4].copy(),
                ),
                f"_mm256_insert{part}_{name}": (f"{whole}, {half}, imm -> {whole}", _insert_half),
            }
        )
    yield intrinsic("_mm256_broadcastss_ps", "__m128 -> __m256")
    yield from meanings(
        {
            "_mm256_permute2f128_ps": ("__m256, __m256, imm -> __m256", _permute_halves),
            "_mm256_set_m128": (
                "__m128, __m128 -> __m256",
                lambda high, low: np.concatenate([low, high]),
            ),
            "_mm256_broadcast_ps": (
                "const __m128* -> __m256",
                lambda p: np.tile(p.load(F32, 4), 2),
            ),
            "_mm256_broadcastd_epi32": ("__m128i -> __m256i", lambda v: np.full(8, v[0], I32)),
            "_mm256_permutevar8x32_ps": ("__m256, __m256i -> __m256", lambda v, i: v[i & 7]),
            "_mm256_permutevar8x32_epi32": ("__m256i, __m256i -> __m256i", lambda v, i: v[i & 7]),
        }
    )


def _shuffle_constant(a: int, b: int, c: int, d: int) -> int:
    return int(a) << 6 | int(b) << 4 | int(c) << 2 | int(d)


INTRINSICS = {
    **generic.INTRINSICS,
    **table(
        [
            *(row for lanes in (4, 8) for row in float_rows(lanes)),
            *(row for lanes in (4, 8) for row in integer_rows(lanes)),
            *(row for lanes in (4, 8) for row in widening_rows(lanes)),
            *(row for lanes in (4, 8) for row in x86_integers.integer_rows(lanes)),
            *(row for lanes in (4, 8) for row in x86_integers.narrow_rows(lanes)),
            *x86_integers.move_rows(),
            *(row for lanes in (4, 8) for row in _vector_pair(lanes)),
            *_lane_zero(),
            *_halves(),
            intrinsic("_mm_prefetch", "const char*, imm -> void", op="prefetch({0})"),
            intrinsic("_MM_SHUFFLE", "imm, imm, imm, imm -> int", _shuffle_constant),
        ]
    ),
}
