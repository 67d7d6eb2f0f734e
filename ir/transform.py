"""Transformations of execution graphs (HedraRAG §4): each a pure function from graph to graph.

In: a graph, the name of a node, numbers. Out: a graph that computes the same, `contract` being the
measure; WorkflowError where a transformation does not fit there. A `Step` is one as a value: what
was done while serving is recorded in steps, which make the graph that ran of the plain one.

    ──>  data     ~~>  speculative: begins on what is there     ··>  looked at if there in time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import (
    CPU,
    DATA,
    FUNCTION,
    GENERATION,
    GPU,
    HISTORY,
    MERGE,
    PREFETCH,
    RETRIEVAL,
    SPECULATIVE,
    VALIDATE,
    ExecutionGraph,
    GraphEdge,
    GraphNode,
    contract,
)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One transformation: its name in STEPS, the node it is of, and what else it takes."""

    name: str
    node: str
    target: str | None = None
    numbers: tuple[int, ...] = ()


def transform(graph: ExecutionGraph, steps: Iterable[Step]) -> ExecutionGraph:
    """Return the graph after all steps, each checked to keep what is computed."""
    for step in steps:
        if step.name not in STEPS:
            raise WorkflowError(f"there is no transformation {step.name!r}")
        changed = STEPS[step.name](graph, step)
        assert contract(changed) == contract(graph), f"{step} changes what is computed"
        graph = changed
    return graph


def split_search(graph: ExecutionGraph, node: str, counts: Sequence[int]) -> ExecutionGraph:
    """Cut a search into sub-stages of so many clusters each; what is best is handed on.

    before: Q ──> R ──> G          after: Q ──> R/0 ──> R/1 ──> G
    """
    found = _need(graph, node, RETRIEVAL)
    if min(counts, default=0) < 1 or sum(counts) != len(found.clusters):
        raise WorkflowError(
            f"node {node!r}: parts of {tuple(counts)} clusters are not its {len(found.clusters)}"
        )
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    cut = [found.clusters[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return _chain(graph, found, [replace(found, clusters=clusters) for clusters in cut])


def split_reply(graph: ExecutionGraph, node: str, counts: Sequence[int]) -> ExecutionGraph:
    """Cut a generation into sub-stages of so many decode steps each, and one to its end.

    before: P ──> G ──> X          after: P ──> G/0 ──> G/1 ──> X
    """
    found = _need(graph, node, GENERATION)
    if min(counts, default=0) < 1 or found.steps is not None:
        raise WorkflowError(f"node {node!r}: it cannot be cut after {tuple(counts)} decode steps")
    return _chain(graph, found, [replace(found, steps=steps) for steps in (*counts, None)])


def reorder(graph: ExecutionGraph, node: str, clusters: Sequence[int]) -> ExecutionGraph:
    """Have a search scan its clusters in another order, as `reorder_probes` gives it.

    before: R [7 3 9 1 4]          after: R [4 3 9 7 1]
    """
    found = _need(graph, node, RETRIEVAL)
    if sorted(clusters) != sorted(found.clusters):
        raise WorkflowError(f"node {node!r}: its clusters in another order must be its clusters")
    changed = replace(found, clusters=tuple(clusters))
    nodes = [changed if old.name == node else old for old in graph.nodes]
    return ExecutionGraph(nodes, graph.edges)


def speculate_generation(graph: ExecutionGraph, at: str, target: str) -> ExecutionGraph:
    """Begin a generation on what a sub-stage of the search before it has found.

    Its text counts only if the prompt turns out to be that of the whole search; else the check
    generates anew. A generation may be begun several times.

    before: R/0 ──> R/1 ──> G ──> X          after: R/0 ──> R/1 ──────> G/check ──> X
                                                     ╰~~> G/guess/0 ──────╯
    """
    source = _need(graph, at, RETRIEVAL)
    parts = [part for part in graph.parts(target) if not part.provisional]
    if len(parts) != 1 or parts[0].kind not in (GENERATION, VALIDATE) or source.provisional:
        raise WorkflowError(f"node {target!r}: it is no generation that {at!r} could begin")
    whole, number = parts[0], len(graph.parts(target)) - len(parts)
    before = [p for p in graph.parents(whole.name) if not graph.node(p).provisional]
    last = [p for p in before if graph.node(p).root == source.root]
    if not last or last == [at]:
        raise WorkflowError(f"node {at!r}: it is no part of a search before {target!r}")
    check = GraphNode(name=f"{target}/check", kind=VALIDATE, model=whole.model, origin=target)
    guess = replace(check, name=f"{target}/guess/{number}", kind=GENERATION, provisional=True)
    inputs = [(at, SPECULATIVE) if p in last else (p, DATA) for p in before]
    edges = [GraphEdge(source=p, target=guess.name, kind=kind) for p, kind in inputs]
    edges.append(GraphEdge(source=guess.name, target=check.name))
    return _put(graph, whole, [guess, check], edges, entries=[check.name], out=check.name)


def speculate_retrieval(graph: ExecutionGraph, at: str, target: str) -> ExecutionGraph:
    """Search with what a sub-stage of a generation has written, for the search after it to use.

    What the scout finds is history, never an answer: it only says which clusters to scan first.

    before: G/0 ──> G/1 ──> R          after: G/0 ──> G/1 ──> R
                                               ╰~~> R/scout ··╯
    """
    source = _need(graph, at, GENERATION, VALIDATE)
    parts = [part for part in graph.parts(target) if not part.provisional]
    if not parts or parts[0].kind != RETRIEVAL or f"{target}/scout" in graph:
        raise WorkflowError(f"node {target!r}: it is no search that lacks a scout")
    scout = GraphNode(
        name=f"{target}/scout", kind=RETRIEVAL, model=parts[0].model, origin=target,
        provisional=True,
    )  # fmt: skip
    edges = [
        GraphEdge(source=source.name, target=scout.name, kind=SPECULATIVE),
        GraphEdge(source=scout.name, target=parts[0].name, kind=HISTORY),
    ]
    return ExecutionGraph([*graph.nodes, scout], [*graph.edges, *edges])


def split_devices(graph: ExecutionGraph, node: str, resident: Sequence[int]) -> ExecutionGraph:
    """Scan the clusters that are on the device there, and the others beside them on the CPU.

    before: Q ──> R ──> G          after: Q ──> R/cpu ──> R/merge ──> G
                                           ╰──> R/gpu ──────╯
    """
    found = _need(graph, node, RETRIEVAL)
    there = tuple(cluster for cluster in found.clusters if cluster in set(resident))
    if not there or found.device is not None:
        raise WorkflowError(f"node {node!r}: no cluster of it can be scanned elsewhere")
    here = tuple(cluster for cluster in found.clusters if cluster not in set(there))
    part = replace(found, origin=found.root)
    cpu = replace(part, name=f"{node}/cpu", clusters=here, device=CPU)
    gpu = replace(part, name=f"{node}/gpu", clusters=there, device=GPU)
    merge = replace(part, name=f"{node}/merge", kind=MERGE, clusters=())
    edges = [GraphEdge(source=side.name, target=merge.name) for side in (cpu, gpu)]
    entries = [cpu.name, gpu.name]
    return _put(graph, found, [cpu, gpu, merge], edges, entries=entries, out=merge.name)


def prefetch(graph: ExecutionGraph, node: str, clusters: Sequence[int]) -> ExecutionGraph:
    """Copy clusters to the device beside a search, which does not wait for them.

    before: Q ──> R          after: Q ──> R
                                 R/copy ··╯
    """
    found = _need(graph, node, RETRIEVAL)
    name = f"{found.root}/copy"
    if not clusters or name in graph:
        raise WorkflowError(f"node {node!r}: there is nothing more to copy beside it")
    copy = GraphNode(
        name=name, kind=FUNCTION, origin=found.root, clusters=tuple(clusters), device=GPU,
        provisional=True,
    )  # fmt: skip
    edge = GraphEdge(source=name, target=node, kind=PREFETCH)
    return ExecutionGraph([*graph.nodes, copy], [*graph.edges, edge])


def _target(step: Step) -> str:
    if step.target is None:
        raise WorkflowError(f"node {step.node!r}: {step.name} needs a target")
    return step.target


STEPS: dict[str, Callable[[ExecutionGraph, Step], ExecutionGraph]] = {
    "split_search": lambda graph, step: split_search(graph, step.node, step.numbers),
    "split_reply": lambda graph, step: split_reply(graph, step.node, step.numbers),
    "reorder": lambda graph, step: reorder(graph, step.node, step.numbers),
    "speculate_generation": lambda g, step: speculate_generation(g, step.node, _target(step)),
    "speculate_retrieval": lambda g, step: speculate_retrieval(g, step.node, _target(step)),
    "split_devices": lambda graph, step: split_devices(graph, step.node, step.numbers),
    "prefetch": lambda graph, step: prefetch(graph, step.node, step.numbers),
}
"""What each step does. Splitting comes in two: of searches and of replies."""


def _need(graph: ExecutionGraph, name: str, *kinds: str) -> GraphNode:
    """Return a node of one of some kinds; WorkflowError where there is none."""
    if name not in graph:
        raise WorkflowError(f"node {name!r} is not in the graph")
    if (node := graph.node(name)).kind not in kinds:
        raise WorkflowError(f"node {name!r} is no {kinds[0]} but a {node.kind}")
    return node


def _chain(graph: ExecutionGraph, old: GraphNode, parts: Sequence[GraphNode]) -> ExecutionGraph:
    """Put parts in a row where a node was; a single one is the node itself."""
    if len(parts) == 1:
        return graph
    named = [replace(part, name=f"{old.name}/{i}", origin=old.root) for i, part in enumerate(parts)]
    edges = [GraphEdge(source=a.name, target=b.name) for a, b in pairwise(named)]
    return _put(graph, old, named, edges, entries=[named[0].name], out=named[-1].name)


def _put(
    graph: ExecutionGraph,
    old: GraphNode,
    new: Sequence[GraphNode],
    inner: Sequence[GraphEdge],
    *,
    entries: Sequence[str],
    out: str,
) -> ExecutionGraph:
    """Return the graph with nodes in place of another: `entries` take its inputs, `out` gives."""
    nodes = [n for node in graph.nodes for n in (new if node.name == old.name else (node,))]
    edges = [
        replace(edge, source=out if edge.source == old.name else edge.source, target=target)
        for edge in graph.edges
        for target in (entries if edge.target == old.name else (edge.target,))
    ]
    return ExecutionGraph(nodes, [*edges, *inner])
