"""Targets of x86-64 that have dot products of bytes (VNNI), or of bfloat16 pairs (AVX512_BF16).

Quads of bytes are added in 32 bits, so that codes use all 8 bits. AVX-512 has them from Cascade
Lake, Ice Lake and Zen 4 on, AVX2 (AVX-VNNI) from Alder Lake and Zen 5 on.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import avx2, avx512
from dovetail.codegen.isa.intrinsics import intrinsic, table
from dovetail.codegen.isa.x86_integers import vnni_rows

AVXVNNI = replace(
    avx2.TARGET,
    name="x86-64-avxvnni",
    ops={
        **avx2.OPS,
        "vdot_quads": "_mm256_dpbusd_avx_epi32({2}, {0}, {1})",
        "vdot_quads_signed": (
            "_mm256_dpbusd_avx_epi32({2}, _mm256_abs_epi8({0}), _mm256_sign_epi8({1}, {0}))"
        ),
    },
    cflags=(*avx2.TARGET.cflags, "-mavxvnni"),
    cpu_features=avx2.TARGET.cpu_features | {"avx_vnni"},
    intrinsics={
        **avx2.TARGET.intrinsics,
        **table(row for lanes in (4, 8) for row in vnni_rows(lanes, "avx_epi32")),
    },
    quads="wide",
    sums_16=False,
)

AVX512_VNNI = replace(
    avx512.TARGET,
    name="x86-64-avx512vnni",
    ops={
        **avx512.OPS,
        "vdot_quads": "_mm512_dpbusd_epi32({2}, {0}, {1})",
        "vdot_quads_signed": (
            "_mm512_dpbusd_epi32({2}, _mm512_abs_epi8({0}), dt_with_sign({1}, {0}))"
        ),
    },
    cflags=(*avx512.TARGET.cflags, "-mavx512vnni"),
    cpu_features=avx512.TARGET.cpu_features | {"avx512_vnni"},
    intrinsics={
        **avx512.TARGET.intrinsics,
        **table(row for lanes in (4, 8, 16) for row in vnni_rows(lanes, "epi32")),
    },
    quads="wide",
    sums_16=False,
)

_PAIRS = table([intrinsic("_mm512_dpbf16_ps", "__m512, __m512bh, __m512bh -> __m512")])
AVX512_BF16 = replace(
    AVX512_VNNI,
    name="x86-64-avx512bf16",
    ops={
        **AVX512_VNNI.ops,
        "vdot_pairs": "_mm512_dpbf16_ps({2}, (__m512bh)({0}), (__m512bh)({1}))",
    },
    cflags=(*AVX512_VNNI.cflags, "-mavx512bf16"),
    cpu_features=AVX512_VNNI.cpu_features | {"avx512_bf16"},
    intrinsics={**AVX512_VNNI.intrinsics, **_PAIRS},
    bf16_dot=True,
    slow_flags=frozenset({"avx512_fp16"}),
)
"""Zen 4 does 32 products in the time of 16 in float32. CPUs that also have AVX512_FP16 (Sapphire
Rapids) leave such products to AMX: a dot product takes them 2 cycles there, where two fused
multiply-adds take 1, so a product of bfloat16 matrices is 1.5 times as fast without."""
