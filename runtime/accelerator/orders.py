"""What the ranks of an accelerated group are told: how to set up, then a `StepOrder` per step.

In: frozen plans as the first rank's scheduler made them, and the arrays of its lanes. Out: values
that travel as MessagePack, so that the other ranks know neither requests nor pools.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.runtime.forward import RankPlan
from dovetail.runtime.kv_pool import blocks_for
from dovetail.runtime.plan import Move, StepPlan


class PairSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a new rank is told: where the model is, its plan, its accelerator and its pools."""

    artifact: str
    model: str
    fingerprint: str
    plan: RankPlan
    device: str
    activations: str
    blocks: int
    landing: int
    tokens: int
    sequences: int
    threads: int


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's first words: who it is, and that it was started by us."""

    rank: int
    token: str
    process: int
    machine: str


class LaneSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How a filled lane runs: its rows, sequences by where their KV is, and the parts of these."""

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


class LaneOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A batch: `arrays` holds what is used of each array, block tables cut to the widest.

    kv: which KV crosses between the pools in each layer, as the lanes of a device have it.
    """

    sizes: LaneSizes
    arrays: dict[str, bytes]
    table_width: int
    kv: dict[str, bytes]


class StepOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A step: moves of KV, the first `leaving` of which go to the CPU, then batches."""

    moves: tuple[Move, ...]
    leaving: int
    lanes: tuple[LaneOrder, ...]


def order_step(plan: StepPlan, lanes: tuple[LaneOrder, ...]) -> StepOrder:
    """Return the order for `plan`, whose batches fill `lanes`."""
    return StepOrder(moves=plan.moves, leaving=len(plan.swap_out), lanes=lanes)


def order_lane(
    sizes: LaneSizes, arrays: dict[str, npt.NDArray[Any]], **kv: npt.NDArray[Any]
) -> LaneOrder:
    """Return the order for a filled lane."""
    width = blocks_for(int(arrays["seq_lengths"][: sizes.sequences].max(initial=0)))
    return LaneOrder(
        sizes=sizes,
        arrays=pack_arrays(arrays, sizes, width),
        table_width=width,
        kv={name: value.tobytes() for name, value in kv.items()},
    )


def pack_arrays(
    arrays: dict[str, npt.NDArray[Any]], sizes: LaneSizes, width: int
) -> dict[str, bytes]:
    """Return what `sizes` uses of the arrays that a forward step reads."""
    return {name: arrays[name][where].tobytes() for name, where in _used(sizes, width)}


def unpack_arrays(
    packed: dict[str, bytes], arrays: dict[str, npt.NDArray[Any]], sizes: LaneSizes, width: int
) -> None:
    """Write what `pack_arrays` returned into arrays alike."""
    for name, where in _used(sizes, width):
        target = arrays[name][where]
        target[...] = np.frombuffer(packed[name], target.dtype).reshape(target.shape)


_Where = tuple[slice, ...]


def _used(sizes: LaneSizes, width: int) -> tuple[tuple[str, _Where], ...]:
    rows = slice(sizes.n_tokens)
    count = sizes.sequences
    return (
        ("token_ids", (rows,)),
        ("positions", (rows,)),
        ("kv_slots", (rows,)),
        ("seq_starts", (slice(count + 1),)),
        ("seq_lengths", (slice(count),)),
        ("block_tables", (slice(count), slice(width))),
        ("out_rows", (slice(sizes.n_out),)),
    )
