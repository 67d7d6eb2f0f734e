"""What `dovetail topo` tells of a machine and of the plans made for it.

In: a HardwareSpec, a PlanReport. Out: plain values that print as JSON and as tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.plans import DivisionChoice, PlanChoice
from dovetail.topology.fundamental import build_tree
from dovetail.topology.plan import SearchReport
from dovetail.topology.tree import Level, TopoTree
from dovetail.topology.values import AcceleratorSpec, HardwareSpec, NodeSpec


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node of the fundamental TopoTree; leaves carry the operating system's PU id."""

    kind: str
    children: tuple[TreeNode, ...] = ()
    pu: int | None = None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plans of a model, why they were chosen, and what was looked at for them.

    divisions: of the CPU among the model, searches and an encoder, by load; best first, all cores
    for everyone last.
    """

    model: str
    choice: PlanChoice
    search: SearchReport
    divisions: dict[str, tuple[DivisionChoice, ...]]


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """Counts of a machine, its tree, and the plan where a model was given.

    numa_nodes: all of them, the memory-only ones included.
    """

    source: str
    arch: str
    cpu: str
    sockets: int
    numa_nodes: int
    memory_only_nodes: int
    l3_groups: int
    cores: int
    pus: int
    allowed_pus: int
    cpu_quota: float | None
    memory_bytes: int
    isa_flags: tuple[str, ...]
    nodes: tuple[NodeSpec, ...]
    accelerators: tuple[AcceleratorSpec, ...]
    levels: tuple[Level, ...]
    tree: TreeNode
    tree_hash: str
    notes: tuple[str, ...]
    plan: PlanReport | None = None


def report_topology(spec: HardwareSpec, plan: PlanReport | None = None) -> TopologyReport:
    """Return the counts, the tree and the plan of a machine; SpecError when it allows no PU."""
    found = build_tree(spec)
    return TopologyReport(
        source=spec.source,
        arch=spec.arch,
        cpu=spec.cpu_model,
        sockets=spec.sockets,
        numa_nodes=len(spec.nodes),
        memory_only_nodes=len(spec.memory_only_nodes),
        l3_groups=sum(cache.level == 3 for cache in spec.caches),
        cores=spec.cores,
        pus=sum(pu.online for pu in spec.pus),
        allowed_pus=len(spec.allowed_pus),
        cpu_quota=spec.cpu_quota,
        memory_bytes=spec.memory_bytes,
        isa_flags=spec.isa_flags,
        nodes=spec.nodes,
        accelerators=spec.accelerators,
        levels=found.tree.levels,
        tree=nest_tree(found.tree),
        tree_hash=found.tree.hash(),
        notes=found.notes,
        plan=plan,
    )


def nest_tree(tree: TopoTree) -> TreeNode:
    """Return a tree as nested nodes."""
    nodes = [TreeNode(tree.levels[-1].kind, pu=pu) for pu in tree.pus]
    for depth in range(tree.depth - 1, -1, -1):
        arity = tree.levels[depth].arity
        kind = tree.levels[depth - 1].kind if depth else "machine"
        nodes = [
            TreeNode(kind, tuple(nodes[first : first + arity]))
            for first in range(0, len(nodes), arity)
        ]
    return nodes[0]
