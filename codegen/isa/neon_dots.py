"""Targets of AArch64 that have dot products of quads of bytes: of one sign, of both (I8MM).

DotProd (ARMv8.2: Cortex-A75, Neoverse N1 and Apple M1 on) takes codes below 128, where both signs
agree; I8MM (ARMv8.6: Neoverse V1, Cortex-A710 and Apple M2 on) takes codes of 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import neon
from dovetail.codegen.isa.intrinsics import table
from dovetail.codegen.isa.neon_integers import dotprod_rows, i8mm_rows

_DOT = "vdotq_s32({2}, vreinterpretq_s8_s32({0}), vreinterpretq_s8_s32({1}))"

DOTPROD = replace(
    neon.TARGET,
    name="aarch64-dotprod",
    ops={**neon.OPS, "vdot_quads": _DOT, "vdot_quads_signed": _DOT},
    cflags=(*neon.TARGET.cflags, "-march=armv8.2-a+dotprod"),
    zig_cpu="generic+v8_2a+dotprod",
    cpu_features=neon.TARGET.cpu_features | {"asimddp"},
    intrinsics={**neon.TARGET.intrinsics, **table(dotprod_rows())},
)

I8MM = replace(
    DOTPROD,
    name="aarch64-i8mm",
    ops={
        **DOTPROD.ops,
        "vdot_quads": "vusdotq_s32({2}, vreinterpretq_u8_s32({0}), vreinterpretq_s8_s32({1}))",
    },
    cflags=(*neon.TARGET.cflags, "-march=armv8.2-a+dotprod+i8mm"),
    zig_cpu="generic+v8_2a+dotprod+i8mm",
    cpu_features=DOTPROD.cpu_features | {"i8mm"},
    intrinsics={**DOTPROD.intrinsics, **table(i8mm_rows())},
    quads="wide",
)
