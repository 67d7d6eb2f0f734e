from __future__ import annotations

from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import read_hardware
from dovetail.topology.report import TreeNode, nest_tree, report_topology


def test_nested_tree_holds_every_pu_under_its_level() -> None:
    tree = build_tree(read_hardware("package:2 core:2 pu:2")).tree
    core = TreeNode("core", (TreeNode("pu", pu=0), TreeNode("pu", pu=1)))
    root = nest_tree(tree)
    assert (root.kind, root.children[0].kind) == ("machine", "package")
    assert root.children[0].children[0] == core
    assert len(root.children) == 2


def test_counts_of_a_machine() -> None:
    machine = report_topology(read_hardware("package:2 numa:2 l3:4 core:4 pu:2"))
    counts = (machine.sockets, machine.numa_nodes, machine.memory_only_nodes, machine.l3_groups)
    assert counts == (2, 4, 0, 16)
    assert (machine.cores, machine.pus, machine.allowed_pus) == (64, 128, 128)
