"""Pictures of workflows."""

from __future__ import annotations

from xml.etree import ElementTree

from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Branch
from tests.ir.test_ragraph import hyde, multistep

MERMAID = """flowchart TD
  START([START])
  n0["0: generation → hypopara"]
  n1[("1: retrieval → docs")]
  n2["2: generation → answer"]
  END([END])
  START --> n0
  n0 --> n1
  n1 --> n2
  n2 --> END
"""


def test_mermaid_shows_nodes_and_edges() -> None:
    assert hyde().mermaid() == MERMAID
    text = multistep().mermaid()
    assert "n2 -.-> END" in text and "n2 -.-> n1" in text and "n1 --> n2" in text


def test_mermaid_labels_branches_and_quotes_names() -> None:
    g = RAGraph()
    g.add_function('say "a"', len, "o")
    g.add_edge(START, 'say "a"')
    g.add_edge('say "a"', Branch("o", 'say "a"'), ['say "a"', END])
    text = g.mermaid()
    assert '-.->|"o"| n0' in text and '-.->|"no o"| END' in text and "say &quot;a&quot;" in text


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    root = ElementTree.fromstring(svg)
    found = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("x")]
    return [tuple(float(e.attrib[k]) for k in ("x", "y", "width", "height")) for e in found]  # type: ignore[misc]


def test_svg_has_a_box_for_each_place_and_none_overlap() -> None:
    g = multistep()
    g.add_function("<b>", len, "side")
    g.add_edge(0, "<b>")
    g.add_edge("<b>", END)
    svg = g.svg()
    found = boxes(svg)
    assert len(found) == 6 and "&lt;b&gt;" in svg
    for i, (x, y, w, h) in enumerate(found):
        for x2, y2, _, _ in found[:i]:
            assert abs(x - x2) >= w or abs(y - y2) >= h
    width = float(ElementTree.fromstring(svg).attrib["width"])
    assert all(x + w <= width for x, _, w, _ in found)
    assert svg.count("stroke-dasharray") == 5, "the choice may lead to four nodes and to END"
