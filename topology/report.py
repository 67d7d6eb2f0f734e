"""What `dovetail topo` tells of a machine and of the plans made for it.

In: a HardwareSpec, a TopologyPlan. Out: plain values that print as JSON and as tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dovetail.ir.plans import DivisionChoice, Figure
from dovetail.topology.fundamental import build_tree
from dovetail.topology.plan import Candidate, SearchReport, TopologyPlan
from dovetail.topology.replay import PairScore
from dovetail.topology.tree import Level, TopoTree
from dovetail.topology.values import AcceleratorSpec, HardwareSpec, NodeSpec


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node of the fundamental TopoTree; leaves carry the operating system's PU id."""

    kind: str
    children: tuple[TreeNode, ...] = ()
    pu: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One tensor-parallel rank."""

    pus: tuple[int, ...]
    memory_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """One candidate of a phase; `tree` is the transformed tree it was cut from."""

    processes: int
    threads: int
    tree: str
    seconds: float
    ranks: tuple[ProcessReport, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Candidates of each phase, best first, the chosen pair, and every figure behind it.

    divisions: of the CPU among the model, searches and an encoder, by load; best first, all cores
    for everyone last.
    """

    model: str
    trace: str
    batches: tuple[int, ...]
    evaluation: str
    prefill_candidates: tuple[CandidateReport, ...]
    decode_candidates: tuple[CandidateReport, ...]
    prefill: CandidateReport
    decode: CandidateReport
    score: PairScore
    seconds_per_request: float
    search: SearchReport
    figures: dict[str, Figure]
    notes: tuple[str, ...]
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


def report_plan(
    plan: TopologyPlan,
    model: str,
    notes: tuple[str, ...] = (),
    divisions: Mapping[str, tuple[DivisionChoice, ...]] = MappingProxyType({}),
) -> PlanReport:
    """Return a plan for the model called `model` as plain values; `notes` come before its own.

    divisions: of the CPU among all workers, by the name of the load.
    """
    best = plan.pairs[0]
    return PlanReport(
        model=model,
        trace=plan.trace.source,
        batches=plan.trace.batches,
        evaluation="simulated: contention model with the figures below",
        prefill_candidates=tuple(map(_candidate, plan.prefill)),
        decode_candidates=tuple(map(_candidate, plan.decode)),
        prefill=_candidate(best.prefill),
        decode=_candidate(best.decode),
        score=best.score,
        seconds_per_request=best.score.total,
        search=plan.report,
        figures=plan.parameters.sources(),
        notes=(*notes, *plan.notes),
        divisions=dict(divisions),
    )


def _candidate(item: Candidate) -> CandidateReport:
    processes = item.configuration.processes
    return CandidateReport(
        processes=len(processes),
        threads=len(processes[0].pus),
        tree=item.levels,
        seconds=item.seconds,
        ranks=tuple(ProcessReport(process.pus, process.nodes) for process in processes),
    )
