"""A device that does not answer in time is given up: nobody waits for it, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.accel.torch_lists import TorchLists
from dovetail.runtime.index.build import build_index
from dovetail.runtime.index.ivf import FaissScanner, IvfIndex
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.device_lists import DeviceScanner
from tests.runtime.index.parts import part_of
from tests.runtime.retrieval.test_device_lists import beside, open_lists

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


def timed(
    opens: Callable[[], TorchLists], seconds: float = 60, opening: float = 60
) -> DeviceScanner:
    return DeviceScanner(opens, FaissScanner(), seconds, opening)


def scan_of(clusters: Iterable[int]) -> Part:
    return part_of(VECTORS[0], clusters)


def test_a_device_that_answers_is_passed_through(index: IvfIndex) -> None:
    inner = open_lists(index)
    hybrid = beside(inner)
    assert hybrid.swap(index, [0, 2, 5], (), ROOM) == set()
    assert inner.held() == {0, 2, 5} and hybrid.used == inner.used > 0
    assert index.scan([scan_of(range(LISTS))], 5, hybrid) == index.scan([scan_of(range(LISTS))], 5)
    assert hybrid.take_absent(index)[1] == {1, 3, 4}
    assert hybrid.swap(index, [1], [2], ROOM // 2) == set() and inner.capacity == ROOM // 2
    assert inner.held() == {1, 2}
    hybrid.close()
    assert inner.used == 0


@pytest.mark.parametrize("hanging", ["load", "drop", "scan", "close"])
def test_a_device_that_hangs_is_given_up(
    index: IvfIndex, freed: Event, hanging: str, caplog: pytest.LogCaptureFixture
) -> None:
    inner = open_lists(index)
    hybrid, asked = beside(inner), list[str]()
    hybrid.swap(index, [0, 1], (), ROOM)

    def hang(*_: object) -> None:
        asked.append(hanging)
        freed.wait()

    def hasten(pool: Any, work: Any, *given: Any, do: Any = hybrid._do) -> Any:
        hybrid._seconds = PATIENCE if work is hang else 60
        return do(pool, work, *given)

    setattr(inner, hanging, hang)
    hybrid._do = hasten  # type: ignore[method-assign]
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
    assert hybrid.used == 0 and not hybrid.holds(index, 0)
    assert hybrid.swap(index, [0], (), ROOM) == {0}, "it is not asked again"
    everything = [scan_of(range(LISTS))]
    hybrid.take_absent(index)
    assert index.scan(everything, 5, hybrid) == index.scan(everything, 5)
    assert hybrid.take_absent(index)[1] == set(range(LISTS))
    hybrid.close()
    assert asked == [hanging]


def test_what_hangs_or_fails_as_it_is_opened_is_told(freed: Event) -> None:
    def hang() -> TorchLists:
        freed.wait()
        raise AssertionError

    def fail() -> TorchLists:
        raise SpecError("no such GPU")

    with pytest.raises(DeviceError, match="not answered"):
        timed(hang, 60, PATIENCE)
    with pytest.raises(SpecError, match="no such GPU"):
        timed(fail)


def test_opening_has_a_limit_of_its_own(index: IvfIndex, freed: Event) -> None:
    def open_slowly() -> TorchLists:
        freed.wait(2 * PATIENCE)
        return open_lists(index)

    hybrid = timed(open_slowly, PATIENCE)
    assert hybrid.used == 0
    hybrid.close()


def test_what_opens_after_it_was_given_up_is_closed(index: IvfIndex, freed: Event) -> None:
    inner, closed = open_lists(index), Event()
    inner.load(index, [0])
    inner.close, close = closed.set, inner.close  # type: ignore[method-assign]

    def open_late() -> TorchLists:
        freed.wait()
        return inner

    with pytest.raises(DeviceError, match=r"not answered for 0\.05 s"):
        timed(open_late, 60, PATIENCE)
    assert not closed.is_set()
    freed.set()
    assert closed.wait(60)
    close()
