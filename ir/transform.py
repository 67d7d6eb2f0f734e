"""Rewrites of live graphs in place (HedraRAG §4): what transformations are made of.

In: a graph, one of its nodes, numbers. Out: the graph computes the same, `contract` of a picture
being the measure; WorkflowError where a rewrite does not fit there. Which one pays is decided by
transformations (`runtime/flows/control/transformations.py`).

    ──>  data     ~~>  speculative: begins on what is there     ··>  looked at if there in time
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

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
    Placement,
)
from dovetail.ir.live_graph import CHECK, COPY, GUESS, SCOUT, LiveGraph, LiveNode, State


def split_search(graph: LiveGraph, node: LiveNode, count: int) -> LiveNode:
    """Cut a search after so many clusters, and return the rest; what is best is handed on.

    before: Q ──> R ──> G          after: Q ──> R/0 ──> R/1 ──> G
    """
    _need(graph, node, RETRIEVAL)
    if not 0 < count < len(node.clusters):
        raise WorkflowError(
            f"node {node.name!r}: it cannot be cut after {count} of {len(node.clusters)} clusters"
        )
    rest = _cut(graph, node)
    node.clusters, rest.clusters = node.clusters[:count], node.clusters[count:]
    return rest


def split_reply(graph: LiveGraph, node: LiveNode, steps: int) -> LiveNode:
    """Cut a generation that has got so far after so many decode steps, and return the rest.

    before: P ──> G ──> X          after: P ──> G/0 ──> G/1 ──> X
    """
    _need(graph, node, GENERATION, state=State.RUNNING)
    if steps < 1:
        raise WorkflowError(f"node {node.name!r}: it cannot be cut after {steps} decode steps")
    rest = _cut(graph, node)
    node.steps = steps
    graph.finish(node)
    graph.begin(rest)
    return rest


def stop(graph: LiveGraph, node: LiveNode) -> None:
    """Leave the rest of a search out: what it would have found changes nothing.

    before: R/0 ──> R/1 ──> G          after: R/0 ──> G
    """
    _need(graph, node, RETRIEVAL)
    found = [source for source, _ in graph.before(node) if source.root == node.root]
    if not node.stage or not found:
        raise WorkflowError(f"node {node.name!r}: it is not the rest of a search")
    if (rest := graph.rest(node)) is not None:
        stop(graph, rest)
    graph.move(node, found[0])
    graph.remove(node)


def reorder(graph: LiveGraph, node: LiveNode, clusters: Sequence[int]) -> None:
    """Have a search scan its clusters in another order, as `reorder_probes` gives it.

    before: R [7 3 9 1 4]          after: R [4 7 3 9 1]
    """
    _need(graph, node, RETRIEVAL)
    if sorted(clusters) != sorted(node.clusters):
        raise WorkflowError(f"node {node.name!r}: its clusters in another order must be the same")
    node.clusters = tuple(clusters)


def speculate_generation(
    graph: LiveGraph, at: LiveNode | None, target: LiveNode, work: Any = None
) -> LiveNode:
    """Begin a generation on what a sub-stage of the search before it has found; return the guess.

    Its text counts only if the prompt turns out to be that of the whole search; else it is rolled
    back, and the generation is what it was. Without a sub-stage it begins on the search's history.

    before: R/0 ──> R/1 ──> G ──> X          after: R/0 ──> R/1 ──> G/check ──> X
                                                     ╰~~> G/guess ───╯
    """
    _need(graph, target, GENERATION)
    if at and (at not in graph or at.kind not in (RETRIEVAL, MERGE) or at.provisional):
        raise WorkflowError(f"node {at.name!r} is not part of a search")
    guess = replace(target, part=GUESS, work=work, waits=0)
    before = [node for node, _ in graph.before(target)]
    known = [n for n in before if (n.root != at.root if at else n.state is State.OVER)]
    graph.add(guess, [*([(at, SPECULATIVE)] if at else ()), *((node, DATA) for node in known)])
    target.kind, target.part = VALIDATE, CHECK
    graph.link(guess, target)
    return guess


def roll_back(graph: LiveGraph, guess: LiveNode) -> None:
    """Take out a guess and its parts: nobody has seen anything of it."""
    if not guess.provisional:
        raise WorkflowError(f"node {guess.name!r} is not provisional")
    parts = [node for node in graph if node.root == guess.root and node.part == guess.part]
    checks = {n for part in parts for n, _ in graph.after(part) if n.part == CHECK}
    for part in parts:
        graph.remove(part)
        part.work = None  # which knows its node and the graph
    for check in checks:
        check.kind, check.part = GENERATION, ""


def speculate_retrieval(graph: LiveGraph, at: LiveNode, work: Any = None) -> LiveNode:
    """Search with what a sub-stage of a generation has written; return the scout.

    What the scout finds is history, never an answer: it only says which clusters a later search
    scans first. `use_scout` draws the edge to that search once it has come.

    before: G/0 ──> G/1 ──> R          after: G/0 ──> G/1 ──> R
                                               ╰~~> G/scout ··╯
    """
    if at not in graph or at.kind != GENERATION:
        raise WorkflowError(f"node {at.name!r} is not part of a generation")
    return graph.add(LiveNode(at.root, RETRIEVAL, part=SCOUT, work=work), [(at, SPECULATIVE)])


def use_scout(graph: LiveGraph, scout: LiveNode, target: LiveNode) -> None:
    """Have a search look where a scout, of which this is the last part, found something."""
    _need(graph, target, RETRIEVAL)
    graph.link(scout, target, HISTORY)


def put(
    graph: LiveGraph, node: LiveNode, device: str, clusters: Collection[int] | None = None
) -> LiveNode:
    """Have a node run on a device, or of a search these of its clusters, beside the others.

    What both devices find is merged. Return the part that others wait for.

    before: Q ──> R ──> G          after: Q ──> R/cpu ──> R/merge ──> G
                                           ╰──> R/gpu ──────╯
    """
    wanted = node.clusters if clusters is None else clusters
    _need(graph, node, node.kind if clusters is None else RETRIEVAL, state=node.state)
    there = tuple(cluster for cluster in node.clusters if cluster in wanted)
    here = tuple(cluster for cluster in node.clusters if cluster not in wanted)
    if not here:
        node.place = _on(node, device)
        return node
    if not there or node.side or node.state is not State.WAITING:
        raise WorkflowError(f"node {node.name!r}: its clusters cannot be shared with {device}")
    before, other = graph.before(node), CPU if device == GPU else GPU
    sides = ((other, here), (device, there))
    parts = [
        graph.add(replace(node, side=on, place=_on(node, on), clusters=some, waits=0), before)
        for on, some in sorted(sides)
    ]
    merge = replace(node, kind=MERGE, side="merge", clusters=(), waits=0)
    graph.add(merge, [(part, DATA) for part in parts])
    graph.move(node, merge)
    graph.remove(node)
    return merge


def prefetch(
    graph: LiveGraph, node: LiveNode, clusters: Sequence[int], work: Any = None
) -> LiveNode:
    """Copy clusters to the device beside a search, which does not wait for them; return the copy.

    before: Q ──> R          after: Q ──> R
                                 R/copy ··╯
    """
    _need(graph, node, RETRIEVAL)
    if not clusters or any(n.part == COPY and n.root == node.root for n in graph):
        raise WorkflowError(f"node {node.name!r}: there is nothing more to copy beside it")
    copy = LiveNode(node.root, FUNCTION, part=COPY, clusters=tuple(clusters), work=work)
    copy.place = _on(copy, GPU)
    graph.add(copy)
    graph.link(copy, node, PREFETCH)
    return copy


def _need(graph: LiveGraph, node: LiveNode, kind: str, *, state: State = State.WAITING) -> None:
    """Raise WorkflowError where a node is not of a kind or not in a state, or not in the graph."""
    if node not in graph:
        raise WorkflowError(f"node {node.name!r} is not in the graph")
    if node.kind != kind:
        raise WorkflowError(f"node {node.name!r} is no {kind} but a {node.kind}")
    if node.state is not state:
        raise WorkflowError(f"node {node.name!r} is {node.state.value}, and must be {state.value}")


def _on(node: LiveNode, device: str) -> Placement:
    """Return where a node runs that is put on a device; on the CPU it stays on its cores."""
    place = node.place or Placement()
    return replace(place, device=device, cpus=place.cpus if device == CPU else ())


def _cut(graph: LiveGraph, node: LiveNode) -> LiveNode:
    """Put a second part behind a node, which is the first one then; return the second."""
    node.stage = node.stage or 0
    if graph.rest(node) is not None:  # it was cut before
        for other in graph:
            if (other.root, other.part) == (node.root, node.part):
                other.stage = (other.stage or 0) + ((other.stage or 0) > node.stage)
    rest = replace(node, stage=node.stage + 1, state=State.WAITING, waits=0, steps=None)
    graph.add(rest)
    graph.move(node, rest)
    graph.link(node, rest)
    return rest
