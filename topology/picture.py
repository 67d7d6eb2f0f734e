"""Draws a TopoTree as nested boxes, each PU in the colour of the process that it works for.

In: the tree of a report, PU -> rank. Out: the text of an SVG file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from xml.sax.saxutils import escape

from dovetail.topology.report import TreeNode

CELL, GAP, TITLE = 22, 6, 16
COLOURS = "#4e79a7 #f28e2b #59a14f #e15759 #76b7b2 #edc948 #b07aa1 #9c755f".split()
IDLE = "#e8e8e8"


@dataclass(frozen=True, slots=True)
class _Box:
    node: TreeNode
    width: int
    height: int
    children: tuple[tuple[int, int, _Box], ...]  # x, y inside this box


def draw_tree(tree: TreeNode, ranks: Mapping[int, int], title: str) -> str:
    """Return an SVG of `tree`; PUs without a rank are grey."""
    box = _measure(tree)
    width, height = max(box.width, 9 * len(title)) + 2 * GAP, box.height + TITLE + 2 * GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{GAP}" y="{TITLE - 3}" font-size="12">{escape(title)}</text>',
        *_draw(box, GAP, TITLE, ranks, ""),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _measure(node: TreeNode) -> _Box:
    if not node.children:
        return _Box(node, CELL, CELL, ())
    inside = [_measure(child) for child in node.children]
    width, height = inside[0].width + GAP, inside[0].height + GAP  # all children are alike
    columns = max(1, ceil(sqrt(len(inside) * height / width)))
    placed = tuple(
        (GAP + i % columns * width, TITLE + i // columns * height, box)
        for i, box in enumerate(inside)
    )
    rows = ceil(len(inside) / columns)
    return _Box(node, GAP + min(columns, len(inside)) * width, TITLE + rows * height, placed)


def _draw(box: _Box, x: int, y: int, ranks: Mapping[int, int], name: str) -> Iterator[str]:
    pu = box.node.pu
    if pu is not None:
        rank = ranks.get(pu)
        fill = IDLE if rank is None else COLOURS[rank % len(COLOURS)]
        yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3" fill="{fill}"/>'
        ink = "#888888" if rank is None else "#ffffff"
        yield (
            f'<text x="{x + CELL // 2}" y="{y + 15}" text-anchor="middle" fill="{ink}">{pu}</text>'
        )
        return
    yield (
        f'<rect x="{x}" y="{y}" width="{box.width}" height="{box.height}" rx="4" '
        'fill="none" stroke="#999999"/>'
    )
    yield f'<text x="{x + GAP}" y="{y + 12}" fill="#555555">{escape(name or box.node.kind)}</text>'
    for number, (left, top, child) in enumerate(box.children):
        yield from _draw(child, x + left, y + top, ranks, f"{child.node.kind} {number}")
