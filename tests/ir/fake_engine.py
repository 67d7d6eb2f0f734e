"""What nodes of an execution graph give on an engine and an index in which all follows by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dovetail.ir.graph import (
    FUNCTION,
    GENERATION,
    MERGE,
    RETRIEVAL,
    SPECULATIVE,
    VALIDATE,
    ExecutionGraph,
    GraphNode,
)

TOPK = 3
Inputs: TypeAlias = Mapping[str, Any]
"""What came in, by the node of the plain graph that it is of."""


def drawn(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def outputs(graph: ExecutionGraph) -> dict[str, Any]:
    """Run all nodes, and return what those of the plain graph give."""
    values: dict[str, Any] = {}
    for name in graph.ordered():
        node = graph.node(name)
        parents = [*graph.parents(name), *graph.parents(name, SPECULATIVE)]
        inputs: dict[str, Any] = {}
        carried, guesses = [], []
        for parent in parents:
            source = graph.node(parent)
            if source.provisional and node.kind == VALIDATE:
                guesses.append(values[parent])
            elif source.root == node.root:
                carried.append(values[parent])
            else:
                inputs[source.root] = shown(source, values[parent])
        values[name] = RUN[node.kind](node, inputs, carried, guesses)
    real = [node for node in map(graph.node, graph.ordered()) if not node.provisional]
    return {node.root: shown(node, values[node.name]) for node in real}  # the last part of each


def shown(node: GraphNode, value: Any) -> Any:
    """Return what others see of a value."""
    return value[1]


def search(node: GraphNode, inputs: Inputs, carried: list[Any], guesses: list[Any]) -> Any:
    """Return the query and the best documents of what was handed on and of the node's clusters."""
    query = carried[0][0] if carried else tuple(sorted(inputs.items()))
    found = [hit for _, hits in carried for hit in hits]
    for cluster in node.clusters:
        found += [(drawn(query, cluster, i) % 1000, (cluster, i)) for i in range(cluster % 4)]
    return query, tuple(sorted(set(found))[:TOPK])


def reply(node: GraphNode, inputs: Inputs, carried: list[Any], guesses: list[Any]) -> Any:
    """Return the prompt and what is written after the node's decode steps."""
    prompt, text = carried[0] if carried else (tuple(sorted(inputs.items())), ())
    length = 1 + drawn(prompt, "length") % 9
    end = length if node.steps is None else min(length, len(text) + node.steps)
    return prompt, (*text, *(drawn(prompt, i) % 100 for i in range(len(text), end)))


def check(node: GraphNode, inputs: Inputs, carried: list[Any], guesses: list[Any]) -> Any:
    """Return the guess that was made of the true prompt, or a reply to that."""
    true = tuple(sorted(inputs.items()))
    held = [value for value in guesses if value[0] == true]
    return held[0] if held else reply(node, inputs, [], [])


def call(node: GraphNode, inputs: Inputs, carried: list[Any], guesses: list[Any]) -> Any:
    return None, drawn(node.root, tuple(sorted(inputs.items())))


RUN: dict[str, Callable[[GraphNode, Inputs, list[Any], list[Any]], Any]] = {
    RETRIEVAL: search,
    MERGE: search,
    GENERATION: reply,
    VALIDATE: check,
    FUNCTION: call,
    "embedding": call,
}
