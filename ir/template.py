"""Workflows as data: what a file holds of one, and the execution graph that it is lowered into.

In: a Workflow. Out: a `WorkflowFile`; its template, an ExecutionGraph with a node for each end and
each choice, from which a request takes its nodes as it comes to them; and the file again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from dovetail.ir import workflow as wf
from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import (
    CHOICE,
    DATA,
    ELSE,
    END,
    FUNCTION,
    MAY,
    START,
    THEN,
    ExecutionGraph,
    GraphEdge,
    GraphNode,
)

MAX_STEPS = 25
"""How often one node may run for one request unless the graph says otherwise."""
WHOLE = ("join", "collect")
"""Functions that a file holds whole."""
Functions = Mapping[str, Callable[..., Any]]


class FunctionEntry(wf.StoredNode, tag="function", kw_only=True, frozen=True):
    """A function node; `function` is a name that the reader of the file explains."""

    function: str
    output: str


class JoinEntry(wf.StoredNode, tag="join", kw_only=True, frozen=True):
    """A function node that joins the texts at `names`."""

    names: tuple[str, ...]
    output: str


class CollectEntry(wf.StoredNode, tag="collect", kw_only=True, frozen=True):
    """A function node that adds the text at `text` to the list that it writes."""

    text: str
    output: str


class BranchEntry(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={"key": "if", "otherwise": "else"},
):
    """`{if: name, then: 1, else: END}`; see `Branch`."""

    key: str
    then: wf.Name
    otherwise: wf.Name = "END"
    empty: tuple[str, ...] = ()
    most: dict[str, int] = {}


class EdgeEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An edge; `to` is a node, a branch, or None where `choose` names a function."""

    source: wf.Name = msgspec.field(name="from")
    to: wf.Name | BranchEntry | None = None
    choose: str | None = None
    targets: tuple[wf.Name, ...] | None = None


Entry = (
    wf.Generation
    | wf.Retrieval
    | wf.Embedding
    | wf.Rerank
    | FunctionEntry
    | JoinEntry
    | CollectEntry
)


class WorkflowFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow as text has it. START and END stand for the two ends."""

    schema: int = 1
    name: str
    inputs: tuple[str, ...] = ("input",)
    max_steps: int = MAX_STEPS
    nodes: tuple[Entry, ...]
    edges: tuple[EdgeEntry, ...]


# ---- a workflow as a file has it ----


def find_functions(workflow: wf.Workflow) -> dict[str, Callable[..., Any]]:
    """Return the functions and choices of a workflow that are code, each under a name of its own.

    It is their own name, with a number where several have it.
    """
    nodes = [node.function for node in workflow.nodes.values() if isinstance(node, wf.Function)]
    edges = [edge.choose for edges in workflow.edges.values() for edge in edges if edge.choose]
    found: dict[str, Callable[..., Any]] = {}
    for function in (
        f for f in (*nodes, *edges) if not isinstance(f, wf.Join | wf.Collect | wf.Branch)
    ):
        if any(function is known for known in found.values()):
            continue
        name = getattr(function, "__qualname__", type(function).__qualname__)
        same = sum(known.partition(" ")[0] == name for known in found)
        found[f"{name} {same + 1}" if same else name] = function
    return found


def describe_workflow(workflow: wf.Workflow, functions: Functions | None = None) -> WorkflowFile:
    """Return what a file has of a workflow; WorkflowError for a function not in `functions`."""
    named = functions or {}
    return WorkflowFile(
        name=workflow.name,
        inputs=workflow.inputs,
        max_steps=workflow.max_steps,
        nodes=tuple(_entry(node, named) for node in workflow.nodes.values()),
        edges=tuple(_edge(edge, named) for edges in workflow.edges.values() for edge in edges),
    )


def _entry(node: wf.Node, functions: Functions) -> Entry:
    match node:
        case wf.Generation() | wf.Retrieval() | wf.Embedding() | wf.Rerank():
            return node
        case wf.Function(function=wf.Join() as join):
            return JoinEntry(node.name, names=join.names, output=node.output)
        case wf.Function(function=wf.Collect() as collect):
            return CollectEntry(node.name, text=collect.name, output=node.output)
        case wf.Function():
            called = _name_of(node.function, f"node {node.name!r}", functions)
            return FunctionEntry(node.name, function=called, output=node.output)


def _edge(edge: wf.Edge, functions: Functions) -> EdgeEntry:
    source = _text(edge.source)
    targets = None if edge.targets is None else tuple(map(_text, edge.targets))
    if edge.target is not None:
        return EdgeEntry(source, to=_text(edge.target))
    if isinstance(edge.choose, wf.Branch):
        branch, most = edge.choose, dict(edge.choose.most)
        ways = _text(branch.then), _text(branch.otherwise)
        return EdgeEntry(source, to=BranchEntry(branch.key, *ways, branch.empty, most))
    assert edge.choose is not None
    called = _name_of(edge.choose, f"the edge from {edge.source!r}", functions)
    return EdgeEntry(source, choose=called, targets=targets)


def _name_of(function: Callable[..., Any], where: str, functions: Functions) -> str:
    for name, known in functions.items():
        if known is function:
            return name
    raise WorkflowError(f"{where} has a function that no name was given for; pass it in functions")


def _text(place: wf.Place) -> wf.Name:
    return place.value if isinstance(place, wf.Terminal) else place


# ---- a file as an execution graph ----


def lower(workflow: wf.Workflow, *, strict: bool = False) -> ExecutionGraph:
    """Return the template of a workflow; functions that are code have their names in it.

    Raises WorkflowError where `strict` and a node has values that no file can hold.
    """
    file = describe_workflow(workflow, find_functions(workflow))
    nodes = [GraphNode(name="START", kind=START)]
    for entry in file.nodes:
        try:
            work = msgspec.json.decode(msgspec.json.encode(entry, enc_hook=None if strict else str))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise WorkflowError(f"node {entry.name!r} has what no file can hold: {error}") from None
        kind, name, model = work.pop("kind"), wf.label(work.pop("name")), work.pop("model", None)
        if kind in WHOLE:
            kind, work = FUNCTION, {"kind": kind, **work}
        nodes.append(GraphNode(name=name, kind=kind, model=model, work=work))
    nodes.append(GraphNode(name="END", kind=END))
    names = [node.name for node in nodes[1:]]
    edges, choices = dict[GraphEdge, None](), Counter[str]()
    for edge in file.edges:
        source = wf.label(edge.source)
        if isinstance(edge.to, wf.Name):
            edges[GraphEdge(source=source, target=wf.label(edge.to))] = None
            continue
        choices[source] += 1
        choice = f"{source}?" + (str(choices[source]) if choices[source] > 1 else "")
        while any(node.name == choice for node in nodes):
            choice += "?"
        edges[GraphEdge(source=source, target=choice)] = None
        work, ways = _choice(edge, names)
        nodes.append(GraphNode(name=choice, kind=CHOICE, work=work))
        edges |= {GraphEdge(source=choice, target=to, kind=kind): None for to, kind in ways.items()}
    limits = {"inputs": file.inputs, "max_steps": file.max_steps}
    return ExecutionGraph(nodes, edges, name=file.name, **limits)


def _choice(edge: EdgeEntry, names: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a choice is made by, and where it may lead by which kind of edge."""
    if isinstance(edge.to, BranchEntry):
        work = msgspec.to_builtins(edge.to)
        then, otherwise = wf.label(work.pop("then")), wf.label(work.pop("else", "END"))
        return work, {otherwise: ELSE} | {then: THEN}
    if edge.targets is None:
        return {"choose": edge.choose, "anywhere": True}, dict.fromkeys(names, MAY)
    return {"choose": edge.choose}, {wf.label(name): MAY for name in edge.targets}


def raise_file(graph: ExecutionGraph) -> WorkflowFile:
    """Return the workflow that a template was lowered from.

    Raises WorkflowError where it is no template.
    """
    nodes = (node for node in graph.nodes if node.kind not in (START, CHOICE, END))
    file = graph.file
    try:
        return WorkflowFile(
            name=file.name,
            inputs=file.inputs,
            max_steps=file.max_steps,
            nodes=tuple(map(_entry_of, nodes)),
            edges=tuple(_edges_of(graph)),
        )
    except (msgspec.ValidationError, KeyError) as error:
        raise WorkflowError(f"{file.name!r} is no template of a workflow: {error}") from None


def _entry_of(node: GraphNode) -> Entry:
    model = {} if node.model is None else {"model": node.model}
    work = {"kind": node.kind, "name": _name_in(node.name), **model, **node.work}
    found: Entry = msgspec.convert(work, Entry)
    return found


def _edges_of(graph: ExecutionGraph) -> Iterator[EdgeEntry]:
    for edge in graph.edges:
        if edge.kind != DATA:
            continue
        source, target = _name_in(edge.source), graph.node(edge.target)
        ways = [(e.kind, _name_in(e.target)) for e in graph.edges if e.source == edge.target]
        if target.kind != CHOICE:
            yield EdgeEntry(source, to=_name_in(edge.target))
        elif "choose" in target.work:
            anywhere = target.work.get("anywhere", False)
            targets = None if anywhere else tuple(name for _, name in ways)
            yield EdgeEntry(source, choose=target.work["choose"], targets=targets)
        else:
            to = dict(ways)
            ends = {"then": to[THEN], "else": to.get(ELSE, to[THEN])}
            yield EdgeEntry(source, to=msgspec.convert({**target.work, **ends}, BranchEntry))


def _name_in(text: str) -> wf.Name:
    """Return the name that a label is of."""
    if _is_number(text):
        return int(text)
    return text[1:-1] if text[:1] == "'" and _is_number(text[1:-1]) else text


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdigit()
