"""A rank's part of a model on a GPU, as its lanes share it: weights, KV pools, streams, products.

In: addresses on the device, the model on the CPU. Out: `GpuModel`, and copies of KV between pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.ir.model import ModelSpec
from dovetail.ir.tape import Tape
from dovetail.runtime.cuda import CudaModule
from dovetail.runtime.device_weights import DeviceWeights
from dovetail.runtime.forward import ForwardModel
from dovetail.runtime.launches import Products, Sums
from dovetail.runtime.request import Home
from dovetail.runtime.streams import GpuStreams

Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DevicePools:
    """K and V on the device, `[layer][block]` as everywhere.

    Behind its blocks lie those in which KV of the CPU's requests lands, and one that nobody reads.
    """

    keys: int
    values: int
    blocks: int
    landing: int
    block_bytes: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of K, or of V, in one layer."""
        return (self.blocks + self.landing + 1) * self.block_bytes

    @property
    def unread(self) -> int:
        """The block that nobody reads."""
        return self.blocks + self.landing

    def layer(self, layer: int) -> tuple[int, int]:
        """Return the addresses of K and V of a layer."""
        return self.keys + layer * self.layer_bytes, self.values + layer * self.layer_bytes


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What the lanes of an executor share: one rank's part of a model.

    tape: the forward tape over `weights`. sums: the group, where there are several ranks.
    """

    spec: ModelSpec
    tape: Tape
    streams: GpuStreams
    module: CudaModule
    weights: DeviceWeights
    products: Products
    pools: DevicePools
    cpu: ForwardModel
    gated: int
    warps: int
    sums: Sums | None = None

    def copy_blocks(self, layer: int, blocks: Blocks, target: Home) -> None:
        """Copy one layer of `blocks` [2][n], here and on the CPU, on the copy stream."""
        size, cpu = self.pools.block_bytes, self.cpu.kv
        for base, memory in zip(self.pools.layer(layer), (cpu.k, cpu.v), strict=True):
            for first, at, count in block_runs(*blocks):
                start = layer * cpu.layer_bytes + at * size
                held = memory[start : start + count * size]
                copy = (base + first * size, held, self.streams.copy)
                if target is Home.GPU:
                    self.streams.upload(*copy)
                else:
                    self.streams.download(held, copy[0], copy[2])


def block_runs(left: Blocks, right: Blocks) -> Iterator[tuple[int, int, int]]:
    """Yield (left, right, count) of the longest stretches in which both count up by one."""
    if not len(left):
        return
    breaks = np.flatnonzero((np.diff(left) != 1) | (np.diff(right) != 1)) + 1
    starts = [0, *breaks.tolist(), len(left)]
    for first, last in itertools.pairwise(starts):
        yield int(left[first]), int(right[first]), last - first
