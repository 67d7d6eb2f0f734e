"""Whether a model fits into memory: the arithmetic that a compile and a load show alike.

In: bytes of weights, KV and activations. Out: a `MemoryNeed`, which is pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.kv_pool import blocks_for


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that one request of `context` tokens needs. block: of K and V of KV_BLOCK tokens."""

    weights: int
    block: int
    activations: int
    context: int

    @property
    def fixed(self) -> int:
        """Bytes whatever the context is."""
        return self.weights + self.activations

    @property
    def total(self) -> int:
        """Bytes with KV of the whole context."""
        return self.fixed + blocks_for(self.context) * self.block

    def longest(self, memory: int) -> int:
        """Return the most tokens of a context that fit into `memory` bytes; 0 where none does."""
        return max(0, (memory - self.fixed) // self.block * KV_BLOCK)

    def explain(self, memory: int) -> str:
        """Return the sum, and what is there."""
        kv = self.total - self.fixed
        return (
            f"{_gib(self.weights)} of weights + {_gib(kv)} of KV for one context of {self.context} "
            f"tokens + {_gib(self.activations)} of activations = {_gib(self.total)} GiB, where "
            f"there are {_gib(memory)} GiB"
        )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f}"
