"""What `dovetail inspect` says of encoders, workflows and indexes.

In: an encoder.json, templates of workflows, manifests of indexes. Out: facts by name, and tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from dovetail.cli.inspect_plans import show_cpus
from dovetail.cli.report import make_table, show_bytes
from dovetail.ir.encoder import EncoderFile, EncoderSpec
from dovetail.ir.graph import GraphNode
from dovetail.ir.index_file import IndexManifest
from dovetail.ir.template import BranchEntry, EdgeEntry, Entry, WorkflowFile
from dovetail.runtime.flows.control.transformations import REGISTRY


def encoder_facts(file: EncoderFile) -> dict[str, str]:
    """Return an encoder's architecture and what becomes of its last rows."""
    spec = file.spec
    kind = "gated " if spec.gated else ""
    norm = "before each half" if spec.norm_first else "after each sum"
    keys = f" on {spec.decoder.n_kv_heads} of keys" if spec.decoder else ""
    return {
        "family": spec.family,
        "layers": f"{spec.n_layers} x (hidden {spec.hidden_size}, {kind}{spec.activation} of "
        f"{spec.intermediate_size}), normed {norm}",
        "attention": f"{spec.n_heads} heads of {spec.head_dim}{keys}, {_show_reach(spec)}",
        "positions": _show_positions(spec),
        "vocabulary": f"{spec.vocab_size}, {spec.token_types or 'no'} token types",
        "longest text": f"{spec.max_tokens} tokens",
        "out": _show_end(spec),
        "prompts": ", ".join(f"`{name}`" for name in spec.prompts) or "none",
        "default prompt": "none" if spec.default_prompt is None else f"`{spec.default_prompt}`",
        "dtypes": f"weights {spec.weight_dtype} (checkpoint {spec.checkpoint_dtype})",
        "tokenizer": file.tokenizer or "none in the checkpoint: texts are token ids",
    }


def _show_reach(spec: EncoderSpec) -> str:
    local = sum(spec.local_layers)
    sides, whole = ("before", "text before") if spec.causal else ("to both sides", "whole text")
    near = f"{spec.reach} tokens {sides} in {local} layers, else " if local else ""
    return f"{near}over the {whole}"


def _show_positions(spec: EncoderSpec) -> str:
    if spec.rope is None:
        learned = spec.positions == "learned"
        shown = f"{spec.n_positions} learned" if learned else spec.positions
        return f"{shown}, and biases of distances" if spec.relative else shown
    ropes = {"": spec.rope, " in local layers": spec.local_rope}
    return ", ".join(
        f"rotary, {rope.kind}, theta {rope.theta:g}{where}" for where, rope in ropes.items() if rope
    )


def _show_end(spec: EncoderSpec) -> str:
    pooled = f"{spec.pooling} of a text's rows" if spec.pooling == "mean" else f"{spec.pooling} row"
    if spec.labels:
        score = ", a score is the sigmoid" if spec.sigmoid else ""
        return f"{spec.labels} logits of the {pooled}{score}"
    dense = "".join(f", times {layer.n} x {layer.k}" for layer in spec.dense)
    return f"{spec.dim} values, {pooled}{dense}{', of length 1' if spec.unit else ''}"


SHOWN = ("kind", "name", "output")
"""Fields of a node that have columns of their own, or need none."""


def workflow_table(file: WorkflowFile, places: Mapping[str, Sequence[GraphNode]]) -> Table:
    """Return the nodes of a workflow: what they do and write, where, and what runs after them."""
    inputs = ", ".join(file.inputs)
    title = f"workflow {file.name} of {inputs}, each node {file.max_steps} times at most"
    rows = [("START", "", "", "", "", _show_edges(file, "START"))]
    for node in file.nodes:
        kind, what = node.__struct_config__.tag, "\n".join(_show_fields(node))
        there = [(each.name, each.place.cpus) for each in places[str(node.name)] if each.place]
        where = "\n".join(f"{name} on PUs {show_cpus(cpus)}" for name, cpus in there)
        row = (str(node.name), str(kind), what, node.output, where, _show_edges(file, node.name))
        rows.append(row)
    return make_table(title, ("node", "kind", "what", "writes", "runs as", "leads to"), rows)


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
