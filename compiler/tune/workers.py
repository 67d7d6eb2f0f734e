"""Runs the searches of a tuning job: several at once, each on cores of its own, with progress.

In: items, a recorder for each worker and how to search one item. Out: nothing but records; a
`Board` hears of each and tells how far the job is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from queue import SimpleQueue

from dovetail.compiler.measure.jobs import Scoreboard, TuneProgress
from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.measure.recorder import Recorder
from dovetail.compiler.search.parts import Item
from dovetail.ir.tuning import TuningRecord

Progress = Callable[[TuneProgress], None]


def run_items(
    items: Sequence[Item],
    recorders: Sequence[Recorder],
    search: Callable[[Item, Measurer, float], None],
    budget: float,
    finished: Callable[[], None],
) -> float:
    """Search all items, as many at once as there are recorders, in `budget` seconds of each clock.

    Returns the seconds it took. Whatever ends it early stops the measurers first; an unfinished
    batch is not recorded.
    """
    free: SimpleQueue[tuple[Recorder, float]] = SimpleQueue()
    ends = [recorder.now() + budget for recorder in recorders]
    for recorder, end in zip(recorders, ends, strict=True):
        free.put((recorder, end))
    waiting = list(items)

    def work(item: Item) -> None:
        recorder, end = free.get()
        share = (end - recorder.now()) * len(recorders) / max(len(waiting), len(recorders))
        waiting.remove(item)
        try:
            search(item, recorder, share)
        finally:
            free.put((recorder, end))

    with ThreadPoolExecutor(len(recorders)) as pool:
        try:
            for future in as_completed([pool.submit(work, item) for item in items]):
                future.result()
                finished()
        except BaseException:
            for recorder in recorders:
                recorder.inner.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return max(r.now() - end + budget for r, end in zip(recorders, ends, strict=True))


@dataclass(slots=True)
class Board:
    """A scoreboard that several workers write to, and a job's progress is read from."""

    items: int
    budget: float
    tell: Progress | None
    scores: Scoreboard = field(default_factory=Scoreboard)
    done: int = 0
    start: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: TuningRecord) -> None:
        """Take in a record."""
        with self._lock:
            self.scores.add(record)
            self._tell()

    def finish(self) -> None:
        """Count an item as done."""
        with self._lock:
            self.done += 1
            self._tell()

    def progress(self) -> TuneProgress:
        """Return where the job stands."""
        elapsed = time.monotonic() - self.start
        return self.scores.progress(self.done, self.items, elapsed, self.budget)

    def _tell(self) -> None:
        if self.tell:
            self.tell(self.progress())
