"""What the ranks of an accelerated group are told: how to set up, then a `StepOrder` per step.

In: frozen plans as the first rank's scheduler made them, and the arrays of its sub-batches. Out:
values that travel as MessagePack, so that the other ranks know neither requests nor pools.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.runtime.group.ranks import RankPart
from dovetail.runtime.schedule.device_limits import DeviceLimits
from dovetail.runtime.schedule.plan import Move


class PairSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a new rank with an accelerator is told, also of this and its pools -> RankReady."""

    part: RankPart
    device: str
    activations: str
    limits: DeviceLimits
    threads: int


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's first words: who it is, and that it was started by us."""

    rank: int
    token: str
    process: int
    machine: str


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank joins the collective -> RankReady: where the first rank's store is, what sums."""

    backend: str
    host: str
    port: int
    seconds: float


class BatchSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How a filled sub-batch runs: rows, sequences by where their KV is, and the parts of these."""

    n_tokens: int
    n_prefill: int
    gpu_decode: int
    cpu_decode: int
    n_out: int
    cpu_splits: int

    @property
    def sequences(self) -> int:
        """Sequences in all."""
        return self.n_prefill + self.gpu_decode + self.cpu_decode


class BatchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A batch: `arrays` holds what is used of each array, block tables cut to the widest.

    kv: which KV crosses between the pools in each layer, as the sub-batches of a device have it.
    """

    sizes: BatchSizes
    arrays: dict[str, bytes]
    table_width: int
    kv: dict[str, bytes]


class StepOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A step: moves of KV, the first `leaving` of which go to the CPU, then batches."""

    moves: tuple[Move, ...]
    leaving: int
    batches: tuple[BatchOrder, ...]


def pack_arrays(
    arrays: dict[str, npt.NDArray[Any]], sizes: BatchSizes, width: int
) -> dict[str, bytes]:
    """Return what `sizes` uses of the arrays that a forward step reads."""
    return {name: arrays[name][where].tobytes() for name, where in _used(sizes, width)}


def unpack_arrays(
    packed: dict[str, bytes], arrays: dict[str, npt.NDArray[Any]], sizes: BatchSizes, width: int
) -> None:
    """Write what `pack_arrays` returned into arrays alike."""
    for name, where in _used(sizes, width):
        target = arrays[name][where]
        target[...] = np.frombuffer(packed[name], target.dtype).reshape(target.shape)


def _used(sizes: BatchSizes, width: int) -> Iterable[tuple[str, tuple[slice, ...]]]:
    rows, count = slice(sizes.n_tokens), sizes.sequences
    return {
        **dict.fromkeys(("token_ids", "positions", "kv_slots"), (rows,)),
        "seq_starts": (slice(count + 1),),
        "seq_lengths": (slice(count),),
        "block_tables": (slice(count), slice(width)),
        "out_rows": (slice(sizes.n_out),),
    }.items()
