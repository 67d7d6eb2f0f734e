"""Workflows as files: JSON or YAML in, a RAGraph out, and back.

In: text. Out: a RAGraph. Code is never in a file: functions but for `Join` and `Collect`, and
choices but for `Branch`, are named there; whoever reads the file says what these names mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from dovetail.ir import workflow as wf
from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import MAX_STEPS, RAGraph

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


Entry = wf.Generation | wf.Retrieval | wf.Embedding | FunctionEntry | JoinEntry | CollectEntry


class WorkflowFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow as text has it. START and END stand for the two ends."""

    schema: int = 1
    name: str
    inputs: tuple[str, ...] = ("input",)
    max_steps: int = MAX_STEPS
    nodes: tuple[Entry, ...]
    edges: tuple[EdgeEntry, ...]


def read_workflow(text: str | bytes, functions: Functions | None = None) -> RAGraph:
    """Return the graph that JSON or YAML describes.

    Args:
        text: what `write_json` or `write_yaml` gave, or what a person wrote.
        functions: what the names of functions and choices in it mean.

    Raises:
        WorkflowError: it is no such text, or names a function that is not given.
    """
    try:
        file = msgspec.convert(_parse(text), WorkflowFile)
    except (yaml.YAMLError, msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WorkflowError(f"this is no workflow: {error}") from None
    return make_graph(file, functions)


def make_graph(file: WorkflowFile, functions: Functions | None = None) -> RAGraph:
    """Return the graph of a file that has been decoded; raises as `read_workflow`."""
    named = functions or {}
    graph = RAGraph(file.name, inputs=file.inputs, max_steps=file.max_steps)
    for entry in file.nodes:
        _add(graph, entry, named)
    for edge in file.edges:
        _connect(graph, edge, named)
    return graph


def write_json(workflow: wf.Workflow, functions: Functions | None = None) -> bytes:
    """Return the workflow as JSON; WorkflowError where it has a function not in `functions`."""
    return msgspec.json.format(msgspec.json.encode(describe_workflow(workflow, functions)))


def write_yaml(workflow: wf.Workflow, functions: Functions | None = None) -> bytes:
    """Return the workflow as YAML; WorkflowError where it has a function not in `functions`."""
    return msgspec.yaml.encode(describe_workflow(workflow, functions))


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


# ---- reading ----


def _parse(text: str | bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's plain values without aliases, which make a short text large.

    In Python: the parser in C overflows the stack on deeply nested text.
    """

    def compose_node(self, parent: object, index: object) -> object:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read; write the value out")
        return super().compose_node(parent, index)


def _add(graph: RAGraph, entry: Entry, functions: Functions) -> None:
    fields = msgspec.structs.asdict(entry)
    name = fields.pop("name")
    match entry:
        case wf.Generation():
            graph.add_generation(name, **{**fields.pop("options"), **fields})
        case wf.Retrieval():
            graph.add_retrieval(name, **fields)
        case wf.Embedding():
            graph.add_embedding(name, **fields)
        case FunctionEntry():
            function = _function(entry.function, f"node {name!r}", functions)
            graph.add_function(name, function, entry.output)
        case JoinEntry():
            graph.add_function(name, wf.Join(entry.names), entry.output)
        case CollectEntry():
            graph.add_function(name, wf.Collect(entry.text, entry.output), entry.output)


def _connect(graph: RAGraph, edge: EdgeEntry, functions: Functions) -> None:
    source = _place(edge.source)
    targets = None if edge.targets is None else [_place(name) for name in edge.targets]
    if edge.choose is not None and edge.to is None:
        choice = _function(edge.choose, f"the edge from {source!r}", functions)
        graph.add_edge(source, choice, targets)
    elif isinstance(edge.to, BranchEntry):
        to, then, otherwise = edge.to, _place(edge.to.then), _place(edge.to.otherwise)
        branch = wf.Branch(to.key, then, otherwise, to.empty, to.most)
        graph.add_edge(source, branch, [then, otherwise])
    elif edge.to is not None and edge.choose is None:
        graph.add_edge(source, _place(edge.to), targets)
    else:
        raise WorkflowError(f"the edge from {source!r} needs either `to` or `choose`")


def _function(name: str, where: str, functions: Functions) -> Callable[..., Any]:
    if name not in functions:
        known = ", ".join(sorted(functions)) or "none"
        raise WorkflowError(f"{where} names the function {name!r}; given are: {known}")
    return functions[name]


def _place(name: wf.Name) -> wf.Place:
    return {"START": wf.START, "END": wf.END}.get(str(name), name)


# ---- writing ----


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
        case wf.Generation() | wf.Retrieval() | wf.Embedding():
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
    targets = None if edge.targets is None else _texts(edge.targets)
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


def _texts(places: Iterable[wf.Place]) -> tuple[wf.Name, ...]:
    return tuple(_text(place) for place in places)
