"""A request of a workflow, run by the control plane alone: how its graph is rewritten.

In: a workflow without code. Out: the graph of a request while it runs. Replies, hits and times are
made up; which rewrites are made of them is decided as for real requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.workflow import Retrieval, Workflow
from dovetail.runtime.flows.control import messages
from dovetail.runtime.flows.control.costs import StageCosts, StepCost
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.driver import call_function
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost

CLUSTERS = (3, 7, 4, 5)
"""What each search looks at, of twelve clusters."""
COSTS = StageCosts(scan=ScanCost(1e-4, 1e-4), overhead=1e-4, step=StepCost(fixed=2e-3), reply=0.5)
REPORTS, NODES = 60, 14
"""Where a request is left, and the most nodes that are drawn."""


class _Catalog:
    """Twelve clusters of a hundred vectors."""

    def sizes(self, index: str | None) -> Sequence[int]:
        return [100] * 12

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        return [Document(id=id_, text=f"document {id_}") for _, id_ in hits]


def rewrite_request(workflow: Workflow) -> tuple[ExecutionGraph, tuple[str, ...]]:
    """Return the graph of a request when most is in it, and the rewrites so far, by name."""
    control = Wavefront(WavefrontSettings(fixed_clusters=2), COSTS, _Catalog())
    run = WorkflowRun(workflow, dict.fromkeys(workflow.inputs, "?"))
    number = control.submit(run, 0.0)
    live = control.front.tickets[number].graph
    orders: deque[messages.Order] = deque(control.orders(0.0))
    best, made, now = live.freeze(), tuple[str, ...](), 0.0
    for _ in range(REPORTS):
        if not orders:
            break
        order = orders.popleft()
        for report in _answer(order):
            now += 0.01
            control.tell(report, now)
            orders += control.orders(now)
            graph = live.freeze()
            if len(best.nodes) < len(graph.nodes) <= NODES:
                best, made = graph, tuple(rewrite.transformation for rewrite in live.rewrites)
    return best, tuple(dict.fromkeys(made))


def _answer(order: messages.Order) -> Iterator[messages.Report]:
    """Yield what comes of an order; a hit of each cluster, whose number tells where it is."""
    match order:
        case messages.Generate():
            for n in (8, 16, 24) if order.steps else ():
                yield messages.Progressed(order.job, " ".join(["word"] * n), n)
            yield messages.Finished(order.job, "some words")
        case messages.Embed():
            yield messages.Finished(order.job, [0.0, 1.0])
        case messages.Invoke() | messages.Choose():
            yield call_function(order)
        case messages.FindClusters():
            away = tuple(map(float, range(len(CLUSTERS))))
            yield messages.Probed(order.job, CLUSTERS, away, dict.fromkeys(order.known, 0.1))
        case messages.ScanClusters():
            found = (
                Part(hits=tuple((0.1 + 0.01 * home, 10 * home + 1) for home in homes), homes=homes)
                for homes in (part.clusters for part in order.parts)
            )
            yield messages.Scanned(order.job, tuple(found), 0.02)
