"""Workflows on a made-up machine: the control plane as it is, all others as events in virtual time.

In: arrivals, a `World` that knows all answers, a `Machine` that knows how long they take. Out: what
each request got and when. Engine and index are modelled as they work: the engine's batch takes new
sequences at each step, a scan holds its device to the end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from dovetail.ir.errors import DovetailError
from dovetail.ir.workflow import Generation, Retrieval
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.wavefront.costs import StepCost
from dovetail.runtime.wavefront.messages import (
    Cancel,
    Catalog,
    Copy,
    Deliver,
    Embed,
    Failed,
    Finished,
    Found,
    Generate,
    Invoke,
    Order,
    Part,
    Probe,
    Probed,
    Progressed,
    Report,
    Scan,
    Scanned,
)
from dovetail.runtime.workflow_run import Call, WorkflowRun


class World(Catalog, Protocol):
    """All that engine, encoder, index and functions would answer. Always the same."""

    def reply(self, prompt: str, node: Generation) -> Sequence[str]:
        """Return the tokens of a reply, as texts to be joined."""

    def embed(self, text: str) -> Any:
        """Return a vector."""

    def probe(self, vector: Any, node: Retrieval) -> tuple[Sequence[int], Sequence[float]]:
        """Return the clusters of a query and the distances to their centroids."""

    def distances(self, vector: Any, ids: Sequence[int], node: Retrieval) -> Mapping[int, float]:
        """Return how far documents are."""

    def scan(self, part: Part) -> Found:
        """Return the nearest documents in some clusters."""

    def invoke(self, call: Call) -> object:
        """Return what a node's function does; DovetailError where it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How long things take, in seconds.

    step: of the engine. prefill: of a prompt's character. scan, device: of clusters on CPU and
    GPU. turn: from the end of a scan until the control plane knows, and back (beta). probe, embed,
    function: of each such order; they wait for nothing. copy: of a vector to the device.
    jitter: each time is drawn from 1 - jitter .. 1 + jitter of that.
    """

    step: StepCost
    scan: ScanCost
    device: ScanCost | None = None
    prefill: float = 0.0
    turn: float = 0.0
    probe: float = 0.0
    embed: float = 0.0
    function: float = 0.0
    copy: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request got, seconds after it came."""

    request: int
    arrival: float
    end: float
    state: Mapping[str, Any] | None
    error: DovetailError | None

    @property
    def latency(self) -> float:
        """Seconds from arrival to the end."""
        return self.end - self.arrival


class Plane(Protocol):
    """A control plane: `Wavefront`, or a baseline."""

    def submit(self, run: WorkflowRun, now: float) -> int:
        """Take a run; return its number."""

    def tell(self, report: Report, now: float) -> None:
        """Take a report."""

    def orders(self, now: float) -> Sequence[Order]:
        """Return what is to be done."""


@dataclass(slots=True)
class _Sequence:
    """A reply in the engine's batch."""

    order: Generate
    tokens: Sequence[str]
    done: int = 0
    text: str = ""


class Simulation:
    """A machine in virtual time, driven by a control plane. One use."""

    def __init__(self, plane: Plane, world: World, machine: Machine, seed: int = 0) -> None:
        self._plane, self._world, self._machine = plane, world, machine
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], Report | None]]] = []
        self._numbers = count()
        self._batch: dict[int, _Sequence] = {}
        self._joining: deque[_Sequence] = deque()
        self._stepping = False
        self._arrivals: dict[int, float] = {}
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        self.busy = {"cpu": 0.0, "gpu": 0.0, "engine": 0.0}
        """Seconds that each was at work."""

    def run(
        self,
        arrivals: Sequence[tuple[float, WorkflowRun]],
        watch: Callable[[float, Sequence[Order]], None] = lambda now, orders: None,
    ) -> list[Outcome]:
        """Serve runs that come at given seconds; return what each got, in the order of ends.

        watch: is shown all orders as they are given.
        """
        for at, run in arrivals:
            self._at(at, partial(self._arrive, run))
        while self._events:
            self.now, _, event = heappop(self._events)
            report = event()
            if report is not None:
                self._plane.tell(report, self.now)
            orders = self._plane.orders(self.now)
            watch(self.now, orders)
            for order in orders:
                self._do(order)
        return self.outcomes

    # ---- orders ----

    def _do(self, order: Order) -> None:
        if (do := _DO.get(type(order))) is not None:
            do(self, order)

    def _generate(self, order: Generate) -> None:
        tokens = self._world.reply(order.prompt, order.node)
        self._joining.append(_Sequence(order, tokens))
        if not self._stepping:
            self._step()

    def _cancel(self, order: Cancel) -> None:
        self._batch.pop(order.job, None)
        self._joining = deque(s for s in self._joining if s.order.job != order.job)

    def _embed(self, order: Embed) -> None:
        vector = self._world.embed(order.text)
        self._report(self._machine.embed, Finished(order.job, vector))

    def _invoke(self, order: Invoke) -> None:
        try:
            report: Report = Finished(order.job, self._world.invoke(order.call))
        except DovetailError as error:
            report = Failed(order.job, error)
        self._report(self._machine.function, report)

    def _probe(self, order: Probe) -> None:
        clusters, centroids = self._world.probe(order.vector, order.node)
        known = self._world.distances(order.vector, order.known, order.node)
        report = Probed(order.job, tuple(clusters), tuple(centroids), known)
        self._report(self._machine.probe, report)

    def _scan(self, order: Scan) -> None:
        cost = self._machine.scan if order.device == "cpu" else self._machine.device
        assert cost is not None, "a scan for a device that is not there"
        sizes = self._world.sizes(order.index)
        vectors = [sum(sizes[c] for c in part.clusters) for part in order.parts]
        seconds = self._drawn(cost.seconds(vectors))
        self.busy[order.device] += seconds
        found = tuple(self._world.scan(part) for part in order.parts)
        self._report(self._machine.turn, Scanned(order.job, found, seconds), seconds)

    def _copy(self, order: Copy) -> None:
        sizes = self._world.sizes(order.index)
        seconds = self._machine.copy * sum(sizes[c] for c in order.load)
        self._report(seconds, Finished(order.job))

    def _deliver(self, order: Deliver) -> None:
        arrival = self._arrivals.pop(order.request)
        outcome = Outcome(order.request, arrival, self.now, order.state, order.error)
        self.outcomes.append(outcome)

    # ---- events ----

    def _arrive(self, run: WorkflowRun) -> None:
        self._arrivals[self._plane.submit(run, self.now)] = self.now

    def _step(self) -> None:
        """Begin a decode step with all sequences that are there."""
        joined = list(self._joining)
        self._joining.clear()
        self._batch.update((sequence.order.job, sequence) for sequence in joined)
        self._stepping = bool(self._batch)
        if self._stepping:
            prompts = sum(len(sequence.order.prompt) for sequence in joined)
            seconds = self._machine.step.seconds(len(self._batch))
            seconds = self._drawn(seconds + self._machine.prefill * prompts)
            self.busy["engine"] += seconds
            self._at(self.now + seconds, partial(self._stepped, list(self._batch)))

    def _stepped(self, jobs: Sequence[int]) -> None:
        """End a step: a token for each sequence that was in it and was not cancelled."""
        for sequence in [self._batch[job] for job in jobs if job in self._batch]:
            order = sequence.order
            sequence.text += "".join(sequence.tokens[sequence.done : sequence.done + 1])
            sequence.done += 1
            if sequence.done >= len(sequence.tokens):
                del self._batch[order.job]
                self._report(0.0, Finished(order.job, sequence.text))
            elif order.steps and sequence.done % order.steps == 0:
                self._report(0.0, Progressed(order.job, sequence.text, sequence.done))
        self._step()

    def _report(self, seconds: float, report: Report, surely: float = 0.0) -> None:
        self._at(self.now + surely + self._drawn(seconds), lambda: report)

    def _at(self, time: float, event: Callable[[], Report | None]) -> None:
        heappush(self._events, (time, next(self._numbers), event))

    def _drawn(self, seconds: float) -> float:
        jitter = self._machine.jitter
        return seconds * self._random.uniform(1 - jitter, 1 + jitter) if jitter else seconds


_DO: dict[type, Callable[[Simulation, Any], None]] = {
    Generate: Simulation._generate,
    Cancel: Simulation._cancel,
    Embed: Simulation._embed,
    Invoke: Simulation._invoke,
    Probe: Simulation._probe,
    Scan: Simulation._scan,
    Copy: Simulation._copy,
    Deliver: Simulation._deliver,
}
"""What an order has a simulated machine do; others ask for nothing."""
