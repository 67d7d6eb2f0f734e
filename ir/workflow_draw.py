"""Pictures of workflows: Mermaid text, and SVG.

In: a Workflow. Out: text. Dashed lines are choices; what a choice may lead to is all that it says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from dovetail.ir.workflow import END, START, Branch, Edge, Place, Terminal, Workflow, targets

SHAPES = {
    "generation": ("[", "]"),
    "retrieval": ("[(", ")]"),
    "embedding": ("[/", "/]"),
    "rerank": ("[\\", "\\]"),
    "function": ("{{", "}}"),
}
COLOURS = {
    "generation": "#d6e4f5",
    "retrieval": "#d9efd5",
    "embedding": "#fbe6cc",
    "rerank": "#fbe6cc",
    "function": "#ececec",
    "merge": "#ececec",
    "validate": "#f7d7d7",
    "end": "#ffffff",
}
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 190, 40, 220, 84, 20
DASH, TIP = ' stroke-dasharray="5 3"', 'marker-end="url(#tip)"'


@dataclass(frozen=True, slots=True)
class _Arrow:
    source: Place
    target: Place
    label: str
    chosen: bool


def draw_mermaid(workflow: Workflow) -> str:
    """Return a Mermaid flowchart."""
    lines = ["flowchart TD"]
    for place in workflow.order:
        if isinstance(place, Terminal):
            lines.append(f"  {_id(place, workflow)}([{place.value}])")
        else:
            left, right = SHAPES[workflow.nodes[place].kind]
            lines.append(
                f'  {_id(place, workflow)}{left}"{_quote(_title(place, workflow))}"{right}'
            )
    for arrow in _arrows(workflow):
        line = "-.->" if arrow.chosen else "-->"
        label = f'|"{_quote(arrow.label)}"|' if arrow.label else ""
        ends = (_id(arrow.source, workflow), _id(arrow.target, workflow))
        lines.append(f"  {ends[0]} {line}{label} {ends[1]}")
    return "\n".join(lines) + "\n"


def draw_svg(workflow: Workflow) -> str:
    """Return an SVG: nodes in rows from START down to END, loops at the side."""
    spots = _spots(workflow)
    right = max(x for x, _ in spots.values()) + WIDTH
    arrows = _arrows(workflow)
    loops = sum(_goes_up(arrow, spots) for arrow in arrows)
    width = right + MARGIN * (2 + 2 * loops)
    height = max(y for _, y in spots.values()) + HEIGHT + MARGIN
    boxes = (_box(place, workflow, spots[place]) for place in workflow.order)
    return join_svg(width, height, [*_lines(arrows, spots, right), *boxes])


def join_svg(width: int, height: int, shapes: Iterable[str]) -> str:
    """Return an SVG of some shapes, whose lines may end in `TIP`."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#555555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def draw_box(spot: tuple[int, int], kind: str, titles: Sequence[str], dashed: bool = False) -> str:
    """Return a box in the colour of a kind of node, a line of text for each title."""
    x, y = spot
    radius, dash = HEIGHT // 2 if kind == "end" else 5, DASH if dashed else ""
    first = y + HEIGHT // 2 + 4 - 7 * (len(titles) - 1)
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="{radius}" '
        f'fill="{COLOURS[kind]}" stroke="#888888"{dash}/>'
    ) + "".join(
        f'\n<text x="{x + WIDTH // 2}" y="{first + 14 * row}" text-anchor="middle">'
        f"{escape(title)}</text>"
        for row, title in enumerate(titles)
    )


def _arrows(workflow: Workflow) -> list[_Arrow]:
    return [
        _Arrow(source, target, _label(edge, target), edge.choose is not None)
        for source in sorted(workflow.edges, key=workflow.order.__getitem__)
        for edge in workflow.edges[source]
        for target in dict.fromkeys(targets(edge, workflow.nodes))
    ]


def _label(edge: Edge, target: Place) -> str:
    if not isinstance(edge.choose, Branch):
        return ""
    return edge.choose.key if target == edge.choose.then else f"no {edge.choose.key}"


def _title(place: Place, workflow: Workflow) -> str:
    if isinstance(place, Terminal):
        return place.value
    node = workflow.nodes[place]
    return f"{place}: {node.kind} → {node.output}"


def _id(place: Place, workflow: Workflow) -> str:
    return place.value if isinstance(place, Terminal) else f"n{list(workflow.nodes).index(place)}"


def _quote(text: str) -> str:
    return text.replace('"', "&quot;")


def _spots(workflow: Workflow) -> dict[Place, tuple[int, int]]:
    """Return the upper left corner of each box: its row is its longest way from START."""
    rows: dict[Place, int] = {START: 0}
    for place in workflow.order:
        for edge in workflow.edges.get(place, ()):
            for target in targets(edge, workflow.nodes):
                if workflow.order[target] > workflow.order[place]:
                    rows[target] = max(rows.get(target, 0), rows.get(place, 0) + 1)
    rows[END] = max(rows.values())
    columns: dict[int, int] = defaultdict(int)
    spots = {}
    for place in workflow.order:
        row = rows.get(place, 0)
        spots[place] = (MARGIN + columns[row] * ACROSS, MARGIN + row * DOWN)
        columns[row] += 1
    return spots


def _goes_up(arrow: _Arrow, spots: dict[Place, tuple[int, int]]) -> bool:
    return spots[arrow.target][1] <= spots[arrow.source][1]


def _lines(arrows: list[_Arrow], spots: dict[Place, tuple[int, int]], right: int) -> Iterator[str]:
    lane = right
    for arrow in arrows:
        (x1, y1), (x2, y2) = spots[arrow.source], spots[arrow.target]
        dash = DASH if arrow.chosen else ""
        if _goes_up(arrow, spots):
            lane += 2 * MARGIN
            start, end = (x1 + WIDTH, y1 + HEIGHT // 2), (x2 + WIDTH, y2 + HEIGHT // 2)
            path = f"M{start[0]} {start[1]}H{lane}V{end[1]}H{end[0]}"
            spot = (lane - 4, (start[1] + end[1]) // 2)
        else:
            start, end = (x1 + WIDTH // 2, y1 + HEIGHT), (x2 + WIDTH // 2, y2)
            middle = (start[1] + end[1]) // 2
            path = f"M{start[0]} {start[1]}C{start[0]} {middle} {end[0]} {middle} {end[0]} {end[1]}"
            spot = ((start[0] + end[0]) // 2, middle)
        yield f'<path d="{path}" fill="none" stroke="#555555"{dash} {TIP}/>'
        if arrow.label:
            label = escape(arrow.label)
            yield f'<text x="{spot[0]}" y="{spot[1]}" text-anchor="end">{label}</text>'


def _box(place: Place, workflow: Workflow, spot: tuple[int, int]) -> str:
    kind = "end" if isinstance(place, Terminal) else workflow.nodes[place].kind
    return draw_box(spot, kind, [_title(place, workflow)])
