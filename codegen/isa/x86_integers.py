"""Signatures of 8-, 16- and 64-bit integer instructions of SSE, AVX2, AVX-512 and VNNI.

In: lane count, of 32 bits. Out: `Intrinsic` rows without meaning: the lifter follows none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.codegen.isa.intrinsics import Intrinsic, dot_form, intrinsic, signatures
from dovetail.codegen.isa.x86_rows import PREFIXES

_TWO_OPERANDS = """
    maddubs_epi16 madd_epi16 shuffle_epi8 mullo_epi16 mulhi_epi16 mulhi_epu16
    packs_epi16 packus_epi16 packs_epi32 add_epi64 sub_epi64
""".split()
_TWO_OPERANDS += [f"{name}_epi{bits}" for name in ("add", "sub") for bits in (8, 16)]
_TWO_OPERANDS += [
    f"{name}_{kind}"
    for name in ("adds", "subs", "min", "max")
    for kind in ("epi8", "epi16", "epu8", "epu16")
]
_TWO_OPERANDS += [f"unpack{half}_epi{bits}" for half in ("lo", "hi") for bits in (8, 16, 32, 64)]


def integer_rows(lanes: int) -> Iterator[Intrinsic]:
    """Yield what has one form at 128, 256 and 512 bits."""
    vec, half = f"__m{32 * lanes}i", f"__m{max(128, 16 * lanes)}i"
    return signatures(
        {
            " ".join(_TWO_OPERANDS): f"{vec}, {vec} -> {vec}",
            "abs_epi8": f"{vec} -> {vec}",
            "slli_epi16 slli_epi64 srli_epi16 srli_epi64 srai_epi16": f"{vec}, imm -> {vec}",
            "cvtepi8_epi16 cvtepu8_epi16 cvtepi32_epi64 cvtepu32_epi64": f"{half} -> {vec}",
            "set1_epi8": f"char -> {vec}",
            "set1_epi16": f"short -> {vec}",
            f"set1_epi64{'' if lanes == 16 else 'x'}": f"long long -> {vec}",
            "broadcastq_epi64": f"__m128i -> {vec}",
        },
        f"{PREFIXES[lanes]}_",
    )


def narrow_rows(lanes: int) -> Iterator[Intrinsic]:
    """Yield what ends with 256 bits."""
    vec = f"__m{32 * lanes}i"
    return signatures(
        {
            "sign_epi8 hadd_epi16 hadd_epi32": f"{vec}, {vec} -> {vec}",
            "blend_epi16": f"{vec}, {vec}, imm -> {vec}",
        },
        f"{PREFIXES[lanes]}_",
    )


def move_rows() -> Iterator[Intrinsic]:
    """Yield moves of parts of 128- and 256-bit registers."""
    return signatures(
        {
            "_mm_extract_epi8 _mm_extract_epi16 _mm_extract_epi32": "__m128i, imm -> int",
            "_mm_storeu_si16 _mm_storeu_si32 _mm_storeu_si64": "void*, __m128i -> void",
            "_mm_loadu_si64": "const void* -> __m128i",
            "_mm256_permute4x64_epi64": "__m256i, imm -> __m256i",
        }
    )


def wide_rows() -> Iterator[Intrinsic]:
    """Yield what AVX-512 adds: operations under a mask of bytes, conversions that saturate."""
    return signatures(
        {
            "_mm512_mask_add_epi8 _mm512_mask_sub_epi8": (
                "__m512i, __mmask64, __m512i, __m512i -> __m512i"
            ),
            "_mm512_movepi8_mask": "__m512i -> __mmask64",
            "_mm512_cvtsepi32_epi8": "__m512i -> __m128i",
            "_mm512_cvtsepi32_epi16": "__m512i -> __m256i",
            "_mm512_extracti64x4_epi64": "__m512i, imm -> __m256i",
            "_mm_mask_storeu_epi8": "void*, __mmask16, __m128i -> void",
        }
    )


def vnni_rows(lanes: int, suffix: str) -> Iterator[Intrinsic]:
    """Yield VNNI's dot products of bytes and of words, which wrap (`s`: which saturate)."""
    prefix, vec = PREFIXES[lanes], f"__m{32 * lanes}i"
    three = f"{vec}, {vec}, {vec} -> {vec}"
    op = dot_form("{0}", "{1}", "{2}", "add")
    yield intrinsic(f"{prefix}_dpbusd_{suffix}", three, op=op, lanes=lanes)
    yield intrinsic(f"{prefix}_dpwssd_{suffix}", three, lanes=lanes)
    yield from signatures({f"dpbusds_{suffix} dpwssds_{suffix}": three}, f"{prefix}_")
