"""Pictures of execution graphs: Mermaid text, and SVG.

In: ExecutionGraphs. Out: flowcharts from left to right; dashed lines are what nothing waits for or
what is only a guess, dashed boxes what nobody sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from dovetail.ir.graph import (
    ALL_REDUCE,
    DATA,
    HISTORY,
    MERGE,
    ORDERS,
    PHASE_SWITCH,
    PREFETCH,
    SPECULATIVE,
    VALIDATE,
    ExecutionGraph,
    GraphNode,
)
from dovetail.ir.workflow_draw import (
    ACROSS,
    DASH,
    DOWN,
    HEIGHT,
    MARGIN,
    SHAPES,
    TIP,
    WIDTH,
    draw_box,
    join_svg,
)

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
        title = "<br>".join(_titles(node)).replace('"', "&quot;")
        lines.append(f'  {ids[node.name]}{left}"{title}"{right}')
    lines += [f"  {ids[e.source]} {ARROWS[e.kind]} {ids[e.target]}" for e in graph.edges]
    if provisional := [ids[node.name] for node in graph.nodes if node.provisional]:
        lines.append("  classDef provisional stroke-dasharray: 4 3")
        lines.append(f"  class {','.join(provisional)} provisional")
    return "\n".join(lines) + "\n"


def _titles(node: GraphNode) -> list[str]:
    """Return the name, and what the node does of its whole."""
    said = [node.name]
    if node.clusters:
        listed = len(node.clusters) <= SHOWN
        said.append(f"{list(node.clusters)}" if listed else f"{len(node.clusters)} clusters")
    if node.steps is not None:
        said.append(f"{node.steps} steps")
    return said


def draw_graphs(graphs: Sequence[tuple[str, ExecutionGraph]]) -> str:
    """Return an SVG of graphs below each other, a title above each."""
    shapes, right, y = list[str](), 0, 0
    for title, graph in graphs:
        spots = _spots(graph, y + 2 * MARGIN)
        shapes.append(f'<text x="{MARGIN}" y="{y + MARGIN}" font-size="13">{escape(title)}</text>')
        shapes += _arrows(graph, spots)
        shapes += (draw_box(spots[n.name], n.kind, _titles(n), n.provisional) for n in graph.nodes)
        right = max([right, *(x + WIDTH for x, _ in spots.values())])
        y = max(low for _, low in spots.values()) + HEIGHT + MARGIN
    return join_svg(right + MARGIN, y, shapes)


def _spots(graph: ExecutionGraph, top: int) -> dict[str, tuple[int, int]]:
    """Return the upper left corner of each box: a column behind all it waits for, a row each."""
    columns: dict[str, int] = {}
    spots: dict[str, tuple[int, int]] = {}
    for name in graph.ordered():
        before = (columns[e.source] for e in graph.edges if e.target == name and ORDERS[e.kind])
        columns[name] = column = max(before, default=-1) + 1
        row = list(columns.values()).count(column) - 1
        spots[name] = MARGIN + column * ACROSS, top + row * DOWN * 3 // 4
    return spots


def _arrows(graph: ExecutionGraph, spots: dict[str, tuple[int, int]]) -> Iterator[str]:
    for edge in graph.edges:
        (x1, y1), (x2, y2) = spots[edge.source], spots[edge.target]
        if x1 == x2:  # side by side in time: from one box straight to the other
            down = y2 > y1
            path = f"M{x1 + WIDTH // 2} {y1 + HEIGHT * down}V{y2 + HEIGHT * (not down)}"
        else:
            start, end = (x1 + WIDTH, y1 + HEIGHT // 2), (x2, y2 + HEIGHT // 2)
            bend = max(MARGIN, abs(end[0] - start[0]) // 2)
            path = f"M{start[0]} {start[1]}C{start[0] + bend} {start[1]} {end[0] - bend} {end[1]} "
            path += f"{end[0]} {end[1]}"
        dash = "" if edge.kind in (DATA, PHASE_SWITCH, ALL_REDUCE) else DASH
        yield f'<path d="{path}" fill="none" stroke="#555555"{dash} {TIP}/>'
