"""Random arrivals, cancels and steps on two small pools: nothing is lost and all ends in time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.ir.errors import CapacityError
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.kv_pool import blocks_for
from dovetail.runtime.schedule.plan import Offload
from dovetail.runtime.schedule.request import Request
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.two_pools import H200, T4, Memory, Noise, Roofline, check_plan, make, submit


class Machine(RuleBasedStateMachine):
    """Arrivals, cancels and steps on small pools; every request must end within the bound."""

    @initialize(
        gpu=st.sampled_from([0, 1, 2, 5, 12, 30]),
        cpu=st.sampled_from([1, 2, 6, 40]),
        tokens=st.integers(1, 150),
        sequences=st.integers(1, 12),
        offload=st.sampled_from(["auto", "auto", "off", "full"]),
        chunked=st.booleans(),
        patience=st.integers(1, 6),
        prompt_tokens=st.sampled_from([None, 1, 20]),
        crowd_tokens=st.sampled_from([0, 50]),
        short_first=st.integers(0, 4),
        predictor=st.sampled_from([T4, H200, Predictor(), Noise(1), Roofline(cpu_bytes=1.0)]),
    )
    def start(
        self,
        gpu: int,
        cpu: int,
        tokens: int,
        sequences: int,
        offload: Offload,
        chunked: bool,
        patience: int,
        prompt_tokens: int | None,
        crowd_tokens: int,
        short_first: int,
        predictor: Predictor,
    ) -> None:
        self.scheduler = make(
            gpu,
            cpu,
            predictor,
            tokens,
            sequences,
            300,
            offload=offload,
            chunked=chunked,
            patience=patience,
            prompt_tokens=prompt_tokens,
            crowd_tokens=crowd_tokens,
            short_first=short_first,
            min_tokens=8,
        )
        self.memory = Memory(self.scheduler)
        self.accepted: list[Request] = []

    @rule(
        length=st.integers(1, 120),
        answer=st.integers(1, 60),
        priority=st.integers(-1, 1),
        n=st.integers(1, 2),
        times=st.integers(1, 6),
    )
    def arrive(self, length: int, answer: int, priority: int, n: int, times: int) -> None:
        for _ in range(times):
            self._arrive(length, answer, priority, n)

    def _arrive(self, length: int, answer: int, priority: int, n: int) -> None:
        needed = blocks_for(length + answer - 1)
        largest = max(self.scheduler.pools[h].n_blocks for h in self.scheduler.homes)
        try:
            self.accepted += submit(self.scheduler, length, answer, priority, n)
            assert needed <= largest
        except CapacityError:
            assert needed > largest

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish(self.scheduler.requests[number], "abort")

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @precondition(lambda self: self.scheduler.busy)
    @rule(data=st.data())
    def cancel_while_running(self, data: st.DataObject) -> None:
        plan = self.scheduler.plan()
        number = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish(self.scheduler.requests[number], "abort")
        self.memory.run(plan)

    def _step(self) -> None:
        plan = self.scheduler.plan()
        check_plan(self.scheduler, plan)
        check_integrity(self.scheduler)
        self.memory.run(plan)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "scheduler"):
            check_integrity(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        rows = sum(len(r.tokens) + r.max_tokens for r in self.scheduler.requests.values())
        bound = 50 + rows * (self.scheduler.settings.patience + 2) * 2
        for _ in range(bound):
            if not self.scheduler.busy:
                break
            self._step()
        assert not self.scheduler.busy, "a request waits for ever"
        assert all(r.finished for r in self.accepted)
        assert all(
            r.generated == r.max_tokens for r in self.accepted if r.finish_reason == "length"
        )
        assert all(pool.free_blocks == pool.n_blocks for pool in self.scheduler.pools.values())


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def long_piece(number: int) -> type[Machine]:
    """The same, for long: a piece is a test of its own, so that several may run side by side."""
    return type(f"LongMachine{number}", (Machine,), {})


for piece in range(10):
    case = long_piece(piece).TestCase
    case.settings = settings(
        max_examples=100,
        stateful_step_count=100,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    globals()[f"TestLongMachine{piece}"] = pytest.mark.long(pytest.mark.timeout(1800)(case))
