"""The targets aarch64-dotprod and aarch64-i8mm: NEON with dot products of quads of bytes.

DotProd (ARMv8.2, Cortex-A75 and Neoverse N1 on) multiplies bytes of one sign; I8MM (ARMv8.6,
Neoverse V1 on) unsigned with signed ones, so that codes use all 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import neon
from dovetail.codegen.isa.intrinsics import table
from dovetail.codegen.isa.neon_bytes import dotprod_rows, i8mm_rows

SIGNED_DOT = "vdotq_s32({2}, vreinterpretq_s8_s32({0}), vreinterpretq_s8_s32({1}))"
MIXED_DOT = "vusdotq_s32({2}, vreinterpretq_u8_s32({0}), vreinterpretq_s8_s32({1}))"

DOTPROD = replace(
    neon.TARGET,
    name="aarch64-dotprod",
    ops={**neon.OPS, "vdot_quads": SIGNED_DOT, "vdot_quads_signed": SIGNED_DOT},
    cflags=(*neon.TARGET.cflags, "-march=armv8.2-a+dotprod"),
    cpu_features=neon.TARGET.cpu_features | {"asimddp"},
    intrinsics={**neon.TARGET.intrinsics, **table(dotprod_rows())},
)

I8MM = replace(
    DOTPROD,
    name="aarch64-i8mm",
    ops={**DOTPROD.ops, "vdot_quads": MIXED_DOT},
    cflags=(*neon.TARGET.cflags, "-march=armv8.2-a+dotprod+i8mm"),
    cpu_features=DOTPROD.cpu_features | {"i8mm"},
    intrinsics={**DOTPROD.intrinsics, **table(i8mm_rows())},
    quads="wide",
)
