"""Reranks of workflows: pairs of a text and a document in the queues of all encoders.

In: orders to rank documents. Out: reports with the best of each; a batch of an encoder holds pairs
of any requests. Cancelled ones leave the queues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import msgspec

from dovetail.ir.errors import RequestError
from dovetail.runtime.embed.texts import Ranked, StartedRerank, cancel_started
from dovetail.runtime.flows.control import messages
from dovetail.runtime.index.documents import Document
from dovetail.runtime.native.encoder import Rows

StartRerank: TypeAlias = Callable[..., StartedRerank]
"""As `Embeddings.start_rerank`."""


def find_best(documents: Sequence[object], ranked: Sequence[Ranked]) -> list[Document]:
    """Return ranked documents with their scores; a plain text has its place as its id."""
    found = []
    for one in ranked:
        given = documents[one.index]
        if not isinstance(given, Document):
            given = Document(id=one.index, text=one.document)
        found.append(msgspec.structs.replace(given, score=one.score))
    return found


class Reranks:
    """Reranks under way. For the driver's thread; texts are read on one of its own."""

    def __init__(
        self,
        start: StartRerank,
        tell: Callable[[messages.Report], None],
        draw: Callable[[messages.RankDocuments, float, float], None],
    ) -> None:
        """`tell` and `draw` (an order that is done, its start and end) are called on any thread."""
        self._ask, self._tell, self._draw = start, tell, draw
        self._reader = ThreadPoolExecutor(1, "dovetail-rerank")
        self._started: dict[int, Future[StartedRerank]] = {}

    def begin(self, order: messages.RankDocuments) -> None:
        """Queue the pairs of an order: of its list as it is now, functions may change that."""
        if isinstance(order.documents, list):
            order = msgspec.structs.replace(order, documents=tuple(order.documents))
        started = self._started[order.job] = self._reader.submit(self._start, order)
        started.add_done_callback(partial(self._wait, order, time.perf_counter()))

    def cancel(self, job: int) -> None:
        """Take what is left of an order out of the queues, if it is one."""
        if (started := self._started.pop(job, None)) is not None and not started.cancel():
            started.add_done_callback(cancel_started)

    def close(self) -> None:
        """Leave what is under way."""
        for job in tuple(self._started):
            self.cancel(job)
        self._reader.shutdown(wait=False)

    def _start(self, order: messages.RankDocuments) -> StartedRerank:
        node, given = order.node, order.documents
        if not isinstance(given, list | tuple):
            raise RequestError(f"{node.documents!r} is no list of documents but {given!r:.80}")
        texts = [str(each) if isinstance(each, Document) else each for each in given]
        asked = {"model": node.model, "top_n": node.topk, "instruction": node.instruction}
        return self._ask(order.query, texts, wait=True, **asked)

    def _wait(
        self, order: messages.RankDocuments, began: float, read: Future[StartedRerank]
    ) -> None:
        if self._failed(order, read):
            return
        job, rank = read.result()

        def scored(done: Future[Rows]) -> None:
            if self._failed(order, done):
                return
            report: messages.Report
            try:
                self._draw(order, began, time.perf_counter())
                best = find_best(order.documents, rank(done.result()))
                report = messages.Finished(order.job, best)
            except Exception as error:  # which callbacks of futures only log
                report = messages.Failed(order.job, messages.as_ours(error))
            self._end(report)

        job.future.add_done_callback(scored)

    def _failed(self, order: messages.RankDocuments, done: Future[Any]) -> bool:
        """Tell whether nothing comes of an order: it was cancelled, or fails, which is reported."""
        if done.cancelled():
            return True
        if (error := done.exception()) is not None:
            self._end(messages.Failed(order.job, messages.as_ours(error)))
        return error is not None

    def _end(self, report: messages.Report) -> None:
        self._started.pop(report.job, None)
        self._tell(report)
