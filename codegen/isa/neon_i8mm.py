"""The target aarch64-i8mm: DotProd, and dot products of unsigned with signed bytes (I8MM).

ARMv8.6: Neoverse V1, Cortex-A710 and Apple M2 on. Codes use all 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import neon, neon_dotprod
from dovetail.codegen.isa.intrinsics import table
from dovetail.codegen.isa.neon_bytes import i8mm_rows

TARGET = replace(
    neon_dotprod.TARGET,
    name="aarch64-i8mm",
    ops={
        **neon_dotprod.TARGET.ops,
        "vdot_quads": "vusdotq_s32({2}, vreinterpretq_u8_s32({0}), vreinterpretq_s8_s32({1}))",
    },
    cflags=(*neon.TARGET.cflags, "-march=armv8.2-a+dotprod+i8mm"),
    zig_cpu="generic+v8_2a+dotprod+i8mm",
    cpu_features=neon_dotprod.TARGET.cpu_features | {"i8mm"},
    intrinsics={**neon_dotprod.TARGET.intrinsics, **table(i8mm_rows())},
    quads="wide",
)
