"""The target x86-64-avx512vnni: AVX-512 with dot products of quads of bytes (AVX512_VNNI).

Cascade Lake, Ice Lake and Zen 4 on. Products are added in 32 bits, so that codes use all 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import avx512
from dovetail.codegen.isa.intrinsics import table
from dovetail.codegen.isa.x86_bytes import vnni_rows

TARGET = replace(
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
