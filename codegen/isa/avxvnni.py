"""The target x86-64-avxvnni: AVX2 with dot products of quads of bytes (AVX-VNNI).

Alder Lake on, and Zen 5. Products are added in 32 bits, so that codes use all 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import avx2
from dovetail.codegen.isa.intrinsics import table
from dovetail.codegen.isa.x86_bytes import vnni_rows

TARGET = replace(
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
