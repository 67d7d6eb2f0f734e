"""The world that schedulers of workflows act in: engine, encoder, index, and a clock.

In: arrivals, a control plane (`Wavefront`, or one of `baselines`), costs. Out: an `Outcome`. Every
plane speaks `dovetail.runtime.wavefront.messages` and meets the same engine, encoder and scans;
only what it orders differs. Time is virtual here, and the wall clock's in `rag_wall.py`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from dovetail.ir.workflow import Retrieval, Workflow
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.services import Document
from dovetail.runtime.wavefront import messages as m
from dovetail.runtime.workflow_run import WorkflowRun
from rag_costs import LINK
from rag_engine import ScriptedEngine
from rag_script import Corpus, Script, Vectors

ENCODE_FIXED, ENCODE_EACH = 6e-3, 0.2e-3
"""Seconds of a batch of the encoder on the device, and of each text (assumed)."""


class Plane(Protocol):
    """A control plane of workflows."""

    def submit(self, run: WorkflowRun, now: float) -> int:
        """Take a request; return its number."""

    def tell(self, report: m.Report, now: float) -> None:
        """Take a report."""

    def orders(self, now: float) -> Sequence[m.Order]:
        """Return what is to be done now."""


class Index(Protocol):
    """Clusters of vectors: those near a query, and what is in them."""

    sizes: list[int]

    def probe(self, vector: Vectors, nprobe: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the clusters nearest to a query and the distances of their centres."""

    def distances(self, vector: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """Return the distance to each document."""

    def scan(self, parts: Sequence[m.Part]) -> tuple[m.Found, ...]:
        """Return the nearest documents of each part."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, and what it asks."""

    at: float
    workflow: Workflow
    text: str


@dataclass(slots=True)
class Outcome:
    """What a run came to; seconds. busy: of scans on each device, and of the engine.

    vectors: scanned on each device. guesses: generations begun on a guess, and those that held.
    """

    latencies: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    seconds: float = 0.0
    busy: Counter[str] = field(default_factory=Counter)
    vectors: Counter[str] = field(default_factory=Counter)
    guesses: int = 0
    held: int = 0
    scans: int = 0

    @property
    def mean(self) -> float:
        """Mean latency."""
        return statistics.fmean(self.latencies.values())

    @property
    def p99(self) -> float:
        """The latency that 99 % stay within."""
        ordered = sorted(self.latencies.values())
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    @property
    def rate(self) -> float:
        """Requests per second from the first arrival to the last answer."""
        return len(self.latencies) / self.seconds


class StandIn:
    """A small index in the place of a large one: real geometry, sizes of clusters scaled up."""

    def __init__(self, corpus: Corpus, vectors: int) -> None:
        """Stand for so many `vectors`."""
        self._vectors, self._centres = corpus.documents, corpus.centres
        self.homes = corpus.nearest()
        order = np.argsort(self.homes, kind="stable")
        ends = np.searchsorted(self.homes[order], np.arange(len(corpus.centres) + 1))
        self._members = [order[a:b] for a, b in itertools.pairwise(ends)]
        self._far = functools.lru_cache(256)(self._measure)
        scale = vectors / len(corpus.documents)
        self.sizes = [round(scale * len(members)) for members in self._members]

    def probe(self, vector: Vectors, nprobe: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """See Index."""
        far = ((self._centres - vector) ** 2).sum(axis=1)
        near = np.argpartition(far, nprobe - 1)[:nprobe]
        near = near[np.argsort(far[near], kind="stable")]
        return tuple(near.tolist()), tuple(far[near].tolist())

    def distances(self, vector: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """See Index."""
        far = ((self._vectors[list(ids)] - vector) ** 2).sum(axis=1)
        return dict(zip(ids, far.tolist(), strict=True))

    def scan(self, parts: Sequence[m.Part]) -> tuple[m.Found, ...]:
        """See Index."""
        return tuple(self._find(part) for part in parts)

    def _find(self, part: m.Part) -> m.Found:
        far = self._far(part.vector.tobytes())
        ids = np.concatenate([self._members[c] for c in part.clusters])
        near = ids[np.argsort(far[ids], kind="stable")[: part.depth]]
        hits = tuple(zip(far[near].tolist(), near.tolist(), strict=True))
        return m.Found(hits, tuple(self.homes[near].tolist()))

    def _measure(self, vector: bytes) -> Vectors:
        """Return the distances from a query to all documents; scans of it come soon again."""
        aside = self._vectors - np.frombuffer(vector, np.float32)
        far: Vectors = np.einsum("nd,nd->n", aside, aside)
        return far


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a run happens in. engine: makes a fresh engine; device: None where nothing is cached.

    divide: a query's clusters are divided between threads; else, as in stock faiss, several
    queries are scanned side by side, each by one thread.
    """

    index: Index
    script: Script
    nprobe: int
    engine: Callable[[], ScriptedEngine]
    scan: ScanCost
    device: ScanCost | None = None
    divide: bool = False
    vector_bytes: int = 4096

    # ---- the catalog that planes look things up in ----

    def sizes(self, index: str | None) -> Sequence[int]:
        """Return the number of vectors in each cluster."""
        return self.index.sizes

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        """Return the documents of hits."""
        return self.script.documents(hits)


class World:
    """One run on a virtual clock."""

    def __init__(self, scene: Scene, plane: Plane) -> None:
        self.scene, self.plane = scene, plane
        self.engine = scene.engine()
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._arrived: dict[int, tuple[int, float]] = {}
        self._texts: list[m.Embed] = []
        self._encoding = self._stepping = False
        self._ended: float | None = None  # of the engine's step that is just over
        self._guessed: set[int] = set()

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Serve all arrivals and return what came of it."""
        ordered = sorted(arrivals, key=lambda arrival: arrival.at)
        for number, arrival in enumerate(ordered):
            self._at(arrival.at, partial(self._arrive, number, arrival))
        now = ordered[0].at
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
            self._obey(now)
        assert len(self.outcome.latencies) == len(ordered), "a request was never answered"
        self.outcome.seconds = now - ordered[0].at
        return self.outcome

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), act))

    def _tell_at(self, time: float, report: m.Report) -> None:
        self._at(time, lambda now: self.plane.tell(report, now))

    def _arrive(self, number: int, arrival: Arrival, now: float) -> None:
        run = WorkflowRun(arrival.workflow, {"input": arrival.text})
        self._arrived[self.plane.submit(run, now)] = number, arrival.at

    def _obey(self, now: float) -> None:
        while orders := self.plane.orders(now):
            for order in orders:
                if (do := _DO.get(type(order))) is not None:
                    do(self, order, now)
        self._step(now)
        self._encode(now)

    # ---- orders ----

    def _generate(self, order: m.Generate, now: float) -> None:
        self.engine.add(order)
        if order.provisional:
            self._guessed.add(order.job)
            self.outcome.guesses += 1

    def _embed(self, order: m.Embed, now: float) -> None:
        self._texts.append(order)

    def _invoke(self, order: m.Invoke, now: float) -> None:
        function: Any = order.call.node
        self.plane.tell(m.Finished(order.job, function.function(order.call.state)), now)

    def _probe(self, order: m.Probe, now: float) -> None:
        clusters, centroids = self.scene.index.probe(order.vector, self.scene.nprobe)
        known = self.scene.index.distances(order.vector, order.known) if order.known else {}
        self.plane.tell(m.Probed(order.job, clusters, centroids, known), now)

    def _scan(self, order: m.Scan, now: float) -> None:
        sizes = self.scene.index.sizes
        loads = [sum(sizes[c] for c in part.clusters) for part in order.parts]
        vectors = sum(loads)
        cost = self.scene.scan if order.device == "cpu" else self.scene.device
        assert cost is not None, "nothing is cached on the device"
        if self.scene.divide:
            loads = [vectors / cost.threads] * cost.threads
        seconds = cost.seconds(loads)
        if order.device == "gpu":
            self.engine.delay += seconds
        self.outcome.busy[order.device] += seconds
        self.outcome.vectors[order.device] += vectors
        self.outcome.scans += 1
        found = self.scene.index.scan(order.parts)
        self._tell_at(now + seconds, m.Scanned(order.job, found, seconds))

    def _copy(self, order: m.Copy, now: float) -> None:
        vectors = sum(self.scene.index.sizes[c] for c in order.load)
        self._tell_at(now + vectors * self.scene.vector_bytes / LINK, m.Finished(order.job))

    def _commit(self, order: m.Commit, now: float) -> None:
        self._guessed.discard(order.job)
        self.outcome.held += 1

    def _cancel(self, order: m.Cancel, now: float) -> None:
        self.engine.cancel(order.job)

    def _deliver(self, order: m.Deliver, now: float) -> None:
        assert order.state is not None, f"a request failed: {order.error}"
        number, came = self._arrived.pop(order.request)
        self.outcome.latencies[number] = now - came
        self.outcome.ends.append(now)
        self.outcome.answers[number] = order.state["answer"]

    # ---- devices that work in batches ----

    def _step(self, now: float) -> None:
        """Begin a step where none is under way.

        One that follows another begins at that one's end, however late this thread is: an engine
        does not wait for the scheduler.
        """
        if self._stepping:
            return
        start, self._ended = (now if self._ended is None else self._ended), None
        if (seconds := self.engine.begin_step()) is None:
            return
        self._stepping = True
        self.outcome.busy["engine"] += seconds
        end = start + seconds
        self._at(end, lambda now: self._stepped(end, now))

    def _stepped(self, end: float, now: float) -> None:
        self._stepping, self._ended = False, end
        for report in self.engine.end_step():
            self.plane.tell(report, now)

    def _encode(self, now: float) -> None:
        if self._encoding or not self._texts:
            return
        batch, self._texts, self._encoding = self._texts, [], True
        seconds = ENCODE_FIXED + ENCODE_EACH * len(batch)
        self._at(now + seconds, lambda now: self._encoded(batch, now))

    def _encoded(self, batch: Sequence[m.Embed], now: float) -> None:
        self._encoding = False
        for order in batch:
            self.plane.tell(m.Finished(order.job, self.scene.script.meaning(order.text)), now)


_DO: dict[type, Callable[[World, Any, float], None]] = {
    m.Generate: World._generate,
    m.Embed: World._embed,
    m.Invoke: World._invoke,
    m.Probe: World._probe,
    m.Scan: World._scan,
    m.Copy: World._copy,
    m.Commit: World._commit,
    m.Cancel: World._cancel,
    m.Deliver: World._deliver,
}


def poisson(
    workflows: Sequence[Workflow], rate: float, count: int, script: Script, seed: int = 0
) -> list[Arrival]:
    """Return `count` requests that come at `rate` a second; their workflows take turns."""
    random = np.random.default_rng((seed, 5))
    times = np.cumsum(random.exponential(1 / rate, count))
    return [
        Arrival(float(at), workflows[i % len(workflows)], script.question(i))
        for i, at in enumerate(times)
    ]
