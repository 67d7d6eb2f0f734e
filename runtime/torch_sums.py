"""What the ranks of a group do together on the memory of their GPUs, by torch.distributed.

In: the products of a rank, whose memory and streams these are, and its `TorchCollective`. Out: sums
and gathers as work of a stream: NCCL's on the device, gloo's by way of the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.ir.errors import CapacityError, RankError
from dovetail.runtime.accelerator.collective import TorchCollective
from dovetail.runtime.launches import Exchange
from dovetail.runtime.torch_products import TorchProducts


@dataclass(frozen=True, slots=True)
class BoundExchange:
    """An exchange over the device's memory."""

    x: torch.Tensor
    parts: tuple[int, int] | None


class TorchSums:
    """A rank's `Sums`. Nothing can be run before `join`."""

    def __init__(self, products: TorchProducts) -> None:
        self._products = products
        self._collective: TorchCollective | None = None

    def join(self, collective: TorchCollective) -> None:
        """Sum over the ranks of `collective` from now on."""
        self._collective = collective

    def bind(self, exchange: Exchange, rows: int) -> BoundExchange:
        """See Sums."""
        return BoundExchange(self._products.activations(exchange.x, rows), exchange.parts)

    def run(self, bound: BoundExchange, rows: int, stream: int) -> None:
        """See Sums; CapacityError without memory for what travels."""
        if not rows:
            return
        try:
            with self._products.on(stream):
                self.meet(bound, rows)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"the GPU has no memory for a sum: {error}") from None

    def meet(self, bound: BoundExchange, rows: int) -> None:
        """Give the exchange of the first `rows` rows to torch's current stream."""
        assert self._collective is not None, "a tape of a group is run before it has been joined"
        if bound.parts is None:
            self._collective.all_reduce(bound.x[:rows])
        else:
            self._collective.all_gather(bound.x[:rows], *bound.parts)

    def check(self) -> None:
        """Raise RankError where the group has failed while work for it was under way."""
        if self._collective is not None and self._collective.failed:
            raise RankError("a process of the group has ended, so nothing can be summed")
