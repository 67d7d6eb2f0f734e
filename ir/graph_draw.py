"""Pictures of execution graphs as Mermaid text.

In: an ExecutionGraph. Out: a flowchart from left to right; dotted lines are what nothing waits for
or what is only a guess, dashed boxes what nobody sees.
"""

from __future__ import annotations

from dovetail.ir.graph import (
    ALL_REDUCE,
    DATA,
    HISTORY,
    MERGE,
    PHASE_SWITCH,
    PREFETCH,
    SPECULATIVE,
    VALIDATE,
    ExecutionGraph,
    GraphNode,
)
from dovetail.ir.workflow_draw import SHAPES

BOXES = {**SHAPES, MERGE: ("((", "))"), VALIDATE: ("{", "}")}
ARROWS = {
    DATA: "-->",
    PHASE_SWITCH: "==>",
    ALL_REDUCE: "<-->",
    SPECULATIVE: "-. guess .->",
    HISTORY: "-. history .->",
    PREFETCH: "-. copy .->",
}
SHOWN = 6
"""Clusters that are listed; of more only the number is told."""


def draw_graph(graph: ExecutionGraph) -> str:
    """Return a Mermaid flowchart."""
    ids = {node.name: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for node in graph.nodes:
        left, right = BOXES[node.kind]
        title = _title(node).replace('"', "&quot;")
        lines.append(f'  {ids[node.name]}{left}"{title}"{right}')
    lines += [f"  {ids[e.source]} {ARROWS[e.kind]} {ids[e.target]}" for e in graph.edges]
    if provisional := [ids[node.name] for node in graph.nodes if node.provisional]:
        lines.append("  classDef provisional stroke-dasharray: 4 3")
        lines.append(f"  class {','.join(provisional)} provisional")
    return "\n".join(lines) + "\n"


def _title(node: GraphNode) -> str:
    """Return the name, and what the node does of its whole."""
    said = [node.name]
    if node.clusters:
        listed = len(node.clusters) <= SHOWN
        said.append(f"{list(node.clusters)}" if listed else f"{len(node.clusters)} clusters")
    if node.steps is not None:
        said.append(f"{node.steps} steps")
    return "<br>".join(said)
