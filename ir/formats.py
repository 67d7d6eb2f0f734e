"""Weight formats: how the values of a packed weight lie in memory. One table, `FORMATS`.

In: row-major weights. Out: panels of 16 columns, as the micro-kernels of `codegen/kernels` read
them. A format is an entry here and, where `weights.dk` has none for its kind, a kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from dovetail.ir.block_format import BlockFormat
from dovetail.ir.dtypes import DTYPES, Array, DType
from dovetail.ir.model import PANEL, ModelSpec


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Values of type `dtype`; `unit` values of K that follow one another in a column lie together.

    K may be cut between units. A panel is [ceil(K / unit)][16][unit]; what is past K is zero.
    `name` is also the value of the kernels' tunable `W`. pair_dots: its units are what instructions
    on pairs of bfloat16 take.
    """

    name: str
    dtype: DType
    unit: int
    pair_dots: bool = False

    @property
    def value_bytes(self) -> float:
        """Bytes that a value takes."""
        return float(self.dtype.size)

    def panel_elements(self, k: int) -> int:
        """Return the elements of a panel of K = `k`: the panel stride of a whole weight."""
        return ceil(k / self.unit) * self.unit * PANEL

    def panel_bytes(self, k: int) -> int:
        """Return the bytes of one panel of K = `k`."""
        return self.panel_elements(k) * self.dtype.size

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a panel before row `k` of K, a multiple of `unit`."""
        return k // self.unit * self.unit * PANEL * self.dtype.size

    def pack(self, rows: Array) -> Array:
        """Return [ceil(n / 16)][panel_elements] of row-major `rows` [n][k] in the storage dtype."""
        n, k = rows.shape
        panels, whole, deep = ceil(n / PANEL), n // PANEL, ceil(k / self.unit)
        out = np.zeros((panels, deep, PANEL, self.unit), rows.dtype)
        for lane in range(self.unit):
            values = rows[:, lane :: self.unit]
            count = values.shape[1]
            side = out[:, :count, :, lane]
            side[:whole] = values[: whole * PANEL].reshape(whole, PANEL, count).transpose(0, 2, 1)
            if whole < panels:
                side[whole, :, : n - whole * PANEL] = values[whole * PANEL :].T
        return out.reshape(panels, -1)

    def unpack(self, packed: Array, n: int, k: int) -> Array:
        """Return the row-major [n][k] whose panels are `packed`, of any shape."""
        panels = packed.reshape(-1, ceil(k / self.unit), PANEL, self.unit)
        rows: Array = panels.transpose(0, 2, 1, 3).reshape(len(panels) * PANEL, -1)
        return rows[:n, :k]


WeightFormat = FloatFormat | BlockFormat

FORMATS: dict[str, WeightFormat] = {
    form.name: form
    for form in (
        FloatFormat("f32", DTYPES["f32"], 1),
        # pairs: what bfloat16 dot instructions read, and two float32 vectors by shift and mask
        FloatFormat("bf16", DTYPES["bf16"], 2, pair_dots=True),
        BlockFormat(8, 32),
        BlockFormat(4, 32),
        BlockFormat(4, 32, minimum=True),
        BlockFormat(5, 32),
        BlockFormat(5, 32, minimum=True),
        BlockFormat(4, 32, nested=True, minimum=True),
        BlockFormat(5, 32, nested=True, minimum=True),
        BlockFormat(6, 16, nested=True),
        BlockFormat(4, 16, nested=True, minimum=True),
        BlockFormat(4, 32, nested=True, book="iq4"),
        BlockFormat(4, 32, book="iq4"),
        BlockFormat(4, 32, book="mx4"),
        BlockFormat(4, 32, book="nf4"),
        BlockFormat(4, 32, book="fp4"),
    )
}
"""Every weight format by name. Those of blocks are, in order, the exact content of GGUF's Q8_0,
Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, IQ4_XS, IQ4_NL, MXFP4, and of
bitsandbytes' 4 bits; our own int8 and int4 are the first two."""


def is_quantised(name: str) -> bool:
    """Return whether weights of this format are integers with scales."""
    return isinstance(FORMATS.get(name), BlockFormat)


def inner_unit(spec: ModelSpec) -> int:
    """Return between how many inner columns of MLPs and experts these may be cut."""
    parts = ((i, part.prefix) for i in range(spec.n_layers) for part in spec.mlp_parts(i))
    return _cut_unit({spec.weight_format(f"layers.{i}.{prefix}down") for i, prefix in parts})


def cut_unit(spec: ModelSpec, name: str) -> int:
    """Return between how many values of K the weights `name` of all layers may be cut.

    They are panels of what is read besides, too: of blocks that share a scale the longest.
    """
    return _cut_unit({spec.weight_format(f"layers.{i}.{name}") for i in range(spec.n_layers)})


def _cut_unit(forms: set[str]) -> int:
    return max(PANEL, *(FORMATS[form].unit for form in forms))
