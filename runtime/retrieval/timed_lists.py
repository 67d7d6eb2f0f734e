"""Lists on a device that may stop answering: what it does not do in time fails, as does all after.

In: what opens the lists, seconds. Out: `TimedLists`. Its callers wait no longer than that; the
thread that does stays behind, as a call of a driver cannot be taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from dovetail.ir.errors import DeviceError
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.retrieval.device_lists import DeviceLists
from dovetail.runtime.retrieval.ivf import IvfIndex
from dovetail.runtime.retrieval.scans import Mask, Scan

log = logging.getLogger("dovetail")

T = TypeVar("T")


class TimedLists:
    """See `DeviceLists`. A device that is given up holds nothing, and is never asked again."""

    def __init__(
        self, open_lists: Callable[[], DeviceLists], seconds: float, opening_seconds: float
    ) -> None:
        """`seconds`: for copying one cluster, for the scans of one sub-stage.

        What is opened later than within `opening_seconds` is closed at once. Raises DeviceError
        where the device does not answer, and what `open_lists` raises.
        """
        self._seconds = seconds
        self._gone = ""
        # one copies while the other scans, as `DeviceLists` says
        self._scanning, self._copying = (ThreadPoolExecutor(1, "gpu-lists") for _ in range(2))
        opening = self._scanning.submit(open_lists)
        try:
            self._lists = self._await(opening, opening_seconds)
        except DeviceError:
            opening.add_done_callback(_close_late)
            raise

    @property
    def used(self) -> int:
        """See `DeviceLists`."""
        return 0 if self._gone else self._lists.used

    @property
    def capacity(self) -> int:
        """See `DeviceLists`."""
        return self._lists.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._lists.capacity = capacity

    @property
    def seconds(self) -> float:
        """See `DeviceLists`."""
        return self._lists.seconds

    def load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        for cluster in clusters:
            self._do(self._copying, partial(self._lists.load, index, [cluster]))

    def drop(self, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        if not self._gone:  # else nothing is there
            self._do(self._copying, lambda: self._lists.drop(clusters))

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """See `DeviceLists`."""
        return not self._gone and self._lists.holds(index, cluster)

    def held(self) -> set[int]:
        """See `DeviceLists`."""
        return set() if self._gone else self._lists.held()

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`."""
        return self._do(self._scanning, lambda: self._lists.scan(index, scans, depth, allowed))

    def close(self) -> None:
        """Give the memory back; a device that fails keeps it until the process ends."""
        with suppress(DeviceError):
            self._do(self._copying, self._lists.close)
        for hand in (self._scanning, self._copying):
            hand.shutdown(wait=False)

    def _do(self, hand: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._gone:
            raise DeviceError(self._gone)
        return self._await(hand.submit(work), self._seconds)

    def _await(self, asked: Future[T], seconds: float) -> T:
        try:
            return asked.result(seconds)
        except TimeoutError:
            self._gone = f"the GPU has not answered for {seconds:g} s"
            log.warning("%s; the CPU scans hot clusters from now on", self._gone)
            raise DeviceError(self._gone) from None


def _close_late(opening: Future[DeviceLists]) -> None:
    """Give back what a device has come to hold that was given up meanwhile."""
    if opening.exception() is None:
        with suppress(DeviceError):
            opening.result().close()
