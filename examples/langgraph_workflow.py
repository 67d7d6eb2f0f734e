"""A workflow written with LangGraph, imported, and run by Dovetail.

    python examples/langgraph_workflow.py app.dove "Who founded Komosburg?"

The artifact has a model that generates, an encoder, and an index. Needs `pip install langgraph`.
"""

from __future__ import annotations

import sys
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph

import dovetail
from dovetail import bound


class State(TypedDict, total=False):
    """What nodes read and write; `input` is given."""

    input: str
    docs: list[Any]
    answer: str


def build() -> Any:
    """Return a graph that searches, then answers."""
    builder = StateGraph(State)
    builder.add_node("search", bound.retrieval(query="input", output="docs", topk=1))
    prompt = "Documents:\n{docs}\nQuestion: {input}\nAnswer:"
    builder.add_node("reply", bound.generation(prompt=prompt, output="answer", max_tokens=48))
    builder.add_edge(START, "search")
    builder.add_edge("search", "reply")
    builder.add_edge("reply", END)
    return builder.compile()


def main(artifact: str, question: str) -> None:
    """Import the graph and answer a question with it."""
    graph = dovetail.from_langgraph(build(), name="search-and-answer")
    with dovetail.load(artifact) as app:
        print(app.run(graph, {"input": question}).outputs["answer"].strip())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
