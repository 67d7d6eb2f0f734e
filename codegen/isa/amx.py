"""The target x86-64-amx: AVX-512 with tile registers, which multiply matrices (AMX).

Sapphire Rapids and later. A product of 16 x 32 and 32 x 16 bfloat16, or of 16 x 64 and 64 x 16
bytes, takes 16 cycles. Attention is that of x86-64-avx512vnni: dot products of bfloat16 vectors are
slow on these CPUs.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import avx512_vnni
from dovetail.codegen.isa.amx_intrinsics import INTRINSICS
from dovetail.ir.cpu import TILE_FLAGS

TARGET = replace(
    avx512_vnni.TARGET,
    name="x86-64-amx",
    ops={
        **avx512_vnni.TARGET.ops,
        "tiles_begin": "dt_tiles_begin()",
        "tiles_end": "_tile_release()",
        "tile_dots": f"dt_tile_dots({', '.join(f'{{{i}}}' for i in range(11))})",
    },
    cflags=(*avx512_vnni.TARGET.cflags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    cpu_features=avx512_vnni.TARGET.cpu_features | TILE_FLAGS,
    intrinsics={**avx512_vnni.TARGET.intrinsics, **INTRINSICS},
    prelude_files=(*avx512_vnni.TARGET.prelude_files, "prelude_amx.c"),
    tiles=True,
)
