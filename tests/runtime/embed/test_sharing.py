"""Models that share devices: one device's room and time between them, batch by batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import CapacityError, RequestError
from dovetail.runtime.embed.device_queue import EmbedQuery, QueueSpec, length_classes
from dovetail.runtime.embed.line import Arrival, Line
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.embed.service import EmbeddingService
from tests.runtime.embed.arrivals import poisson_calls
from tests.runtime.embed.integrity import check_integrity, held
from tests.runtime.embed.toy_encoders import Toy, vector
from tests.runtime.embed.virtual_queues import Burst, simulate

SLO, CPU = 1.0, Line(0.0095, 0.0095)
TWO = (*length_classes([32, 128], "a"), *length_classes([64], "b"))


def shared(arrival: Arrival, **options: object) -> QueueManager:
    """A CPU of 8 or 4 queries to model a, or 2 to model b."""
    lines = (Line(0.1, 0.2), Line(0.2, 0.2), Line(0.3, 0.4))
    return QueueManager(
        [QueueSpec("cpu", False, (8, 4, 2), lines)],
        TWO,
        arrival=arrival,
        **options,  # type: ignore[arg-type]
    )


def test_a_query_fills_its_share_of_the_device_for_other_models_too() -> None:
    manager = shared("closed")
    held = [EmbedQuery(n, 20, 10.0, model="a") for n in range(4)]
    manager.submit(held, 0.0)
    manager.submit([EmbedQuery(4, 20, 10.0, model="b")], 0.0)
    for number, (model, tokens) in enumerate((("a", 20), ("a", 100), ("b", 20)), 10):
        with pytest.raises(CapacityError):
            manager.submit([EmbedQuery(number, tokens, 10.0, model=model)], 0.0)
    manager.cancel(held[0])
    manager.submit([EmbedQuery(20, 20, 10.0, model="a")], 0.0)
    check_integrity(manager)


def test_batches_are_of_one_model_and_the_most_urgent_goes_first() -> None:
    manager = shared("closed")
    manager.submit([EmbedQuery(1, 20, 5.0, model="a"), EmbedQuery(2, 20, 4.0, model="b")], 0.0)
    manager.submit([EmbedQuery(3, 100, 6.0, model="a")], 0.0)
    first = manager.take("cpu", 0.0)
    assert first is not None and (first.model, first.expected) == ("b", pytest.approx(0.7))
    assert manager.take("cpu", 0.0) is None, "the device is one model's at a time"
    manager.complete(first)
    second = manager.take("cpu", 1.0)
    assert second is not None and [query.number for query in second.queries] == [1, 3]
    assert (second.model, second.expected) == ("a", pytest.approx(1.5))


def test_what_waits_for_one_model_is_waited_for_by_the_other() -> None:
    """Its batch comes first: 0.2 + 4 * 0.1 s, then 0.4 + 0.3 s, in all more than 1.2 s."""
    for arrival in ("open", "closed"):
        manager = shared(arrival)
        manager.submit([EmbedQuery(0, 20, 1.2, model="b")], 0.0)
        manager.cancel(next(iter(manager.live())))
        manager.submit([EmbedQuery(n, 20, 1.4, model="a") for n in range(1, 5)], 0.0)
        with pytest.raises(CapacityError):
            manager.submit([EmbedQuery(9, 20, 1.2, model="b")], 0.0)
        manager.submit([EmbedQuery(10, 20, 1.4, model="b")], 0.0)


def test_models_are_known_and_have_their_own_lengths() -> None:
    manager = shared("open")
    with pytest.raises(RequestError, match="'c'"):
        manager.submit([EmbedQuery(0, 5, model="c")], 0.0)
    with pytest.raises(RequestError, match="1 to 64"):
        manager.submit([EmbedQuery(0, 100, model="b")], 0.0)


# ---- on a virtual clock ----

SLOWER = 2.5
"""The other model takes so many times as long."""
BOTH = (*length_classes([512], "a"), *length_classes([512], "b"))


def both(arrival: Arrival, line: Line = CPU) -> tuple[QueueManager, dict[str, tuple[Line, ...]]]:
    """One CPU for two models, and its true lines."""
    lines = (line, line.scaled(SLOWER))
    depths = tuple(each.depth(SLO, arrival) for each in lines)
    manager = QueueManager([QueueSpec("cpu", False, depths, lines)], BOTH, arrival=arrival)
    return manager, {"cpu": lines}


@settings(max_examples=25, deadline=None)
@given(
    line=st.builds(Line, st.floats(0.005, 0.05), st.floats(0.0, 0.15)),
    loads=st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)),
    arrival=st.sampled_from(["open", "closed"]),
    seed=st.integers(0, 1000),
)
def test_models_that_share_a_device_do_not_make_each_other_late(
    line: Line, loads: tuple[float, float], arrival: Arrival, seed: int
) -> None:
    """Queues that did not know of each other would admit twice what the CPU can do."""
    queues, truth = both(arrival, line)
    if arrival == "open":
        calls = [
            replace(call, model=model)
            for model, load in zip("ab", loads, strict=True)
            for call in poisson_calls(load / line.alpha, 5.0, 75, seed)
        ]
        calls.sort(key=lambda call: call.at)
    else:
        most = queues.depths()["cpu"]
        shares = [load / sum(loads) for load in loads]
        counts = [int(depth * share) for depth, share in zip(most, shares, strict=True)]
        calls = [Burst(0.0, (75,) * n, m) for n, m in zip(counts, "ab", strict=True) if n]
    found = simulate(queues, truth, calls, SLO)
    assert found.percentile(1.0) <= SLO * (1 + 1e-9)
    assert found.accepted + found.busy == sum(len(call.tokens) for call in calls)
    check_integrity(queues)
    assert len(queues._alive) == 0


def test_two_models_get_the_capacity_of_one_device_between_them() -> None:
    queues, truth = both("open")
    calls = [
        replace(call, model=model)
        for model in "ab"
        for call in poisson_calls(300, 10.0, 75, seed=ord(model))
    ]
    calls.sort(key=lambda call: call.at)
    found = simulate(queues, truth, calls, SLO)
    fastest, slowest = 1 / CPU.alpha, 1 / (CPU.alpha * SLOWER)
    assert 0.85 * slowest <= found.rate <= fastest


# ---- on threads ----


class Gated(Toy):
    """Runs when it is told to; says that it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        self.begun.set()
        assert self.gate.wait(60)
        return super().embed_tokens(ids, types)


def test_one_model_runs_at_a_time_on_a_device_and_each_call_gets_its_own() -> None:
    first, second = Gated(), Gated()
    manager = shared("closed")
    models = {"a": first, "b": second}
    query = [np.array([1, 2, 3], np.int32)]
    with EmbeddingService({"cpu": [models]}, manager, slo=30.0) as service:
        jobs = [service.submit(query, model="a")]
        assert first.begun.wait(60)
        jobs.append(service.submit(query, model="b"))
        with pytest.raises(CapacityError):  # 1/8 and 1/2 are taken
            service.submit(query * 4, model="a")
        with pytest.raises(RequestError, match="no encoder is called 'c'"):
            service.submit(query, model="c")
        first.gate.set()
        jobs[0].result(60)
        assert second.begun.wait(60)
        second.gate.set()
        for job in jobs:
            np.testing.assert_array_equal(job.result(60)[0], vector(query[0]))
        assert held(service) == {"cpu": 0}
