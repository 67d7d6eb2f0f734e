"""A CPU instance in a process of its own: right vectors, its CPUs, errors, death."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.child.child import ChildLost
from dovetail.runtime.embed.encoder import EncoderSource
from dovetail.runtime.embed.process import ProcessInstance
from tests.runtime.embed.toy_encoders import HEAVY, vector


def source(function: str, **options: object) -> EncoderSource:
    return EncoderSource(module="toy_encoders", function=function, options=options)


@pytest.fixture(autouse=True)
def _children_find_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    old = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{old}" if old else here)


@pytest.fixture
def instance() -> Iterator[ProcessInstance]:
    made = ProcessInstance(source("toy"))
    yield made
    made.close()


def test_batches_of_any_lengths_come_back_in_order(instance: ProcessInstance) -> None:
    draw = np.random.default_rng(0)
    for sizes in ([1], [3, 1, 500], [2] * 300):
        ids = [draw.integers(0, 600, n).astype(np.int32) for n in sizes]
        rows = instance.embed_tokens(ids)
        np.testing.assert_array_equal(rows, np.stack([vector(each) for each in ids]))


def test_an_error_is_one_batch_s_and_a_death_is_noticed_and_mended(
    instance: ProcessInstance,
) -> None:
    good = np.array([1, 2], np.int32)
    with pytest.raises(DeviceError, match="out of memory"):
        instance.embed_tokens([good, np.array([HEAVY], np.int32)])
    assert len(instance.embed_tokens([good])) == 1
    first, back = instance.pid, threading.Event()
    assert first is not None
    instance.changed = lambda: back.set() if instance.ready else None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ChildLost):
        instance.embed_tokens([good])
    assert back.wait(60) and instance.pid != first
    assert len(instance.embed_tokens([good])) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_it_is_pinned_before_the_model_is_opened() -> None:
    cpu = max(os.sched_getaffinity(0))
    made = ProcessInstance(source("pinned"), (cpu, 9999))
    try:
        row = made.embed_tokens([np.array([1], np.int32)])[0]
        assert row[0] == (made.pid or 0) % 10_000
        assert (row[1], row[2]) == (1, cpu)
    finally:
        made.close()


def test_what_opening_raised_is_raised_here() -> None:
    with pytest.raises(SpecError, match="no such model"):
        ProcessInstance(source("refuse"))
