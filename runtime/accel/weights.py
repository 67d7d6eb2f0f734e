"""A model's weights as tensors on a torch device, row by row: unpacked once from the artifact.

In: the packed weights of an artifact, which part of each is wanted, and the type of activations.
Out: a tensor by name. Matrices have activations' type, vectors and computed tables float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dovetail.ir.formats import FORMATS, is_quantised
from dovetail.ir.model import PANEL, WeightEntry
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.native.shares import WeightShare
from dovetail.runtime.native.weights import Weights

WHOLE = WeightShare()
MATRICES = ("packed", "packed_pair")
TABLES = ("bias", "rope_cos", "rope_sin", "local_rope_cos", "local_rope_sin")


def load_weights(
    device: TorchDevice,
    weights: Weights,
    dtype: torch.dtype,
    shares: Mapping[str, WeightShare] | None = None,
) -> dict[str, torch.Tensor]:
    """Return all weights [n][k] on the device, of those in `shares` that part.

    Vectors are [n]. Of one matrix after another a copy is made, so memory peaks at the largest.
    """
    found, shares = {}, shares or {}
    paired = {f"{e.name}_bias": e.n for e in weights.entries.values() if e.layout == "packed_pair"}
    for entry in weights.entries.values():
        rows = unpack_rows(entry, weights.array(entry.name), paired.get(entry.name))
        share = shares.get(entry.name, WHOLE)
        part = _tensor(np.array(rows[share.rows, share.columns]), entry.dtype)
        matrix = entry.layout in MATRICES or (entry.k > 1 and entry.name not in TABLES)
        held = part.to(device.device, dtype if matrix else torch.float32)
        found[entry.name] = held if entry.k > 1 or matrix else held.view(-1)
    return found


def _tensor(rows: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    if is_quantised(dtype) or dtype == "f32":
        return torch.from_numpy(rows.astype(np.float32, copy=False))
    if dtype == "bf16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


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
