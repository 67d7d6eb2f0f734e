"""Where models, encoders and searches run: nodes become one node per process and phase, and back.

In: an ExecutionGraph and the ServicePlan of each model. Out: a graph that says which cores and
which memory do what, and of such a graph the plans. Pure; `contract` undoes it (design: the
one-device result is unchanged).

    question ──> generation ──> answer          with 2 processes becomes

                 ┌─> prefill/0 ══> decode/0 ──> answer       ──  data
    question ────┤      ∥              ∥                     ══  phase switch: other cores, same KV
                 └─> prefill/1 ══> decode/1                  ∥   all-reduce, a ring of the ranks
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from msgspec.structs import replace

from dovetail.ir.artifact import PHASES as BOTH
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import (
    ALL_REDUCE,
    EMBEDDING,
    GENERATION,
    PHASE_SWITCH,
    RERANK,
    RETRIEVAL,
    ExecutionGraph,
    GraphEdge,
    GraphNode,
    Placement,
    contract,
)

PHASES = {GENERATION: BOTH, EMBEDDING: BOTH[:1], RERANK: BOTH[:1]}
"""Kinds that run a model, and the phases they go through; an encoder has no decode."""
SEARCHES = "searches"
"""The node of the process that searches all indexes."""


def serving_graph(
    generating: Collection[str], encoders: Collection[str] = (), search: Placement | None = None
) -> ExecutionGraph:
    """Return the graph of what serves: models, which are not placed yet, and searches."""
    kinds = [
        *((name, GENERATION) for name in generating),
        *((name, EMBEDDING) for name in encoders),
    ]
    nodes = [GraphNode(name=name, kind=kind, model=name) for name, kind in kinds]
    searches = [] if search is None else [GraphNode(name=SEARCHES, kind=RETRIEVAL, place=search)]
    return ExecutionGraph([*nodes, *searches])


def place(graph: ExecutionGraph, plans: Mapping[str, ServicePlan]) -> ExecutionGraph:
    """Return `graph` with each node that runs a model in `plans` placed.

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

    def takes(name: str) -> list[str]:
        return [node.name for node in made[name][0]] if name in made else [name]

    def gives(name: str) -> str:
        return made[name][-1][0].name if name in made else name

    edges = [
        replace(edge, source=gives(edge.source), target=target)
        for edge in graph.edges
        for target in takes(edge.target)
    ]
    nodes: list[GraphNode] = []
    for node in graph.nodes:
        phases = made.get(node.name, ((node,),))
        nodes += chain.from_iterable(phases)
        if node.name in made:
            edges += _inner_edges(phases, plans[node.model or ""].prefill_token_threshold)
    placed = ExecutionGraph(nodes, edges)
    assert contract(placed) == contract(graph), "placing must not change what is computed"
    return placed


def read_plan(graph: ExecutionGraph, model: str) -> ServicePlan:
    """Return the plan by which the nodes of a model were placed.

    Raises WorkflowError where one is placed otherwise than such a plan places it.
    """
    nodes = {n.name: n.place for n in graph.nodes if n.model == model and n.place is not None}
    phases = {phase: [place for place in nodes.values() if place.phase == phase] for phase in BOTH}
    prefill, decode = phases["prefill"], phases["decode"] or phases["prefill"]
    if not prefill:
        raise WorkflowError(f"the execution graph is wrong: model {model!r} is nowhere")
    homes = [place.node for place in decode if place.node is not None]
    tokens = [e.tokens for e in graph.edges if e.kind == PHASE_SWITCH and e.source in nodes]
    plan = ServicePlan(
        processes=len(decode),
        prefill_processes=len(prefill) * (len(prefill) != len(decode)),
        nodes=tuple(homes) if len(homes) == len(decode) else (),
        prefill=_phase_plan(prefill),
        decode=_phase_plan(decode),
        kv_blocks=decode[0].kv_blocks,
        spin_iterations=decode[0].spin,
        **({"prefill_token_threshold": tokens[0]} if tokens else {}),
    )
    wanted = [place for phase in BOTH if phases[phase] for place in _placements(model, plan, phase)]
    for name, place in nodes.items():
        if replace(place, share=()) not in wanted or len(wanted) != len(nodes):
            raise WorkflowError(
                f"the execution graph is wrong: node {name!r} has not its own process, or not "
                f"threads, PUs and memory as the other {len(nodes) - 1} of model {model!r}"
            )
    return plan


def find_nodes(serve: ExecutionGraph, kind: str, model: str | None) -> tuple[GraphNode, ...]:
    """Return the nodes of the graph that serves as which a workflow's node runs, () for functions.

    Templates of workflows have no places of their own, which might say otherwise.
    """
    root = SEARCHES if kind == RETRIEVAL else model
    return tuple(node for node in serve.nodes if node.root == root)


def find_searches(graph: ExecutionGraph) -> PhasePlan:
    """Return threads and PUs of the process that searches; WorkflowError where there is none."""
    for node in graph.nodes:
        if node.name == SEARCHES and node.place is not None:
            return PhasePlan(threads=node.place.threads, cpus=node.place.cpus)
    raise WorkflowError(f"the execution graph is wrong: it has no placed node {SEARCHES!r}")


def share_out(graph: ExecutionGraph, shares: Mapping[str, tuple[int, ...]]) -> ExecutionGraph:
    """Return a placed graph whose nodes have the share of their stage, see `find_shares`."""
    nodes = (
        node if node.place is None
        else replace(node, place=replace(node.place, share=shares.get(_stage(node), ())))
        for node in graph.nodes
    )  # fmt: skip
    return ExecutionGraph(nodes, graph.edges)


def find_shares(graph: ExecutionGraph) -> dict[str, tuple[int, ...]]:
    """Return stage -> the PUs that no other worker has while it works, of placed nodes with any.

    Stages are `prefill` and `decode` of what generates, `searches` and `encoders`.
    """
    return {_stage(n): n.place.share for n in graph.nodes if n.place is not None and n.place.share}


def _stage(node: GraphNode) -> str:
    assert node.place is not None
    return {RETRIEVAL: SEARCHES, EMBEDDING: "encoders"}.get(node.kind, node.place.phase)


def _phase_plan(places: list[Placement]) -> PhasePlan:
    cpus = tuple(cpu for place in places for cpu in place.cpus)
    return PhasePlan(threads=places[0].threads, cpus=cpus)


def _sub_nodes(node: GraphNode, plan: ServicePlan) -> tuple[tuple[GraphNode, ...], ...]:
    """Return the nodes that stand for `node`: those of each phase, in the order of ranks."""
    return tuple(
        tuple(
            replace(node, name=f"{node.name}/{phase}/{rank}", origin=node.name, place=placement)
            for rank, placement in enumerate(_placements(node.name, plan, phase))
        )
        for phase in PHASES[node.kind]
    )


def _placements(name: str, plan: ServicePlan, phase: str) -> Iterator[Placement]:
    part: PhasePlan = getattr(plan, phase)
    count = plan.processes_of(phase)
    if part.cpus and len(part.cpus) != count * part.threads:
        raise WorkflowError(
            f"node {name!r}: {count} processes of {part.threads} threads cannot have "
            f"{len(part.cpus)} PUs"
        )
    for rank in range(count):
        yield Placement(
            process=rank,
            phase=phase,
            threads=part.threads,
            cpus=part.cpus[rank * part.threads : (rank + 1) * part.threads],
            node=plan.nodes[rank] if rank < len(plan.nodes) else None,
            spin=plan.spin_iterations,
            kv_blocks=plan.kv_blocks if phase == "decode" else 0,
        )


def _inner_edges(phases: tuple[tuple[GraphNode, ...], ...], tokens: int) -> Iterator[GraphEdge]:
    """Yield the ring of each phase, rank r to r + 1, and whose heads each rank goes on with."""
    for ranks in phases:
        ring = zip(ranks, (*ranks[1:], ranks[0]), strict=True) if len(ranks) > 1 else ()
        for a, b in ring:
            yield GraphEdge(source=a.name, target=b.name, kind=ALL_REDUCE)
    if len(phases) > 1:
        before, after = phases
        m, n = len(before), len(after)
        for i, a in enumerate(before):
            for j, b in enumerate(after):
                if i * n < (j + 1) * m and j * m < (i + 1) * n:
                    yield GraphEdge(source=a.name, target=b.name, kind=PHASE_SWITCH, tokens=tokens)
