"""A world for simulations in which every answer follows from a hash: text, vectors, documents."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.workflow import Embedding, Generation, Rerank, Retrieval
from dovetail.runtime.flows.control.costs import StageCosts, StepCost
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import Hit, merge_hits
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.hot import Swap
from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from scripted_engine import ScriptedEngine
from simulated_workflows import Plane, WorkflowMachine, WorkflowSimulation

Vector = NDArray[np.float32]


def rng(*parts: object) -> random.Random:
    """Return a source of numbers that follows from `parts` alone, in every process."""
    return random.Random(hashlib.sha256(repr(parts).encode()).digest())


@dataclass(frozen=True, slots=True)
class PlainCost:
    """Steps that depend on their number of sequences, and on the characters of new prompts."""

    step: StepCost

    def seconds(self, prefills: Sequence[int], decodes: int, stored: int) -> float:
        return self.step.seconds(len(prefills) + decodes) + self.step.prefill * sum(prefills)


@cache
def meaning(word: str, d: int) -> Vector:
    """Return the vector of a word."""
    draw = rng(word)
    return np.array([draw.gauss(0, 1) for _ in range(d)], np.float32)


class HashWorld:
    """`count` documents with vectors in `clusters` cells; also the services of `run_in_order`."""

    def __init__(
        self,
        seed: int = 0,
        *,
        count: int = 200,
        clusters: int = 12,
        probes: int = 8,
        d: int = 4,
        longest: int = 12,
        empty: int = 2,
        metric: str = "l2",
    ) -> None:
        self.metric = metric
        self.seed, self.probes, self.longest = seed, probes, longest
        numbers = np.random.default_rng(seed)
        self.vectors = numbers.standard_normal((count, d)).astype(np.float32)
        self.centroids = numbers.standard_normal((clusters, d)).astype(np.float32)
        near = ((self.vectors[:, None] - self.centroids[None, empty:]) ** 2).sum(axis=2)
        self.home = near.argmin(axis=1) + empty  # the first cells are empty

    def sizes(self, index: str | None) -> Sequence[int]:
        return np.bincount(self.home, minlength=len(self.centroids)).tolist()

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        return [Document(id=i, text=f"document {i}", score=score) for score, i in hits]

    def reply(self, prompt: str, node: Generation) -> Sequence[str]:
        draw = rng(self.seed, prompt, node.name)
        return [f"w{draw.randrange(50)} " for _ in range(draw.randint(1, self.longest))]

    def embed(self, text: str) -> Vector:  # type: ignore[override]
        """Words near each other in a text count: a longer text moves only a little."""
        words = text.split()[:40] or [""]
        return np.mean([meaning(word, self.d) for word in words], axis=0).astype(np.float32)

    def rank(self, query: str, documents: Sequence[Any], node: Rerank) -> list[Any]:
        best = sorted(documents, key=lambda each: rng(self.seed, query, str(each)).random())
        return best[: node.topk]

    @property
    def d(self) -> int:
        return self.vectors.shape[1]

    def probe(self, vector: Vector, node: Retrieval) -> tuple[list[int], list[float]]:
        away = ((self.centroids - vector) ** 2).sum(axis=1)
        order = np.argsort(away, kind="stable")[: self.probes]
        return order.tolist(), away[order].tolist()

    def distances(
        self, vector: Vector, ids: Sequence[int], node: Retrieval | None = None
    ) -> dict[int, float]:
        rows = self.vectors[list(ids)]
        far = (
            ((rows - vector) ** 2).sum(axis=1)
            if self.metric == "l2"
            else -(rows * vector).sum(axis=1)
        )
        return dict(zip(ids, far.tolist(), strict=True))

    def scan(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        return tuple(map(self.find, parts))

    def find(self, part: Part) -> Part:
        ids = np.flatnonzero(np.isin(self.home, part.clusters)).tolist()
        vector = np.frombuffer(part.vector, np.float32)
        hits = merge_hits([[(d, i) for i, d in self.distances(vector, ids).items()]], part.depth)
        return Part(hits=tuple(hits), homes=tuple(int(self.home[i]) for _, i in hits))

    def invoke(self, call: Call) -> object:
        return perform(call, Exact(self))


class Exact:
    """The services of a world without any cutting, ordering or guessing."""

    def __init__(self, world: HashWorld) -> None:
        self.world = world

    def generate(self, prompt: str, node: Generation) -> str:
        return "".join(self.world.reply(prompt, node))

    def retrieve(self, query: str | Vector, node: Retrieval) -> list[Document]:
        vector = self.world.embed(query) if isinstance(query, str) else query
        clusters, centroids = self.world.probe(vector, node)
        part = Part(vector.tobytes(), tuple(clusters), tuple(centroids), node.topk)
        return self.world.documents(node, self.world.find(part).hits)

    def embed(self, text: str, node: Embedding) -> Vector:
        return self.world.embed(text)

    def rerank(self, query: str, documents: Sequence[Any], node: Rerank) -> list[Any]:
        return self.world.rank(query, documents, node)

    def do(self, call: Call) -> object:
        return perform(call, self)


class CountedClusters:
    """A hot set of the `room` clusters scanned most often."""

    def __init__(self, room: int) -> None:
        self.room, self.counts = room, dict[int, int]()
        self.kept, self.coming = frozenset[int](), frozenset[int]()
        self.swaps = 0

    def resident(self, cluster: int) -> bool:
        return cluster in self.kept

    def count(self, clusters: Any) -> None:
        for cluster in clusters:
            self.counts[cluster] = self.counts.get(cluster, 0) + 1

    def wanted(self) -> Swap | None:
        hottest = sorted(self.counts, key=lambda c: (-self.counts[c], c))[: self.room]
        load, drop = set(hottest) - self.kept, self.kept - set(hottest)
        if self.coming or (not load and not drop):
            return None
        return Swap(tuple(sorted(load)), tuple(sorted(drop)))

    def begin(self, swap: Swap) -> None:
        self.kept, self.coming = self.kept.difference(swap.drop), frozenset(swap.load)
        self.swaps += 1

    def fade(self) -> None:
        pass

    def settle(self) -> None:
        self.kept, self.coming = self.kept | self.coming, frozenset()

    def lose(self, clusters: Any) -> None:
        self.kept -= set(clusters)


COSTS = StageCosts(
    scan=ScanCost(1e-4, 1e-4, threads=2),
    device=ScanCost(2e-4, 1e-5, threads=1),
    overhead=2e-4,
    step=StepCost(fixed=1e-3, per_sequence=1e-5),
    reply=8e-3,
)


MACHINE = WorkflowMachine(scan=COSTS.scan, device=COSTS.device, turn=2e-4)


def machine(seed: int) -> WorkflowMachine:
    """Return a machine whose speeds are drawn: engine and index up to 30 times apart."""
    draw = rng("machine", seed)
    slow = draw.choice([0.1, 1.0, 3.0])
    return WorkflowMachine(
        scan=ScanCost(1e-4 * slow, 1e-4 * slow, threads=2),
        device=ScanCost(2e-4, 1e-5),
        turn=2e-4,
        probe=draw.choice([0.0, 1e-4]),
        encode=StepCost(fixed=draw.choice([0.0, 1e-3])),
        function=draw.choice([0.0, 1e-3]),
        copy=1e-6,
        jitter=draw.choice([0.0, 0.9]),
    )


def simulate(
    plane: Plane, world: HashWorld, machine: WorkflowMachine = MACHINE, seed: int = 0
) -> WorkflowSimulation:
    """Return a simulation whose engine replies as the world does; prompts take time or none."""
    cost = PlainCost(replace(COSTS.step, prefill=rng("prefill", seed).choice([0.0, 1e-6])))
    engine = ScriptedEngine(cost, lambda order: world.reply(order.prompt, order.node))
    return WorkflowSimulation(plane, world, machine, engine, seed)
