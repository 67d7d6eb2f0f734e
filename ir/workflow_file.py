"""Workflows as files: JSON or YAML in, a RAGraph out, and back.

In: text. Out: a RAGraph. Code is never in a file: functions but for `Join` and `Collect`, and
choices but for `Branch`, are named there; whoever reads the file says what these names mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from dovetail.ir import workflow as wf
from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import RAGraph, make_generation
from dovetail.ir.template import (
    BranchEntry,
    CollectEntry,
    EdgeEntry,
    Entry,
    FunctionEntry,
    Functions,
    JoinEntry,
    WorkflowFile,
    describe_workflow,
)


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


# ---- reading ----


def _parse(text: str | bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        pass
    try:
        return yaml.load(text, _Loader)
    except (AttributeError, LookupError):
        raise ValueError("a tag, such as !!int, does not fit what stands behind it") from None


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
            graph.add_node(make_generation(node=name, **fields))
        case wf.Retrieval():
            graph.add_retrieval(name, **fields)
        case wf.Embedding():
            graph.add_embedding(name, **fields)
        case wf.Rerank():
            graph.add_rerank(name, **fields)
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
        known = ", ".join(sorted(functions)) or "none (code stands in a Python file of the graph)"
        raise WorkflowError(f"{where} names the function {name!r}; given are: {known}")
    return functions[name]


def _place(name: wf.Name) -> wf.Place:
    return {"START": wf.START, "END": wf.END}.get(str(name), name)
