"""The numpy meaning of every instruction: of its table's row, else one of those told here."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from dovetail.codegen.isa.intrinsics import Intrinsic, Meaning
from tests.codegen.interp import (
    amx,
    cuda,
    neon_bytes,
    neon_floats,
    neon_words,
    x86_bytes,
    x86_floats,
    x86_words,
)
from tests.codegen.interp.dots import dot_pairs
from tests.codegen.interp.meant import Meant, meant
from tests.codegen.interp.vectors import VECTOR_TYPES

NARROW, WIDE = (4, 8), (4, 8, 16)
"""Widths of x86 registers, in lanes of 32 bits: those of AVX2, and of AVX-512, too."""
TOLD: dict[str, Meant] = {
    row.name: row
    for row in (
        meant("dt_f32_of_bits", lambda u: np.uint32(u).view(np.float32)),
        meant("dt_bits_of_f32", lambda x: np.float32(x).view(np.uint32)),
        meant("__builtin_prefetch", lambda _pointer, *_hints: None),
        *(row for lanes in WIDE for row in x86_floats.float_rows(lanes)),
        *(row for lanes in NARROW for row in x86_floats.narrow_rows(lanes)),
        *x86_floats.scalar_rows(),
        *x86_floats.masked_rows(),
        *neon_floats.rows(),
        *(row for lanes in WIDE for row in x86_bytes.byte_rows(lanes)),
        *(row for lanes in NARROW for row in x86_bytes.sign_rows(lanes)),
        *(row for lanes in WIDE for row in x86_bytes.vnni_rows(lanes, "epi32")),
        *(row for lanes in NARROW for row in x86_bytes.vnni_rows(lanes, "avx_epi32")),
        *(row for lanes in WIDE for row in x86_words.word_rows(lanes)),
        *(row for lanes in NARROW for row in x86_words.narrow_rows(lanes)),
        *x86_words.move_rows(),
        *x86_words.wide_rows(),
        *x86_words.masked_rows(),
        meant("_mm512_dpbf16_ps", dot_pairs),
        *neon_bytes.byte_rows(),
        *neon_bytes.dotprod_rows(),
        *neon_bytes.i8mm_rows(),
        *neon_words.word_rows(),
        *amx.ROWS,
        *cuda.ROWS,
    )
}


def meaning_of(row: Intrinsic) -> Meaning:
    """Return what an instruction does; KeyError where nothing tells."""
    return TOLD[row.name].meaning if row.meaning is None else row.meaning


TRIED: tuple[tuple[str, Iterable[int]], ...] = (
    (r".*_(shuffle_ps|permute_ps|shuffle_epi32)", (0x00, 0x1B, 0x4E, 0xB1, 0xE4, 0xFF, 0x93)),
    (r".*_s(ll|rl|ra)i_epi32", (0, 1, 7, 16, 23, 31, 32)),
    (r".*cvt(ps_ph|ss_sh)", (0, 8)),
    (r".*_cmp_ps(_mask)?", range(32)),
    (r".*round(scale)?_ps", (0, 8, 9, 10, 11)),
    (r"_mm512_(extractf32x8_ps|insertf32x8)|_mm256_(extract|insert)[fi]128_.*", (0, 1)),
    (r"_mm512_extractf32x4_ps|_mm_prefetch|_MM_SHUFFLE", range(4)),
    (r"_mm256_permute2f128_ps", (0x00, 0x01, 0x20, 0x21, 0x31, 0x12, 0x08, 0x80)),
    (r"_mm512_shuffle_f32x4", (0x4E, 0xB1)),
    (r"vshlq?_n_[su]8", (0, 1, 7)),
    (r"vshlq?_n_[su]16", (0, 1, 15)),
    (r"vshlq?_n_[su]32", (0, 1, 31)),
    (r"vshrq?_n_[su]8", (1, 4, 8)),
    (r"vshrq?_n_[su]16", (1, 8, 16)),
    (r"vshrq?_n_[su]32", (1, 16, 32)),
)
"""Names of instructions to the immediates to try; elsewhere these are lanes of a vector."""


def immediates_of(row: Intrinsic) -> tuple[int, ...]:
    """Return the immediates of an instruction to try."""
    if row.name in TOLD and TOLD[row.name].immediates:
        return TOLD[row.name].immediates
    if "imm" not in row.params:
        return ()
    for pattern, values in TRIED:
        if re.fullmatch(pattern, row.name):
            return tuple(values)
    return tuple(range(VECTOR_TYPES[row.params[-2]].lanes))
