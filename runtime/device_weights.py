"""A model's weights in the memory of a GPU: row by row, as libraries of matrix products take them.

In: the packed weights of an artifact, and which part of each is wanted. Out: `DeviceWeights`, an
address and a shape for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL, WeightEntry
from dovetail.runtime.cuda import CudaDevice
from dovetail.runtime.shares import WeightShare
from dovetail.runtime.weights import Weights

WHOLE = WeightShare()


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """Rows [n][k] (k = 1: a vector) of `dtype` at an address of the device."""

    address: int
    n: int
    k: int
    dtype: str


class DeviceWeights:
    """The weights of a model on one device."""

    def __init__(
        self,
        device: CudaDevice,
        weights: Weights,
        shares: Mapping[str, WeightShare] | None = None,
    ) -> None:
        """Unpack and copy them, of those in `shares` that part; CapacityError without room."""
        self._device, shares = device, shares or {}
        self.held: dict[str, DeviceWeight] = {}
        paired = {
            f"{entry.name}_bias": entry.n
            for entry in weights.entries.values()
            if entry.layout == "packed_pair"
        }
        try:
            for entry in weights.entries.values():
                rows = unpack_rows(entry, weights.array(entry.name), paired.get(entry.name))
                share = shares.get(entry.name, WHOLE)
                self._put(entry, np.ascontiguousarray(rows[share.rows, share.columns]))
        except CapacityError as error:
            self.close()
            size = sum(entry.bytes for entry in weights.entries.values())
            raise CapacityError(
                f"the model's weights ({size} bytes in all) do not fit on the GPU ({error}); use a "
                "smaller model, more GPUs or a CPU target"
            ) from None

    def _put(self, entry: WeightEntry, rows: npt.NDArray[Any]) -> None:
        address = self._device.alloc(rows.nbytes)
        self._device.upload(address, rows)
        self.held[entry.name] = DeviceWeight(address, rows.shape[0], rows.shape[1], entry.dtype)

    def close(self) -> None:
        """Give the memory back."""
        for weight in self.held.values():
            self._device.free(weight.address)
        self.held.clear()


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
