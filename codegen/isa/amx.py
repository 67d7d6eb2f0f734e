"""The target x86-64-amx: AVX-512 with tile registers that multiply bfloat16 matrices (AMX).

Sapphire Rapids and later. A product of 16 x 32 and 32 x 16 values takes 16 cycles. Attention is
that of x86-64-avx512: dot products of bfloat16 vectors are slow on these CPUs.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa import avx512
from dovetail.codegen.isa.amx_intrinsics import INTRINSICS
from dovetail.ir.cpu import TILE_FLAGS

TARGET = replace(
    avx512.TARGET,
    name="x86-64-amx",
    ops={
        **avx512.OPS,
        "tiles_begin": "dt_tiles_begin()",
        "tiles_end": "_tile_release()",
        "tile_dots": f"dt_tile_dots({', '.join(f'{{{i}}}' for i in range(11))})",
    },
    cflags=(*avx512.TARGET.cflags, "-mamx-tile", "-mamx-bf16"),
    cpu_features=avx512.TARGET.cpu_features | TILE_FLAGS,
    intrinsics={**avx512.TARGET.intrinsics, **INTRINSICS},
    prelude_files=(*avx512.TARGET.prelude_files, "prelude_amx.c"),
    tiles=True,
)
