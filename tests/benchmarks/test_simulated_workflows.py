"""The simulated machine: time goes one way, also for who sees it late."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from dovetail.ir.workflow import Generation
from dovetail.runtime.flows.control.messages import Finished, Generate, Order, Report, Source
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.workflows import one_shot
from tests.benchmarks.test_scripted_engine import Seen
from tests.repository import ROOT
from tests.runtime.flows.control.world import MACHINE, HashWorld

sys.path.insert(0, str(ROOT / "benchmarks"))

from scripted_engine import ScriptedEngine
from simulated_workflows import WorkflowSimulation

NODE = Generation("answer", prompt="{input}", output="answer")


class Replying:
    """A plane that has the engine write `a b c` to each request."""

    def __init__(self) -> None:
        self.numbers, self.given = itertools.count(1), list[Order]()
        self.told: list[tuple[int, float]] = []

    def submit(self, run: WorkflowRun, now: float) -> int:
        number = next(self.numbers)
        self.given.append(Generate(number, Source(number, "answer", 0), NODE, "a b c"))
        return number

    def tell(self, report: Report, now: float) -> None:
        assert isinstance(report, Finished)
        self.told.append((report.job, now))

    def orders(self, now: float) -> Sequence[Order]:
        given, self.given = self.given, []
        return given


class LookingAt(WorkflowSimulation):
    """Sees what has happened at some moments alone."""

    def look(self, arrivals: Sequence[float], moments: Sequence[float]) -> None:
        run = WorkflowRun(one_shot(topk=1).workflow(), {"input": "a"})
        for at in arrivals:
            self._at(at, lambda at=at: self._arrive(run, at))  # type: ignore[misc]
        for self.now in moments:
            self._act()
            self._obey(lambda now, orders: None)


def test_a_step_of_the_engine_holds_nothing_that_came_after_its_beginning() -> None:
    seen, plane = Seen(), Replying()
    engine = ScriptedEngine(seen, lambda order: order.prompt.split())
    made = LookingAt(plane, HashWorld(), MACHINE, engine)
    made.look(arrivals=[0.0, 1.5], moments=[0.0, 1.7, 9.0])
    joined = [(len(prompts), decodes) for prompts, decodes, _ in seen.steps]
    assert joined == [(1, 0), (0, 1), (1, 1), (0, 1), (0, 1)]
    assert plane.told == [(1, 9.0), (2, 9.0)] and made.busy["engine"] == 5.0
