"""Work that would hold the driver up: batches of texts to embed, functions of users.

In: orders to embed and to invoke. Out: reports to the control plane.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue

from dovetail.ir.errors import DovetailError
from dovetail.ir.workflow import Function
from dovetail.runtime.flows.control.messages import Embed, Failed, Finished, Invoke, Report
from dovetail.runtime.flows.indexes import EmbedTexts

BATCH = 64
"""Texts that are embedded together."""


class EmbeddingThread:
    """One thread that embeds all that waits, texts for one encoder in one batch."""

    def __init__(
        self,
        tell: Callable[[Report], None],
        draw: Callable[[Sequence[Embed], float, float], None],
    ) -> None:
        """`tell` and `draw` (a batch, its start and end) are called on the thread."""
        self._tell, self._draw = tell, draw
        self._waiting: SimpleQueue[tuple[Embed, EmbedTexts]] = SimpleQueue()
        self._pool = ThreadPoolExecutor(1, "dovetail-embedding")

    def put(self, order: Embed, embed: EmbedTexts) -> None:
        """Have the text of an order embedded."""
        self._waiting.put((order, embed))
        self._pool.submit(self._embed_waiting)

    def close(self) -> None:
        """End the thread after the batch under way; what waits is left."""
        self._pool.shutdown(cancel_futures=True)

    def _embed_waiting(self) -> None:
        """Embed what waits: nothing where a call before took all."""
        by_encoder: dict[EmbedTexts, list[Embed]] = defaultdict(list)
        with suppress(Empty):
            for _ in range(BATCH):
                order, embed = self._waiting.get_nowait()
                by_encoder[embed].append(order)
        for embed, orders in by_encoder.items():
            self._run(orders, embed)

    def _run(self, orders: Sequence[Embed], embed: EmbedTexts) -> None:
        """Embed texts together, and those of a batch that fails one by one."""
        start = time.perf_counter()
        try:
            rows = embed([order.text for order in orders])
        except Exception as error:
            if len(orders) == 1:
                self._tell(Failed(orders[0].job, as_ours(error)))
                return
            for order in orders:
                self._run([order], embed)
            return
        self._draw(orders, start, time.perf_counter())
        for order, row in zip(orders, rows, strict=True):
            self._tell(Finished(order.job, row))


def call_function(order: Invoke) -> Report:
    """Return what the function of a node came to."""
    node = order.call.node
    assert isinstance(node, Function)
    try:
        return Finished(order.job, node.function(order.call.state))
    except Exception as error:
        return Failed(order.job, as_ours(error))


def as_ours(error: Exception) -> DovetailError:
    """Return an error of users' code or values as one for users."""
    if isinstance(error, DovetailError):
        return error
    return DovetailError(f"{type(error).__name__}: {error}")
