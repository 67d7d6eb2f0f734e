"""What will follow when work that is not over has ended: pure looks ahead at a run.

In: a run, a partial result. Out: the prompts that would follow, the search that will. No function
or choice of the user runs on what is only a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.ir.errors import WorkflowError
from dovetail.ir.workflow import (
    Edge,
    Generation,
    Name,
    Place,
    Retrieval,
    Terminal,
    Workflow,
)
from dovetail.runtime.flows.services import text_of
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun


@dataclass(frozen=True, slots=True)
class Prompt:
    """A generation that would follow, and to what prompt."""

    call: Call
    node: Generation
    text: str


def prompts_after(run: WorkflowRun, call: Call, value: object) -> list[Prompt]:
    """Return the generations that become ready if `call` ends with `value`.

    None where a function chooses what follows: it may see only what is true.
    """
    if any(edge.choose is not None for edge in run.workflow.edges[call.node.name]):
        return []
    fork = run.fork()
    try:
        fork.finish(call, value)
        return [
            Prompt(call, call.node, text_of(call))
            for call in fork.ready()
            if isinstance(call.node, Generation)
        ]
    except WorkflowError:  # it will be raised when it is true
        return []


def search_after(workflow: Workflow, name: Name) -> Retrieval | None:
    """Return the search that comes next after a node, through functions, embeddings and choices.

    None where none does, or a generation comes first on all ways. Edges that may lead anywhere
    say nothing.
    """
    seen: set[Place] = {name}
    waiting = list(_following(workflow, name))
    while waiting:
        place = waiting.pop(0)
        if place in seen or isinstance(place, Terminal):
            continue
        seen.add(place)
        node = workflow.nodes[place]
        if isinstance(node, Retrieval):
            return node
        if not isinstance(node, Generation):
            waiting += _following(workflow, place)
    return None


def _following(workflow: Workflow, place: Place) -> Iterator[Place]:
    for edge in workflow.edges[place]:
        yield from _declared(edge)


def _declared(edge: Edge) -> tuple[Place, ...]:
    return edge.targets or () if edge.target is None else (edge.target,)
