"""Pictures of an artifact: the cores of each plan, graphs of workflows.

In: an inspection. Out: `Picture`s, an SVG each.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.cli.inspect_plans import explain_loss, show_cpus
from dovetail.cli.inspection import Inspection
from dovetail.html_report.example_run import rewrite_request
from dovetail.ir.errors import DovetailError
from dovetail.ir.graph_draw import draw_graphs
from dovetail.ir.template import FunctionEntry, WorkflowFile
from dovetail.ir.workflow_draw import draw_svg
from dovetail.ir.workflow_file import make_graph
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
        told = ", ".join(made) or "no rewrite"
        words = f"{file.name}, after {told}: a request under way (made-up replies and times)"
        yield Picture(draw_graphs([(f"after {told}", graph)]), words)


def _names_of_code(file: WorkflowFile) -> tuple[str, ...]:
    nodes = (node.function for node in file.nodes if isinstance(node, FunctionEntry))
    edges = (edge.choose for edge in file.edges if edge.choose is not None)
    return (*nodes, *edges)


def _no_code(*_: object) -> object:
    raise AssertionError("a report runs no code of an artifact")
