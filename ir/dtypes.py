"""Element types: one table for names, sizes, numpy storage, safetensors spelling and conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type, which numpy stores as it is; `_Brain` is the one that it does not know."""

    name: str
    size: int
    storage: str
    safetensors: str

    @property
    def numpy(self) -> npt.DTypeLike:
        """The numpy dtype that holds the stored bytes."""
        return np.dtype(self.storage)

    def widen(self, stored: Array) -> npt.NDArray[np.float32]:
        """Return stored values as float32: float32 itself is not copied."""
        return stored.astype(np.float32, copy=False)

    def narrow(self, values: npt.NDArray[np.float32]) -> Array:
        """Return float32 values as they are stored, rounded to nearest even."""
        return values.astype(self.numpy, copy=False)

    def all_finite(self, stored: Array) -> bool:
        """Tell whether no stored value is NaN or infinite."""
        return bool(np.isfinite(stored).all())


class _Brain(DType):
    """bfloat16, stored as uint16 bit patterns."""

    __slots__ = ()

    def widen(self, stored: Array) -> npt.NDArray[np.float32]:
        return widen_bf16(stored)

    def narrow(self, values: npt.NDArray[np.float32]) -> Array:
        return narrow_bf16(values)

    def all_finite(self, stored: Array) -> bool:
        return bool(((stored & 0x7F80) != 0x7F80).all())


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", 4, "float32", "F32"),
        DType("f64", 8, "float64", "F64"),
        DType("f16", 2, "float16", "F16"),
        _Brain("bf16", 2, "uint16", "BF16"),
        DType("i32", 4, "int32", "I32"),
        DType("i64", 8, "int64", "I64"),
        DType("u16", 2, "uint16", "U16"),
        DType("u32", 4, "uint32", "U32"),
        DType("u64", 8, "uint64", "U64"),
        DType("u8", 1, "uint8", "U8"),
        DType("i8", 1, "int8", "I8"),
    )
}


class _Small(DType):
    """float8 e4m3fn, stored as bytes: a sign, 4 bits of exponent, 3 of fraction; no infinity."""

    __slots__ = ()

    def widen(self, stored: Array) -> npt.NDArray[np.float32]:
        return _E4M3[stored]

    def all_finite(self, stored: Array) -> bool:
        return bool(((stored & 0x7F) != 0x7F).all())


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Return the values of all bytes."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    size = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + fraction), 2.0**-6 * fraction)
    found = np.where(codes & 128, -size, size).astype(np.float32)
    found[[0x7F, 0xFF]] = np.nan
    return found


_E4M3 = _e4m3_values()
F8 = _Small("f8", 1, "uint8", "F8_E4M3")
"""Of checkpoints alone: no kernel reads it."""
BY_SAFETENSORS = {d.safetensors: d for d in (*DTYPES.values(), F8)}


def widen_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the float32 values of bfloat16 bit patterns (exact)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bit patterns, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
