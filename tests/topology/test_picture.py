from __future__ import annotations

from xml.etree import ElementTree

from dovetail.topology.hardware import read_hardware
from dovetail.topology.picture import COLOURS, IDLE, draw_tree
from dovetail.topology.report import report_topology

SVG = "{http://www.w3.org/2000/svg}"


def test_every_pu_is_a_box_in_the_colour_of_its_process() -> None:
    tree = report_topology(read_hardware("package:2 l3:2 core:3 pu:2")).tree
    ranks = {pu: pu // 12 for pu in range(0, 24, 2)}
    root = ElementTree.fromstring(draw_tree(tree, ranks, "a < b & c"))
    fills = [box.get("fill") for box in root.iter(f"{SVG}rect")]
    assert [fills.count(colour) for colour in (COLOURS[0], COLOURS[1], IDLE)] == [6, 6, 12]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c"
    assert {text for text in texts if text.isdigit()} == {str(pu) for pu in range(24)}
    assert texts.count("l3 1") == 2


def test_boxes_lie_inside_the_picture() -> None:
    for line in ("core:80", "package:4 numa:2 core:24", "core:1"):
        tree = report_topology(read_hardware(line)).tree
        root = ElementTree.fromstring(draw_tree(tree, {}, "t"))
        width, height = int(root.get("width")), int(root.get("height"))
        for box in root.iter(f"{SVG}rect"):
            right = int(box.get("x", 0)) + int(box.get("width"))
            assert right <= width
            assert int(box.get("y", 0)) + int(box.get("height")) <= height
