"""The target aarch64-dotprod: NEON with dot products of quads of bytes of one sign (DotProd).

ARMv8.2: Cortex-A75, Neoverse N1 and Apple M1 on. Codes stay below 128, where both signs agree.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import neon
from dovetail.codegen.isa.intrinsics import table
from dovetail.codegen.isa.neon_bytes import dotprod_rows

_DOT = "vdotq_s32({2}, vreinterpretq_s8_s32({0}), vreinterpretq_s8_s32({1}))"

TARGET = replace(
    neon.TARGET,
    name="aarch64-dotprod",
    ops={**neon.OPS, "vdot_quads": _DOT, "vdot_quads_signed": _DOT},
    cflags=(*neon.TARGET.cflags, "-march=armv8.2-a+dotprod"),
    zig_cpu="generic+v8_2a+dotprod",
    cpu_features=neon.TARGET.cpu_features | {"asimddp"},
    intrinsics={**neon.TARGET.intrinsics, **table(dotprod_rows())},
)
