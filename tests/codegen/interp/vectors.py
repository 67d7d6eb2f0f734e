"""The vector types of the low IR as numpy arrays."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.codegen.isa.intrinsics import SCALAR_TYPES
from dovetail.ir.low.types import SCALARS, VECTORS


class VectorType(NamedTuple):
    """Numpy element dtype and lane count of a vector's canonical value."""

    dtype: str
    lanes: int


VECTOR_TYPES: dict[str, VectorType] = {
    v.name: VectorType(SCALAR_TYPES[lane], v.size // SCALARS[lane].size)
    for v in VECTORS.values()
    for lane in (v.lane or "int32_t",)
    if lane in SCALAR_TYPES
}
"""Every vector type of the low IR. Integer vectors of x86 count as int32 lanes."""
