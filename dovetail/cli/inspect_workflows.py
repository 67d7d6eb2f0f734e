"""Workflows and indexes of an artifact, as `dovetail inspect` prints them.

In: templates of workflows, manifests of indexes. Out: a table of nodes, and facts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from rich.table import Table

from dovetail.cli.report import make_table, show_bytes
from dovetail.ir.index_file import IndexManifest
from dovetail.ir.template import BranchEntry, EdgeEntry, Entry, WorkflowFile
from dovetail.runtime.flows.control.transformations import REGISTRY

SHOWN = ("kind", "name", "output")
"""Fields of a node that have columns of their own, or need none."""


def workflow_table(file: WorkflowFile) -> Table:
    """Return the nodes of a workflow: what they do and write, and what runs after them."""
    inputs = ", ".join(file.inputs)
    title = f"workflow {file.name} of {inputs}, each node {file.max_steps} times at most"
    rows = [("START", "", "", "", _show_edges(file, "START"))]
    for node in file.nodes:
        kind, what = node.__struct_config__.tag, "\n".join(_show_fields(node))
        rows.append((str(node.name), str(kind), what, node.output, _show_edges(file, node.name)))
    return make_table(title, ("node", "kind", "what", "writes", "leads to"), rows)


def transformation_table() -> Table:
    """Return how graphs of requests may be rewritten, in the order in which it is tried."""
    said = {name: inspect.getdoc(kind) or "" for name, kind in REGISTRY.items()}
    rows = [(name, text.partition("\n")[0]) for name, text in said.items()]
    return make_table("transformations of running workflows", ("name", "what"), rows)


def describe_index(manifest: IndexManifest) -> dict[str, str]:
    """Return what there is to say of an index."""
    size = sum(entry.bytes for entry in manifest.files.values())
    embedder = manifest.embedder
    return {
        "documents": f"{manifest.documents}, {show_bytes(size)}",
        "vectors": f"{manifest.dim} values each, {manifest.codes}, {manifest.metric}",
        "clusters": str(manifest.clusters),
        "embedder": embedder.name if embedder else "not told",
    }


def _show_fields(node: Entry) -> Iterator[str]:
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if name not in SHOWN and value not in (None, {}):
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield f"{name}: {shown}"


def _show_edges(file: WorkflowFile, source: int | str) -> str:
    return "\n".join(_show_edge(edge) for edge in file.edges if edge.source == source)


def _show_edge(edge: EdgeEntry) -> str:
    if isinstance(edge.to, BranchEntry):
        to = edge.to
        limits = "".join(f" and {name} has fewer than {most}" for name, most in to.most.items())
        return f"{to.then} if {to.key}{limits}, else {to.otherwise}"
    if edge.choose is None:
        return str(edge.to)
    ways = "anywhere" if edge.targets is None else " or ".join(map(str, edge.targets))
    return f"{ways}, as {edge.choose} says"
