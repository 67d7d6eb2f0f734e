"""What requests meet: an index of vectors, an encoder, functions; and the requests themselves.

In: a script, an index. Out: a `Scene`, the `World` of `simulated_workflows`, the
same for every scheduler.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from dovetail.ir.workflow import Function, Retrieval, Workflow
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.scans import Part
from rag_script import Corpus, Script, Vectors

Probed: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Clusters and the distances to their centres."""


class Index(Protocol):
    """Clusters of vectors: those near a query, and what is in them."""

    sizes: list[int]

    def probe(self, vector: Vectors, nprobe: int) -> Probed:
        """Return the clusters nearest to a query."""

    def distances(self, vector: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """Return the distance to each document."""

    def scan(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the nearest documents of each part."""


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

    def probe(self, vector: Vectors, nprobe: int) -> Probed:
        """See Index."""
        far = ((self._centres - vector) ** 2).sum(axis=1)
        near = np.argpartition(far, nprobe - 1)[:nprobe]
        near = near[np.argsort(far[near], kind="stable")]
        return tuple(near.tolist()), tuple(far[near].tolist())

    def distances(self, vector: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """See Index."""
        far = self._far(vector.tobytes())[list(ids)]
        return dict(zip(ids, far.tolist(), strict=True))

    def scan(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """See Index."""
        return tuple(map(self._find, parts))

    def _find(self, part: Part) -> Part:
        far = self._far(part.vector)
        ids = np.concatenate([self._members[c] for c in part.clusters])
        near = ids[np.argsort(far[ids], kind="stable")[: part.depth]]
        hits = tuple(zip(far[near].tolist(), near.tolist(), strict=True))
        return Part(hits=hits, homes=tuple(self.homes[near].tolist()))

    def _measure(self, vector: bytes) -> Vectors:
        """Return the distances from a query to all documents; scans of it come soon again."""
        aside = self._vectors - np.frombuffer(vector, np.float32)
        far: Vectors = np.einsum("nd,nd->n", aside, aside)
        return far


class NoIndex:
    """An index that finds anything at once: replies are as long whatever was found."""

    sizes: Sequence[int] = (1,)

    def probe(self, vector: Vectors, nprobe: int) -> Probed:
        """See Index."""
        return (0,), (0.0,)

    def distances(self, vector: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """See Index."""
        return dict.fromkeys(ids, 0.0)

    def scan(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """See Index."""
        hits = tuple((0.0, i) for i in range(parts[0].depth))
        return tuple(Part(hits=hits, homes=(0,) * len(hits)) for _ in parts)


@dataclass(frozen=True, slots=True)
class Scene:
    """An index that is probed by `nprobe` clusters, and what texts mean."""

    index: Index
    script: Script
    nprobe: int

    def sizes(self, index: str | None) -> Sequence[int]:
        """See Catalog."""
        return self.index.sizes

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        """See Catalog."""
        return self.script.documents(hits)

    def embed(self, text: str) -> Vectors:
        """See World."""
        return self.script.meaning(text)

    def probe(self, vector: Vectors, node: Retrieval) -> Probed:
        """See World."""
        return self.index.probe(vector, self.nprobe)

    def distances(self, vector: Vectors, ids: Sequence[int], node: Retrieval) -> dict[int, float]:
        """See World."""
        return self.index.distances(vector, ids)

    def scan(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """See World."""
        return self.index.scan(parts)

    def invoke(self, call: Call) -> object:
        """See World."""
        assert isinstance(call.node, Function)
        return call.node.function(call.state)


Arrival: TypeAlias = tuple[float, Workflow, str]
"""When a request comes, what it goes through, and what it asks."""


def poisson(
    workflows: Sequence[Workflow], rate: float, count: int, script: Script, seed: int = 0
) -> list[Arrival]:
    """Return `count` requests that come at `rate` a second; their workflows take turns."""
    random = np.random.default_rng((seed, 5))
    times = np.cumsum(random.exponential(1 / rate, count))
    times -= times[0]
    return [
        (float(at), workflows[i % len(workflows)], script.question(i)) for i, at in enumerate(times)
    ]


def begin_runs(arrivals: Sequence[Arrival]) -> list[tuple[float, WorkflowRun]]:
    """Return fresh runs of requests, each with the second at which it comes."""
    return [(at, WorkflowRun(workflow, {"input": text})) for at, workflow, text in arrivals]
