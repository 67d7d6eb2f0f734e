"""The queue manager: exact counts under every order of events."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.embed.device_queue import (
    EmbedQuery,
    QueryBatch,
    QueryClass,
    QueryState,
    QueueSpec,
    length_classes,
)
from dovetail.runtime.embed.line import Line
from dovetail.runtime.embed.queue import QueueManager
from tests.runtime.embed.integrity import check_integrity, load

CLASSES = (32, 128, 512)
OTHER = QueryClass(512, "other")


class Manager(RuleBasedStateMachine):
    """Any order of arrivals, batches, failures, deaths, cancellations, and devices that change.

    Two models share the devices.
    """

    @initialize(
        depths=st.lists(st.tuples(*[st.integers(0, 12)] * 4), min_size=1, max_size=3),
        cpu=st.tuples(*[st.integers(0, 6)] * 4),
        instances=st.integers(1, 3),
        budget=st.sampled_from([1, 100, 600, 1 << 30]),
        heterogeneous=st.booleans(),
        arrival=st.sampled_from(["open", "closed"]),
    )
    def start(self, depths, cpu, instances, budget, heterogeneous, arrival) -> None:
        lines = tuple(Line(0.01 * (k + 1), 0.02) for k in range(4))
        slow = tuple(line.scaled(4) for line in lines)
        specs = [
            QueueSpec(f"gpu{i}", True, depth, lines, instances, budget)
            for i, depth in enumerate(depths)
        ]
        specs.append(QueueSpec("cpu", False, cpu, slow, 1, budget))
        self.manager = QueueManager(
            specs,
            (*length_classes(CLASSES), OTHER),
            heterogeneous=heterogeneous,
            arrival=arrival,
        )
        self.cpu_allowed = heterogeneous
        self.numbers, self.now = itertools.count(), 0.0
        self.accepted: dict[int, EmbedQuery] = {}
        self.ended: list[int] = []
        self.running: list[QueryBatch] = []
        self.ceilings = dict.fromkeys(self.manager.depths(), 0)

    def waiting(self, name: str) -> int:
        return len(self.manager._queues[name].waiting)

    def full(self, name: str, kind: int) -> bool:
        """Independent of the manager's integers: would one more query exceed the device?"""
        depths = self.manager.depths()[name]
        held = [q for q in self.accepted.values() if q.device == name and q.state in LIVE]
        if not depths[kind] or any(not depths[q.kind] for q in held):
            return True
        return math.fsum(1 / depths[q.kind] for q in held) + 1 / depths[kind] > 1 + 1e-9

    @rule(
        tokens=st.lists(st.integers(1, 512), min_size=1, max_size=6),
        wait=st.sampled_from([0.0, 0.1, 1.0]),
        terms=st.tuples(st.booleans(), st.sampled_from(["", "", OTHER.model])),
    )
    def arrive(self, tokens, wait, terms) -> None:
        bulk, model = terms
        self.now += wait
        target = math.inf if bulk else self.now + 1.0
        new = [EmbedQuery(next(self.numbers), n, target, model) for n in tokens]
        before = len(self.manager._alive)
        closed_and_plain = self.manager.arrival == "closed" and not bulk
        try:
            self.manager.submit(new, self.now)
        except (CapacityError, DeviceError):
            assert len(self.manager._alive) == before
            assert all(query.state is QueryState.NEW for query in new)
            if closed_and_plain and len(new) == 1:  # BUSY only where nothing has room
                bounds = CLASSES if not model else (0, 0, 0, OTHER.tokens)
                kind = [n >= tokens[0] for n in bounds].index(True)
                open_names = [n for n in self.manager.depths() if n not in self.shut | self.gone]
                usable = [n for n in open_names if n != "cpu" or self.cpu_allowed]
                assert all(self.full(n, kind) or self.has_others(n, model) for n in usable)
            return
        self.accepted |= {query.number: query for query in new}
        if not self.cpu_allowed:
            assert all(query.device != "cpu" for query in new)

    def has_others(self, name: str, model: str) -> bool:
        """Another model is here: then the finish counts as well as the depth."""
        live = [q for q in self.accepted.values() if q.device == name and q.state in LIVE]
        return any(query.model != model for query in live)

    shut: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()

    @rule(data=st.data())
    def take(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.manager.depths())))
        waiting, spec = self.waiting(name), self.manager.spec(name)
        busy = sum(batch.device == name for batch in self.running)
        batch = self.manager.take(name, self.now)
        assert (batch is None) == (waiting == 0 or busy >= spec.instances)
        if batch:
            assert {query.model for query in batch.queries} == {batch.model}
            sizes = [query.tokens for query in batch.queries]
            assert sum(sizes) <= spec.token_budget or len(sizes) == 1
            self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["complete", "complete", "fail", "lose"]))
    def end(self, data, how) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.now = max(self.now, batch.expected)
        self.ended += [query.number for query in getattr(self.manager, how)(batch)]

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        query = self.accepted[data.draw(st.sampled_from(sorted(self.accepted)))]
        if self.manager.cancel(query):
            self.ended.append(query.number)

    @rule(data=st.data(), depths=st.tuples(*[st.integers(0, 12)] * 4))
    def change(self, data, depths) -> None:
        name = data.draw(st.sampled_from(sorted(self.manager.depths())))
        self.manager.set_queue(replace(self.manager.spec(name), depths=depths))
        self.ceilings[name] = load(self.manager, name)

    @rule(data=st.data())
    def shut_one(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.manager.depths())))
        before = sum(self.manager._queues[name].held)
        self.manager.close_device(name, self.now)
        assert sum(self.manager._queues[name].held) <= before
        self.shut |= {name}

    @precondition(lambda self: self.shut)
    @rule()
    def open_all(self) -> None:
        for name in self.shut:
            self.manager.open_device(name)
        self.shut = frozenset()

    @rule(data=st.data())
    def abandon(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.manager.depths())))
        if any(batch.device == name for batch in self.running):
            return
        self.gone |= {name}
        self.ceilings[name] = 0
        self.ended += [
            query.number for query in self.manager.close_device(name, self.now, gone=True)
        ]
        self.refill()

    @rule()
    def refill(self) -> None:
        """What was on a device that is gone, and has no SLO, waits for room."""
        self.ended += [query.number for query, _ in self.manager.refill(self.now)]

    @invariant()
    def what_is_gone_holds_nothing(self) -> None:
        assert not any(sum(self.manager._queues[name].held) for name in self.gone)

    @invariant()
    def counts_are_exact(self) -> None:
        check_integrity(self.manager)
        for name, queue in self.manager._queues.items():  # beyond it only where it was lowered
            self.ceilings[name] = min(self.ceilings[name], queue.load)
            assert queue.load <= max(queue.capacity + 1, self.ceilings[name])
        live = [q for q in self.accepted.values() if q.state in LIVE]
        assert len(self.manager._alive) == len(live)
        for name in self.manager.depths():
            assert sum(self.manager._queues[name].held) == sum(
                query.device == name for query in live
            )

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for name in self.manager.depths():
            while any(batch.device == name for batch in self.running) or self.waiting(name):
                for batch in [b for b in self.running if b.device == name]:
                    self.running.remove(batch)
                    self.ended += [query.number for query in self.manager.complete(batch)]
                if batch := self.manager.take(name, self.now):
                    self.running.append(batch)
            self.manager.close_device(name, self.now)
            self.shut |= {name}
        for name in self.manager.depths():
            self.ended += [q.number for q in self.manager.close_device(name, self.now, gone=True)]
        self.refill()
        assert not self.manager.live()
        assert sorted(self.ended) == sorted(self.accepted)  # each exactly once


LIVE = (QueryState.WAITING, QueryState.RUNNING)
Manager.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManager = Manager.TestCase
