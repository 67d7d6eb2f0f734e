"""Element types: one table for names, sizes, numpy storage and safetensors spelling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. bf16 is stored in numpy as uint16 bit patterns."""

    name: str
    size: int
    storage: str
    safetensors: str

    @property
    def numpy(self) -> npt.DTypeLike:
        """The numpy dtype that holds the stored bytes."""
        return np.dtype(self.storage)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", 4, "float32", "F32"),
        DType("f64", 8, "float64", "F64"),
        DType("f16", 2, "float16", "F16"),
        DType("bf16", 2, "uint16", "BF16"),
        DType("i32", 4, "int32", "I32"),
        DType("i64", 8, "int64", "I64"),
        DType("u16", 2, "uint16", "U16"),
        DType("u32", 4, "uint32", "U32"),
        DType("u8", 1, "uint8", "U8"),
    )
}
BY_SAFETENSORS = {d.safetensors: d for d in DTYPES.values()}


def widen_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the float32 values of bfloat16 bit patterns (exact)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bit patterns, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
