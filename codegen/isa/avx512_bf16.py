"""The target x86-64-avx512bf16: AVX-512 with the dot products of bfloat16 pairs (AVX512_BF16).

Zen 4 does 32 products in the time of 16 in float32. CPUs that also have AVX512_FP16 (Sapphire
Rapids) leave such products to AMX: a dot product takes them 2 cycles there, where two fused
multiply-adds take 1, so a product of bfloat16 matrices is 1.5 times as fast without.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import avx512_vnni
from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.intrinsics import intrinsic, table

INTRINSICS = table(
    [
        intrinsic("_mm512_dpbf16_ps", "__m512, __m512bh, __m512bh -> __m512", m.dot_pairs),
    ]
)

TARGET = replace(
    avx512_vnni.TARGET,
    name="x86-64-avx512bf16",
    ops={
        **avx512_vnni.TARGET.ops,
        "vdot_pairs": "_mm512_dpbf16_ps({2}, (__m512bh)({0}), (__m512bh)({1}))",
    },
    cflags=(*avx512_vnni.TARGET.cflags, "-mavx512bf16"),
    cpu_features=avx512_vnni.TARGET.cpu_features | {"avx512_bf16"},
    intrinsics={**avx512_vnni.TARGET.intrinsics, **INTRINSICS},
    bf16_dot=True,
    slow_flags=frozenset({"avx512_fp16"}),
)
