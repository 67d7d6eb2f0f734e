"""What a step on a torch device is, and what computes its attention over paged KV.

In: a step's integers and arrays, rows of queries. Out: `Step`, and `PagedAttention`, which all
backends are (`attention_choice.py` has their table).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy.typing as npt
import torch

MOMENT = {"cpu": 1 << 25}
MOMENT_APART = 1 << 27
"""Bytes of one thing that a step makes for a moment; what would take more is made in pieces."""


def moment_bytes(device: torch.device) -> int:
    """Return how many bytes what a step makes for a moment may take on a device."""
    return MOMENT.get(device.type, MOMENT_APART)


@dataclass(slots=True)
class Step:
    """What one step runs over: its integers, its arrays on the host and on the device.

    `shared` is emptied when a step begins; what is worked out then serves all layers. recorded:
    whether its work may be replayed for another step of as many rows, so that every address and
    shape is the same then.
    """

    host: Mapping[str, npt.NDArray[Any]]
    arrays: Mapping[str, torch.Tensor]
    counts: dict[str, int] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)
    recorded: bool = False
    _taken: dict[str, torch.Tensor] = field(default_factory=dict)

    def scratch(self, name: str, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """Return memory of that shape, whose values are those of whoever used `name` before."""
        size = shape[0] * shape[1]
        held = self._taken.get(name)
        if held is None or held.numel() < size:
            held = self._taken[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size].view(shape)


class Attended(NamedTuple):
    """What a layer's attention is over: heads of queries, and of keys and values; K and V.

    window: how many of the last keys are seen, 0 = all. k, v: [block][kv_head][16][head_dim].
    sinks: of each query head a score that no key has, or None. cap: c of scores c tanh(x / c), 0 =
    none.
    """

    n_q: int
    n_kv: int
    scale: float
    window: int
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    cap: int = 0

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys."""
        return self.n_q // self.n_kv

    @property
    def size(self) -> int:
        """Values of a head."""
        return int(self.k.shape[-1])


class PagedAttention(ABC):
    """Attention of the steps of one sub-batch, in layers that differ in windows and sinks alone.

    records: whether decodes may be recorded and replayed (`recorder.py`).
    """

    name: ClassVar[str]
    records: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kinds: dict[int, Attended] = {}

    @classmethod
    @abstractmethod
    def workspace(cls, device: torch.device, kv_row: int, context: int, widened: float) -> int:
        """Return the bytes that attention of two sub-batches, in turns, takes at most.

        Args:
            device: where.
            kv_row: bytes of the keys and values of a token in one layer.
            context: tokens of a sequence at most.
            widened: how many bytes one of KV becomes for its products, 0 where types are alike.
        """

    def add(self, over: Attended) -> None:
        """Take note of a layer, before the first step."""
        self.kinds.setdefault(over.window, over)

    @abstractmethod
    def begin(self, step: Step) -> None:
        """Work out what all layers of a step share."""

    @abstractmethod
    def decodes(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """Attend for one query each of the device's decodes, from row `decode_row` on."""

    @abstractmethod
    def prompts(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """Attend for the queries of each chunk over what is stored of its prompt, itself too."""
