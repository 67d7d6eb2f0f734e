"""Binds a tape for a torch device: each entry becomes work for tensors.

In: a tape, weights on the device, and a table of operators. Out: a `TorchTape`, whose segments run
over the arrays and integers of a `Step`. The same tape runs on the CPU by native kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from dovetail.ir.tape import (
    ArgRef,
    BufferRef,
    Entry,
    FloatConst,
    IntConst,
    KvRef,
    Slot,
    Tape,
    WeightRef,
)
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.accel.generated import GeneratedProducts
from dovetail.runtime.accel.step import PagedAttention, Step

FEW = ("n_out", "n_sequences", "n_rows")
"""Numbers of rows that are at most a step's sequences; others are at most its tokens."""
TAPE_BYTES = 4
"""Buffers of a tape are float32; here they are of the type of activations."""


Work: TypeAlias = Callable[[Step], None]
Bind: TypeAlias = Callable[["TorchTape", Entry], Work]
"""Makes the work of an entry: operands are looked up once, when a tape is bound."""
Held = TypeVar("Held")


class Rows:
    """The first rows, as many as a step has, of some columns of a buffer."""

    __slots__ = ("_count", "_of", "_part", "_rows")

    def __init__(self, tensor: torch.Tensor, count: str) -> None:
        self._of, self._count = tensor, count
        self._rows, self._part = -1, tensor

    def __call__(self, step: Step) -> torch.Tensor:
        """Return them."""
        rows = step.counts[self._count]
        if rows != self._rows:  # slicing costs as much as a small product
            self._rows, self._part = rows, self._of[:rows]
        return self._part


@dataclass(frozen=True, slots=True)
class DevicePools:
    """K and V of each layer on the device, [block][kv_head][16][head_dim] (FlashInfer's HND).

    A layer without K and V of its own has none. Behind its `blocks` lie `landing` ones, in which KV
    of the CPU's prompts is computed, an unread one for rows that nobody asked for, and one of
    zeros, for what a sequence has not.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    blocks: int
    landing: int

    @property
    def unread(self) -> int:
        """The block that is written and never read."""
        return self.blocks + self.landing


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """A tape, and what it computes with on a device.

    dtype: of activations; logits are float32. sizes: most tokens and most sequences of a step.
    attention: what attends over `pools`.
    """

    tape: Tape
    device: TorchDevice
    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    sizes: tuple[int, int]
    pools: DevicePools | None = None
    products: GeneratedProducts | None = None
    attention: type[PagedAttention] | None = None


class TorchTape:
    """A tape for one torch device: its buffers, and the work of its entries."""

    def __init__(self, model: PlacedModel, operators: Mapping[str, Bind]) -> None:
        """Bind every entry by its operator."""
        self.model = model
        self.collective: Any = None  # sums over the ranks of a group, once it has been joined
        self.attention = model.attention(model.device.device) if model.attention else None
        self.buffers: dict[str, torch.Tensor] = {}
        self._held: dict[Hashable, Any] = {}
        self._before: list[Work] = []
        self._work = [(operators[e.op](self, e), e.skip_if_zero) for e in model.tape.entries]

    def begin(self, step: Step) -> None:
        """Work out what entries share in a step; its integers and arrays are there."""
        step.shared.clear()
        for work in self._before:
            work(step)
        if self.attention is not None:
            self.attention.begin(step)

    def run(self, span: range, step: Step) -> None:
        """Run the entries of `span` in a step that has begun; in `TorchDevice.working`."""
        for i in span:
            work, skip = self._work[i]
            if skip is None or step.counts[skip]:
                work(step)

    # ---- what operators bind to ----

    def share(self, name: Hashable, make: Callable[[], tuple[Work, Held]]) -> Held:
        """Return memory of that name; made once, with the work that fills it in each step."""
        if name not in self._held:
            work, self._held[name] = make()
            self._before.append(work)
        found: Held = self._held[name]
        return found

    def buffer(self, name: str, count: str) -> torch.Tensor:
        """Return a whole buffer, which begins with as many rows as its first user may want."""
        if name not in self.buffers:
            model = self.model
            columns = next(b.columns for b in model.tape.buffers if b.name == name)
            shape = (model.sizes[count in FEW], columns)
            self.buffers[name] = model.device.zeros(shape, model.dtype)
        return self.buffers[name]

    def rows(self, slot: Slot, columns: int, count: str) -> Callable[[Step], torch.Tensor]:
        """Return what gives the rows of an operand in a step."""
        if isinstance(slot, ArgRef):
            name, first = slot.name, slot.offset // TAPE_BYTES
            return lambda step: step.arrays[name][: step.counts[count], first : first + columns]
        assert isinstance(slot, BufferRef)
        first = slot.offset // TAPE_BYTES
        return Rows(self.buffer(slot.name, count)[:, first : first + columns], count)

    def weight(self, slot: Slot) -> torch.Tensor | None:
        """Return a weight, or None where the operand is null."""
        assert isinstance(slot, WeightRef)
        if slot.name is None:
            return None
        whole = self.model.weights[slot.name]
        return whole[slot.offset // TAPE_BYTES :] if slot.offset else whole  # part of a bias

    def need(self, slot: Slot) -> torch.Tensor:
        """Return a weight that is there."""
        found = self.weight(slot)
        assert found is not None
        return found

    def layer(self, slot: Slot) -> torch.Tensor:
        """Return K or V of a layer."""
        pools = self.model.pools
        assert isinstance(slot, KvRef) and pools is not None
        return (pools.k if slot.pool == "k" else pools.v)[slot.layer]


def integer(slot: Slot) -> int:
    """Return a constant of a tape."""
    assert isinstance(slot, IntConst)
    return slot.value


def number(slot: Slot) -> float:
    """Return a floating constant of a tape."""
    assert isinstance(slot, FloatConst)
    return slot.value


def array(slot: Slot) -> str:
    """Return the name of an array that each step gives."""
    assert isinstance(slot, ArgRef)
    return slot.name
