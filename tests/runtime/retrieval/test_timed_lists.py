"""A device that does not answer in time is given up: nobody waits for it, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Event

import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.retrieval.build import build_index
from dovetail.runtime.retrieval.device_lists import DeviceLists, DeviceScanner, EmulatedLists
from dovetail.runtime.retrieval.ivf import IvfIndex
from dovetail.runtime.retrieval.scans import Scan
from dovetail.runtime.retrieval.timed_lists import TimedLists
from dovetail.runtime.retrieval.wire import EmulatedGpu

DIM, LISTS, ROOM = 8, 6, 1 << 20
VECTORS = np.random.default_rng(5).standard_normal((200, DIM)).astype(np.float32)
PATIENCE = 0.05


@pytest.fixture(scope="module")
def index() -> IvfIndex:
    return build_index(VECTORS, clusters=LISTS)


@pytest.fixture
def freed() -> Iterator[Event]:
    """What hangs ends with the test."""
    event = Event()
    yield event
    event.set()


def emulated(index: IvfIndex) -> EmulatedLists:
    return EmulatedLists(index, ROOM, EmulatedGpu(1e-5, 1e12, 5e10))


def scan_of(clusters: Iterable[int]) -> Scan:
    chosen = list(clusters)
    return Scan(VECTORS[0], chosen, np.zeros(len(chosen), np.float32))


def test_a_device_that_answers_is_passed_through(index: IvfIndex) -> None:
    inner = emulated(index)
    lists = TimedLists(lambda: inner, 60, 60)
    hybrid = DeviceScanner(lists)
    assert hybrid.swap(index, [0, 2, 5], (), ROOM) == set()
    assert lists.held() == {0, 2, 5} and lists.used == inner.used > 0
    assert index.scan([scan_of(range(LISTS))], 5, hybrid) == index.scan([scan_of(range(LISTS))], 5)
    assert hybrid.take_absent().of(index) == {1, 3, 4} and lists.seconds == inner.seconds > 0
    assert hybrid.swap(index, [1], [2], ROOM // 2) == set() and inner.capacity == ROOM // 2
    assert inner.held() == lists.held() == {1, 2}
    hybrid.close()
    assert inner.used == 0


@pytest.mark.parametrize("hanging", ["load", "drop", "scan", "close"])
def test_a_device_that_hangs_is_given_up(
    index: IvfIndex, freed: Event, hanging: str, caplog: pytest.LogCaptureFixture
) -> None:
    inner = emulated(index)
    lists = TimedLists(lambda: inner, 60, 60)
    hybrid, asked = DeviceScanner(lists), list[str]()
    hybrid.swap(index, [0, 1], (), ROOM)
    lists._seconds = PATIENCE

    def hang(*_: object) -> None:
        asked.append(hanging)
        freed.wait()

    setattr(inner, hanging, hang)
    do: dict[str, Callable[[], object]] = {
        "load": lambda: hybrid.swap(index, [2, 3], [0, 1], ROOM) == {2, 3},
        "drop": lambda: hybrid.swap(index, [2], (), ROOM) == {2},
        "scan": lambda: (
            index.scan([scan_of([0, 4])], 5, hybrid) == index.scan([scan_of([0, 4])], 5)
        ),
        "close": lambda: hybrid.close() is None,
    }
    assert do[hanging]()
    assert "has not answered for 0.05 s" in caplog.text
    assert lists.held() == set() and lists.used == 0 and not lists.holds(index, 0)
    assert hybrid.swap(index, [0], (), ROOM) == {0}, "it is not asked again"
    everything = [scan_of(range(LISTS))]
    hybrid.take_absent()
    assert index.scan(everything, 5, hybrid) == index.scan(everything, 5)
    assert hybrid.take_absent().of(index) == set(range(LISTS))
    hybrid.close()
    assert asked == [hanging]


def test_what_hangs_or_fails_as_it_is_opened_is_told(freed: Event) -> None:
    def hang() -> DeviceLists:
        freed.wait()
        raise AssertionError

    def fail() -> DeviceLists:
        raise SpecError("no such GPU")

    with pytest.raises(DeviceError, match="not answered"):
        TimedLists(hang, 60, PATIENCE)
    with pytest.raises(SpecError, match="no such GPU"):
        TimedLists(fail, 60, 60)


def test_opening_has_a_limit_of_its_own(index: IvfIndex, freed: Event) -> None:
    def open_slowly() -> DeviceLists:
        freed.wait(2 * PATIENCE)
        return emulated(index)

    lists = TimedLists(open_slowly, PATIENCE, 60)
    assert lists.capacity == emulated(index).capacity
    lists.close()


def test_what_opens_after_it_was_given_up_is_closed(index: IvfIndex, freed: Event) -> None:
    inner, closed = emulated(index), Event()
    inner.load(index, [0])
    inner.close, close = closed.set, inner.close  # type: ignore[method-assign]

    def open_late() -> DeviceLists:
        freed.wait()
        return inner

    with pytest.raises(DeviceError, match=r"not answered for 0\.05 s"):
        TimedLists(open_late, 60, PATIENCE)
    assert not closed.is_set()
    freed.set()
    assert closed.wait(60)
    close()
