"""The emulated accelerator on a virtual clock: modelled times, memory, vectors of the encoder."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.embedding.instance import EmulatedAccelerator, EncoderSource
from dovetail.runtime.embedding.line import Line
from tests.runtime.embedding.toy_encoders import Toy, vector

QUERY = np.arange(75, dtype=np.int32)


class Clock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Slow(Toy):
    """Takes time of the clock for each vector."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.cost = clock, seconds

    def embed_tokens(self, ids, types=None):
        self.clock.sleep(self.cost * len(ids))
        return super().embed_tokens(ids, types)


def accelerator(clock: Clock, encoder: Toy | None = None, **options: int) -> EmulatedAccelerator:
    line = Line(0.02, 0.1)
    return EmulatedAccelerator(line, 75, encoder, now=clock.now, sleep=clock.sleep, **options)


def test_batches_take_their_modelled_seconds_by_their_tokens() -> None:
    clock = Clock()
    device = accelerator(clock)
    device.embed_tokens([QUERY] * 10)
    assert clock.seconds == pytest.approx(100.3)
    device.embed_tokens([QUERY[:30], QUERY[:45]])
    assert clock.seconds == pytest.approx(100.42)


def test_a_late_wake_up_does_not_add_up() -> None:
    clock = Clock()
    device = accelerator(clock)
    for _ in range(10):
        device.embed_tokens([QUERY])
        clock.sleep(0.001)
    assert clock.seconds == pytest.approx(100 + 10 * 0.12 + 0.001)


def test_vectors_are_the_encoder_s_and_those_learnt_ahead_cost_no_time() -> None:
    clock = Clock()
    encoder = Slow(clock, 0.05)
    device = accelerator(clock, encoder)
    queries = [QUERY, QUERY[:7]]
    device.learn(queries)
    start = clock.seconds
    rows = device.embed_tokens([*queries, QUERY])
    np.testing.assert_array_equal(rows, np.stack([vector(q) for q in (*queries, QUERY)]))
    assert clock.seconds - start == pytest.approx(0.1 + 0.02 * 157 / 75)
    assert device.late == 0
    device.embed_tokens([QUERY[:8]] * 8)  # eight vectors at 50 ms are not ready in 117 ms
    assert device.late == 1
    assert device.dim == Toy.dim


def test_a_batch_beyond_its_memory_is_refused_before_it_takes_time() -> None:
    clock = Clock()
    device = accelerator(clock, most_tokens=150)
    with pytest.raises(DeviceError, match="out of memory: 225 tokens, 150 fit"):
        device.embed_tokens([QUERY] * 3)
    assert clock.seconds == 100
    assert device.embed_tokens([QUERY] * 2).shape == (2, 1)


def test_an_encoder_is_opened_by_name() -> None:
    found = EncoderSource(module=Toy.__module__, function="toy")
    assert found.open().dim == Toy.dim
    with pytest.raises(SpecError, match=r"no encoder json\.nothing"):
        EncoderSource(module="json", function="nothing").open()
