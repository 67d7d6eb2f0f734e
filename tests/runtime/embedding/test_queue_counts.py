"""The queue manager: exact counts under every order of events."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.ir.errors import CapacityError
from dovetail.runtime.embedding.line import Line
from dovetail.runtime.embedding.query import (
    Batch,
    Query,
    QueryClass,
    QueueSpec,
    State,
    length_classes,
)
from dovetail.runtime.embedding.queues import QueueManager

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
        pads=st.booleans(),
        heterogeneous=st.booleans(),
        arrival=st.sampled_from(["open", "closed"]),
    )
    def start(self, depths, cpu, instances, budget, pads, heterogeneous, arrival) -> None:
        lines = tuple(Line(0.01 * (k + 1), 0.02) for k in range(4))
        slow = tuple(line.scaled(4) for line in lines)
        specs = [
            QueueSpec(f"gpu{i}", True, depth, lines, instances, budget, pads)
            for i, depth in enumerate(depths)
        ]
        specs.append(QueueSpec("cpu", False, cpu, slow, 1, budget, False))
        self.manager = QueueManager(
            specs,
            (*length_classes(CLASSES), OTHER),
            heterogeneous=heterogeneous,
            arrival=arrival,
        )
        self.cpu_allowed = heterogeneous
        self.numbers, self.now = itertools.count(), 0.0
        self.accepted: dict[int, Query] = {}
        self.ended: list[int] = []
        self.running: list[Batch] = []

    def full(self, name: str, kind: int) -> bool:
        """Independent of the manager's integers: would one more query exceed the device?"""
        depths = self.manager.depths()[name]
        held = [q for q in self.accepted.values() if q.device == name and q.state in LIVE]
        if not depths[kind] or any(not depths[q.kind] for q in held):
            return True
        return math.fsum(1 / depths[q.kind] for q in held) + 1 / depths[kind] > 1 + 1e-9

    @rule(
        tokens=st.lists(st.integers(1, 512), min_size=1, max_size=6),
        priority=st.integers(-10, 10),
        wait=st.sampled_from([0.0, 0.1, 1.0]),
        terms=st.tuples(st.booleans(), st.sampled_from(["", "", OTHER.model])),
        deadline=st.sampled_from([math.inf, 0.05, 0.5]),
    )
    def arrive(self, tokens, priority, wait, terms, deadline) -> None:
        bulk, model = terms
        self.now += wait
        target = math.inf if bulk else self.now + 1.0
        ends = self.now + deadline
        new = [Query(next(self.numbers), n, target, ends, priority, model=model) for n in tokens]
        before = self.manager.queries
        closed_and_plain = self.manager.arrival == "closed" and deadline == math.inf and not bulk
        try:
            self.manager.submit(new, self.now)
        except CapacityError:
            assert self.manager.queries == before
            assert all(query.state is State.NEW for query in new)
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
        waiting, spec = self.manager.waiting(name), self.manager.spec(name)
        busy = sum(batch.device == name for batch in self.running)
        batch = self.manager.take(name, self.now)
        assert (batch is None) == (waiting == 0 or busy >= spec.instances)
        if batch:
            assert {query.model for query in batch.queries} == {batch.model}
            sizes = [query.tokens for query in batch.queries]
            cost = max(sizes) * len(sizes) if spec.pads else sum(sizes)
            assert cost <= spec.token_budget or len(sizes) == 1
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
        live = query.state in LIVE and not query.cancelled
        if self.manager.cancel(query) and live:
            self.ended.append(query.number)

    @rule()
    def expire(self) -> None:
        self.ended += [query.number for query in self.manager.expire(self.now)]

    @rule(data=st.data(), depths=st.tuples(*[st.integers(0, 12)] * 4))
    def change(self, data, depths) -> None:
        name = data.draw(st.sampled_from(sorted(self.manager.depths())))
        self.manager.set_queue(replace(self.manager.spec(name), depths=depths))

    @rule(data=st.data())
    def shut_and_drain(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.manager.depths())))
        self.manager.close_device(name, self.now)
        self.shut |= {name}
        for query in self.manager.drain_device(name):
            try:
                self.manager.submit([query], self.now)
                assert query.device != name
            except CapacityError:
                self.ended.append(query.number)

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
        for query in self.manager.abandon_device(name):
            try:
                self.manager.submit([query], self.now)
                assert query.device != name
            except CapacityError:
                self.ended.append(query.number)

    @invariant()
    def what_is_gone_holds_nothing(self) -> None:
        assert not any(self.manager.held(name) for name in self.gone)

    @invariant()
    def counts_are_exact(self) -> None:
        self.manager.check_integrity()
        live = [q for q in self.accepted.values() if q.state in LIVE]
        assert self.manager.queries == len(live)
        for name in self.manager.depths():
            assert self.manager.held(name) == sum(query.device == name for query in live)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for name in self.manager.depths():
            while any(batch.device == name for batch in self.running) or self.manager.waiting(name):
                for batch in [b for b in self.running if b.device == name]:
                    self.running.remove(batch)
                    self.ended += [query.number for query in self.manager.complete(batch)]
                if batch := self.manager.take(name, self.now):
                    self.running.append(batch)
        assert self.manager.queries == 0
        assert sorted(self.ended) == sorted(self.accepted)  # each exactly once


LIVE = (State.WAITING, State.RUNNING)
Manager.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManager = Manager.TestCase
