"""The transformation `place`: nodes that run a model become one node per process and phase.

In: an ExecutionGraph and the ServicePlan of each model. Out: a graph that says which cores and
which memory do what. Pure; `contract` undoes it (design: the one-device result is unchanged).

    question ──> generation ──> answer          with 2 processes becomes

                 ┌─> prefill/0 ══> decode/0 ──> answer       ──  data
    question ────┤      ∥              ∥                     ══  phase switch: other cores, same KV
                 └─> prefill/1 ══> decode/1                  ∥   all-reduce, a ring of the ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from msgspec.structs import replace

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import (
    ALL_REDUCE,
    EMBEDDING,
    GENERATION,
    PHASE_SWITCH,
    ExecutionGraph,
    GraphEdge,
    GraphNode,
    Placement,
    contract,
)

PHASES = {GENERATION: ("prefill", "decode"), EMBEDDING: ("prefill",)}
"""Kinds that run a model, and the phases they go through; an encoder has no decode."""


def place(graph: ExecutionGraph, plans: Mapping[str, ServicePlan]) -> ExecutionGraph:
    """Return `graph` with each generation and embedding node of a model in `plans` placed.

    All ranks take the input; rank 0, which samples, gives the output. Nodes of other models, and
    those placed already, stay.

    Raises:
        WorkflowError: a plan's PUs are not those of its processes and threads.
    """
    made = {
        node.name: _sub_nodes(node, plan)
        for node in graph.nodes
        if node.kind in PHASES and node.place is None and (plan := plans.get(node.model or ""))
    }
    ends = {name: _phases(found) for name, found in made.items()}
    edges = [
        GraphEdge(source=source, target=target, kind=edge.kind)
        for edge in graph.edges
        for source in ([ends[edge.source][-1][0].name] if edge.source in ends else [edge.source])
        for target in ([n.name for n in ends[edge.target][0]] if edge.target in ends
                       else [edge.target])
    ]  # fmt: skip
    for phases in ends.values():
        edges += _inner_edges(phases)
    nodes = (sub for node in graph.nodes for sub in made.get(node.name, (node,)))
    placed = ExecutionGraph(nodes, edges)
    assert contract(placed) == contract(graph), "placing must not change what is computed"
    return placed


def _sub_nodes(node: GraphNode, plan: ServicePlan) -> tuple[GraphNode, ...]:
    """Return the nodes that stand for `node`, phase by phase, rank by rank."""
    return tuple(
        replace(node, name=f"{node.name}/{phase}/{rank}", origin=node.name, place=placement)
        for phase in PHASES[node.kind]
        for rank, placement in enumerate(_placements(node, plan, phase))
    )


def _placements(node: GraphNode, plan: ServicePlan, phase: str) -> Iterator[Placement]:
    part: PhasePlan = getattr(plan, phase)
    if part.cpus and len(part.cpus) != plan.processes * part.threads:
        raise WorkflowError(
            f"node {node.name!r}: {plan.processes} processes of {part.threads} threads cannot have "
            f"{len(part.cpus)} PUs"
        )
    for rank in range(plan.processes):
        yield Placement(
            process=rank,
            phase=phase,
            threads=part.threads,
            cpus=part.cpus[rank * part.threads : (rank + 1) * part.threads],
            node=plan.nodes[rank] if plan.nodes else None,
        )


def _phases(nodes: tuple[GraphNode, ...]) -> tuple[tuple[GraphNode, ...], ...]:
    """Return sub-nodes by phase, each in the order of ranks."""
    found: dict[str, list[GraphNode]] = {}
    for node in nodes:
        assert node.place is not None
        found.setdefault(node.place.phase, []).append(node)
    return tuple(map(tuple, found.values()))


def _inner_edges(phases: tuple[tuple[GraphNode, ...], ...]) -> Iterator[GraphEdge]:
    """Yield the ring of each phase, rank r to r + 1, and what each rank switches to."""
    for ranks in phases:
        ring = zip(ranks, (*ranks[1:], ranks[0]), strict=True) if len(ranks) > 1 else ()
        for a, b in ring:
            yield GraphEdge(source=a.name, target=b.name, kind=ALL_REDUCE)
    for before, after in pairwise(phases):
        for a, b in zip(before, after, strict=True):
            yield GraphEdge(source=a.name, target=b.name, kind=PHASE_SWITCH)


def serving_graph(model: str) -> ExecutionGraph:
    """Return the graph of one request to a model, before it is placed."""
    return ExecutionGraph([GraphNode(name=model, kind=GENERATION, model=model)])
