"""Targets of x86-64 that have dot products of bytes (VNNI), or of bfloat16 pairs (AVX512_BF16).

Quads of bytes are added in 32 bits, so that codes use all 8 bits. AVX-512 has them from Cascade
Lake, Ice Lake and Zen 4 on, AVX2 (AVX-VNNI) from Alder Lake and Zen 5 on.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import avx2, avx512
from dovetail.codegen.isa.intrinsics import intrinsic, table
from dovetail.codegen.isa.target import Target
from dovetail.codegen.isa.x86_integers import vnni_rows
from dovetail.codegen.isa.x86_rows import PREFIXES


def _with_quads(base: Target, name: str, feature: str, suffix: str, signed: str) -> Target:
    """Return `base` with dot products of quads; signed: bytes with the signs of others."""
    mm = PREFIXES[base.lanes]
    dot = f"{mm}_dpbusd_{suffix}({{2}}, "
    widths = [lanes for lanes in PREFIXES if lanes <= base.lanes]
    return replace(
        base,
        name=name,
        ops={
            **base.ops,
            "vdot_quads": f"{dot}{{0}}, {{1}})",
            "vdot_quads_signed": f"{dot}{mm}_abs_epi8({{0}}), {signed})",
        },
        cflags=(*base.cflags, f"-m{feature.replace('_', '')}"),
        cpu_features=base.cpu_features | {feature},
        intrinsics={
            **base.intrinsics,
            **table(row for lanes in widths for row in vnni_rows(lanes, suffix)),
        },
        quads="wide",
        sums_16=False,
    )


AVXVNNI = _with_quads(
    avx2.TARGET, "x86-64-avxvnni", "avx_vnni", "avx_epi32", "_mm256_sign_epi8({1}, {0})"
)
AVX512_VNNI = _with_quads(
    avx512.TARGET, "x86-64-avx512vnni", "avx512_vnni", "epi32", "dt_with_sign({1}, {0})"
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
