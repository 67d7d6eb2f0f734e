"""A model's weights in the memory of a GPU: row by row, as libraries of matrix products take them.

In: the packed weights of an artifact. Out: `DeviceWeights`, an address and a shape for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL, WeightEntry
from dovetail.runtime.cuda import CudaDevice
from dovetail.runtime.weights import Weights

ALIGNMENT = 256
"""Bytes at whose multiples weights start."""


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """Rows [n][k] (k = 1: a vector) of `dtype` at an address of the device."""

    address: int
    n: int
    k: int
    dtype: str


class DeviceWeights:
    """All weights of a model on one device."""

    def __init__(self, device: CudaDevice, weights: Weights) -> None:
        """Unpack and copy them; CapacityError where the device has no room."""
        self._device = device
        paired = {
            f"{entry.name}_bias": entry.n
            for entry in weights.entries.values()
            if entry.layout == "packed_pair"
        }
        sizes = [-(-entry.bytes // ALIGNMENT) * ALIGNMENT for entry in weights.entries.values()]
        try:
            self._base = device.alloc(sum(sizes))
        except CapacityError as error:
            raise CapacityError(
                f"the model's weights ({sum(sizes)} bytes) do not fit on the GPU ({error}); use a "
                "smaller model or a CPU target"
            ) from None
        self.held: dict[str, DeviceWeight] = {}
        at = self._base
        for entry, size in zip(weights.entries.values(), sizes, strict=True):
            rows = unpack_rows(entry, weights.array(entry.name), paired.get(entry.name))
            device.upload(at, rows)
            self.held[entry.name] = DeviceWeight(at, rows.shape[0], rows.shape[1], entry.dtype)
            at += size

    def close(self) -> None:
        """Give the memory back."""
        self._device.free(self._base)


def unpack_rows(
    entry: WeightEntry, stored: npt.NDArray[Any], paired: int | None = None
) -> npt.NDArray[Any]:
    """Return a weight as contiguous rows [n][k]; gate and up, in turns, become gate, then up.

    `paired`: the columns of such a weight, where `entry` is its bias: halves in turns of a panel.
    """
    if entry.layout == "packed":
        return np.ascontiguousarray(FORMATS[entry.dtype].unpack(stored, entry.n, entry.k))
    if entry.layout == "packed_pair":
        panels = len(stored) // FORMATS[entry.dtype].panel_elements(entry.k)
        rows = FORMATS[entry.dtype].unpack(stored, panels * PANEL, entry.k)
        return _halves(rows, entry.n)
    if paired is not None:
        return _halves(stored.reshape(-1, 1), paired)
    return np.ascontiguousarray(stored.reshape(entry.n, entry.k))


def _halves(rows: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """Return the first n / 2 rows of the even panels, then those of the odd ones."""
    turns = rows.reshape(-1, 2, PANEL, rows.shape[1])
    return np.concatenate([turns[:, i].reshape(-1, rows.shape[1])[: n // 2] for i in range(2)])
