"""Threads for what would hold the driver up: batches of texts to embed, functions of users.

In: orders to embed and to invoke. Out: reports to the control plane.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

from dovetail.ir.errors import DovetailError
from dovetail.ir.workflow import Function
from dovetail.runtime.flows.indexes import EmbedTexts
from dovetail.runtime.wavefront.messages import Embed, Failed, Finished, Invoke, Report

BATCH = 64
"""Texts that are embedded together."""
FUNCTIONS = 64
"""Functions of nodes that run side by side."""

Tell: TypeAlias = Callable[[Report], None]
Draw: TypeAlias = Callable[[Sequence[Embed], float, float], None]


@dataclass(frozen=True, slots=True)
class _Text:
    """A text on its way to an encoder."""

    order: Embed
    embed: EmbedTexts


class EmbeddingLane:
    """One thread that embeds all that waits, texts for one encoder in one batch."""

    def __init__(self, tell: Tell, draw: Draw, clock: Callable[[], float]) -> None:
        """`tell` and `draw` (a batch, its start and end) may be called on any thread."""
        self._tell, self._draw, self._clock = tell, draw, clock
        self._queue: SimpleQueue[_Text | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, order: Embed, embed: EmbedTexts) -> None:
        """Have the text of an order embedded."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="dovetail-embedding", daemon=True
            )
            self._thread.start()
        self._queue.put(_Text(order, embed))

    def close(self) -> None:
        """End the thread after the batch under way; what waits is left."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while batch := self._take():
            by_encoder = defaultdict(list)
            for text in batch:
                by_encoder[text.embed].append(text.order)
            for embed, orders in by_encoder.items():
                self._run(orders, embed)

    def _take(self) -> list[_Text]:
        """Return what waits, after waiting for the first; nothing at the end."""
        text = self._queue.get()
        batch: list[_Text] = []
        while text is not None:
            batch.append(text)
            if len(batch) == BATCH:
                return batch
            try:
                text = self._queue.get_nowait()
            except Empty:
                return batch
        return []

    def _run(self, orders: Sequence[Embed], embed: EmbedTexts) -> None:
        """Embed texts together, and those of a batch that fails one by one."""
        start = self._clock()
        try:
            rows = embed([order.text for order in orders])
        except Exception as error:
            if len(orders) == 1:
                self._tell(Failed(orders[0].job, as_ours(error)))
                return
            for order in orders:
                self._run([order], embed)
            return
        self._draw(orders, start, self._clock())
        for order, row in zip(orders, rows, strict=True):
            self._tell(Finished(order.job, row))


class FunctionLane:
    """Threads that call the functions of nodes."""

    def __init__(self, tell: Tell) -> None:
        """`tell` may be called on any thread."""
        self._tell = tell
        self._pool: ThreadPoolExecutor | None = None

    def put(self, order: Invoke) -> None:
        """Have a function called."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(FUNCTIONS, "dovetail-function")
        self._pool.submit(self._run, order)

    def close(self) -> None:
        """Call nothing more; functions that run are left to end."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, order: Invoke) -> None:
        node = order.call.node
        assert isinstance(node, Function)
        try:
            value = node.function(order.call.state)
        except Exception as error:
            self._tell(Failed(order.job, as_ours(error)))
        else:
            self._tell(Finished(order.job, value))


def as_ours(error: Exception) -> DovetailError:
    """Return an error of users' code or values as one for users."""
    if isinstance(error, DovetailError):
        return error
    return DovetailError(f"{type(error).__name__}: {error}")
