"""A control plane driven report by report: who scans is the test itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dovetail import workflows
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Retrieval
from dovetail.runtime.flows.control.costs import StageCosts
from dovetail.runtime.flows.control.messages import (
    Embed,
    FindClusters,
    Finished,
    Order,
    Probed,
    Report,
    ScanClusters,
    Scanned,
)
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.hot import HotSet
from tests.runtime.flows.control.integrity import check_dispatched, check_wavefront
from tests.runtime.flows.control.world import COSTS

Kind = TypeVar("Kind")

ALONE = replace(COSTS, scan=ScanCost(1e-4, 1e-4))
"""One thread, so that a search has one part in a scan."""


class Titles:
    """An index of 40 clusters with ten vectors each, whose documents are their numbers."""

    removed: Collection[int] = ()

    def sizes(self, index: str | None) -> Sequence[int]:
        return [10] * 40

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        here = (i for _, i in hits if i not in self.removed)
        return [Document(id=i, text=f"document {i}") for i in here]


class Hand:
    """Tells a control plane what a test says, and keeps all that it orders."""

    def __init__(
        self,
        *,
        costs: StageCosts = ALONE,
        hot: HotSet | None = None,
        **settings: Any,
    ) -> None:
        settings = {"fixed_clusters": 1, **settings}
        self.hot_sets: dict[str | None, HotSet] = {} if hot is None else {None: hot}
        self.titles = Titles()
        self.front = Wavefront(WavefrontSettings(**settings), costs, self.titles, self.hot_sets)
        self.now = 0.0
        self.orders: list[Order] = []

    def submit(self, graph: RAGraph | None = None) -> int:
        run = WorkflowRun((graph or workflows.one_shot(topk=2)).workflow(), {"input": "x"})
        number = self.front.submit(run, self.now)
        self.tell()
        return number

    def tell(self, *reports: Report) -> list[Order]:
        """Tell, and return what is ordered then."""
        self.now += 1e-3
        for report in reports:
            self.front.tell(report, self.now)
        orders = list(self.front.orders(self.now))
        check_wavefront(self.front)
        check_dispatched(self.front, orders)
        self.orders += orders
        return orders

    def last(self, kind: type[Kind]) -> Kind:
        """Return the last order of a kind."""
        return self.all(kind)[-1]

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [order for order in self.orders if isinstance(order, kind)]

    def begin_search(self, *clusters: int, graph: RAGraph | None = None) -> int:
        """Submit a request whose search probes these clusters; return its number."""
        number = self.submit(graph)
        self.tell(Finished(self.last(Embed).job, [0.0, 0.0]))
        self.probed(*clusters)
        return number

    def probed(self, *clusters: int, **known: float) -> list[Order]:
        probe = self.last(FindClusters)
        distances = {int(name[1:]): distance for name, distance in known.items()}
        centroids = tuple(map(float, range(len(clusters))))
        return self.tell(Probed(probe.job, clusters, centroids, distances))

    def scanned(self, *hits: Hit | Sequence[Hit]) -> list[Order]:
        """End the last scan; `hits` of its one part, or lists of hits of each."""
        return self.end(self.last(ScanClusters), *hits)

    def end(self, scan: ScanClusters, *hits: Any) -> list[Order]:
        """End a scan as `scanned` does."""
        single = len(scan.parts) == 1 and (not hits or isinstance(hits[0], tuple))
        found = tuple(
            Part(hits=tuple(sorted(part)), homes=(scan.parts[i].clusters[0],) * len(part))
            for i, part in enumerate([hits] if single else hits)
        )
        return self.tell(Scanned(scan.job, found, 1e-3))
