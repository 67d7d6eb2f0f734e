"""The target x86-64-amx: AVX-512 with tile registers, which multiply matrices (AMX).

Sapphire Rapids and later. A product of 16 x 32 and 32 x 16 bfloat16, or of 16 x 64 and 64 x 16
bytes, takes 16 cycles. Attention is that of x86-64-avx512vnni: dot products of bfloat16 vectors are
slow on these CPUs.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.isa.intrinsics import signatures, table
from dovetail.codegen.isa.x86_dots import AVX512_VNNI
from dovetail.ir.cpu import TILE_FLAGS

INTRINSICS = table(
    signatures(
        {
            "_tile_loadconfig": "const void* -> void",
            "_tile_release": "-> void",
            "_tile_loadd": "imm, const void*, long -> void",
            "_tile_stored": "imm, void*, long -> void",
            "_tile_zero": "imm -> void",
            "_tile_dpbf16ps _tile_dpbssd _tile_dpbsud _tile_dpbusd _tile_dpbuud": (
                "imm, imm, imm -> void"
            ),
        }
    )
)

TARGET = replace(
    AVX512_VNNI,
    name="x86-64-amx",
    ops={
        **AVX512_VNNI.ops,
        "tiles_begin": "dt_tiles_begin()",
        "tiles_end": "_tile_release()",
        "tile_dots": f"dt_tile_dots({', '.join(f'{{{i}}}' for i in range(11))})",
    },
    cflags=(*AVX512_VNNI.cflags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    cpu_features=AVX512_VNNI.cpu_features | TILE_FLAGS,
    intrinsics={**AVX512_VNNI.intrinsics, **INTRINSICS},
    prelude_files=(*AVX512_VNNI.prelude_files, "prelude_amx.c"),
    tiles=True,
)
