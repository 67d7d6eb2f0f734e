"""Pictures of an artifact: the cores of each plan, graphs of workflows.

In: an inspection. Out: `Picture`s, an SVG each.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dovetail.cli.inspect_plans import explain_loss, show_cpus
from dovetail.cli.inspection import Inspection
from dovetail.ir.errors import DovetailError
from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.graph_draw import draw_graphs
from dovetail.ir.template import FunctionEntry, WorkflowFile
from dovetail.ir.workflow import Retrieval, Workflow
from dovetail.ir.workflow_draw import draw_svg
from dovetail.ir.workflow_file import make_graph
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
from dovetail.topology.fundamental import build_tree
from dovetail.topology.picture import draw_tree
from dovetail.topology.report import nest_tree


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG with what it shows in words. chosen: of a plan that serves."""

    svg: str
    words: str
    chosen: bool = True

    @property
    def url(self) -> str:
        """The picture in an address, so that the names in it are its own."""
        return "data:image/svg+xml;base64," + b64encode(self.svg.encode()).decode()


def plan_pictures(found: Inspection) -> Iterator[Picture]:
    """Yield the machine once for each candidate of a phase, each process in a colour of its own."""
    choice = found.choice
    if found.hardware is None or choice is None:
        return
    tree = nest_tree(build_tree(found.hardware).tree)
    best = choice.pairs[0]
    for phase, candidates, chosen in (
        ("prefill", choice.prefill, best.prefill),
        ("decode", choice.decode, best.decode),
    ):
        for number, plan in enumerate(candidates):
            ranks = {pu: place // plan.threads for place, pu in enumerate(plan.cpus)}
            title = f"{phase}: {plan.processes} x {plan.threads} threads"
            why = "chosen" if number == chosen else explain_loss(plan, candidates[chosen])
            words = f"{title} on PUs {show_cpus(plan.cpus)}{'; ' * bool(why)}{why}"
            yield Picture(draw_tree(tree, ranks, title), words, number == chosen)


def workflow_pictures(file: WorkflowFile) -> Iterator[Picture]:
    """Yield a workflow, and the graph of a request before and after it is rewritten.

    One that calls code of its own is drawn as it is: nothing of an artifact runs here.
    """
    functions = _names_of_code(file)
    try:
        workflow = make_graph(file, dict.fromkeys(functions, _no_code)).workflow()
    except DovetailError:
        return
    yield Picture(draw_svg(workflow), f"{file.name}, before: nodes, and what runs after them")
    if not functions:
        graph, made = rewrite_request(workflow)
        rewrites = ", ".join(made) or "no rewrite"
        words = f"{file.name}, after {rewrites}: a request under way (made-up replies and times)"
        yield Picture(draw_graphs([(f"after {rewrites}", graph)]), words)


def _names_of_code(file: WorkflowFile) -> tuple[str, ...]:
    nodes = (node.function for node in file.nodes if isinstance(node, FunctionEntry))
    edges = (edge.choose for edge in file.edges if edge.choose is not None)
    return (*nodes, *edges)


def _no_code(*_: object) -> object:
    raise AssertionError("a report runs no code of an artifact")


# ---- a request, run by the control plane alone ----


CLUSTERS = (3, 7, 4, 5)
"""What each search looks at, of twelve clusters."""
COSTS = StageCosts(scan=ScanCost(1e-4, 1e-4), overhead=1e-4, step=StepCost(fixed=2e-3), reply=0.5)
REPORTS, NODES = 60, 14
"""Where a request is left, and the most nodes that are drawn."""


class _SampleCatalog:
    """Twelve clusters of a hundred vectors."""

    def sizes(self, index: str | None) -> Sequence[int]:
        return [100] * 12

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        return [Document(id=id_, text=f"document {id_}") for _, id_ in hits]


def rewrite_request(workflow: Workflow) -> tuple[ExecutionGraph, tuple[str, ...]]:
    """Return the graph of a request when most is in it, and the rewrites so far, by name."""
    control = Wavefront(WavefrontSettings(fixed_clusters=2), COSTS, _SampleCatalog())
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
        case messages.RankDocuments():
            yield messages.Finished(order.job, list(order.documents)[: order.node.topk])
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
