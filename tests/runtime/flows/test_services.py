"""What nodes call: arguments, results, and errors that name the node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dovetail.ir.errors import RequestError, WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Embedding, Generation, Rerank, Retrieval, State
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import run_in_order
from dovetail.runtime.index.documents import Document


class Echo:
    """Says what it was asked."""

    def generate(self, prompt: str, node: Generation) -> str:
        if prompt == "fail":
            raise RequestError("the prompt is too long")
        return f"<{prompt}|{dict(node.options)}>"

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> Sequence[Document]:
        return tuple(Document(id=i, text=str(query), title="T" * i) for i in range(node.topk))

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        return np.array([len(text)], np.float32)

    def rerank(self, query: str, documents: Any, node: Rerank) -> Sequence[Document]:
        return tuple(reversed(documents))[: node.topk]


def run(graph: RAGraph, given: object) -> dict[str, object]:
    return run_in_order(graph.workflow(), {"input": given}, lambda call: perform(call, Echo()))


def chain(graph: RAGraph, *names: str) -> RAGraph:
    for source, target in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(source, target)
    return graph


def test_each_kind_of_node_calls_its_service() -> None:
    g = RAGraph()
    g.add_embedding("embed", text="input", output="vector")
    g.add_retrieval("search", query="vector", output="docs", topk=2)
    g.add_rerank("rank", query="input", documents="docs", output="best", topk=1)
    g.add_function("count", lambda state: len(state["docs"]), "n")
    g.add_generation("say", prompt="{n}:\n{best}", output="answer", max_tokens=3)
    result = run(chain(g, "embed", "search", "rank", "count", "say"), "abc")
    assert result["vector"].tolist() == [3.0] and result["n"] == 2  # type: ignore[attr-defined]
    assert result["answer"] == "<2:\n- T: [3.]|{'max_tokens': 3}>"


@pytest.mark.parametrize("text", [7, [], ["one", "two"], [1, "two"], np.float32(0.5), np.str_("a")])
def test_a_query_that_is_no_vector_is_read_as_text(text: object) -> None:
    g = RAGraph()
    g.add_retrieval("search", query="input", output="docs", topk=1)
    assert run(chain(g, "search"), text)["docs"] == [Document(id=0, text=str(text))]


@pytest.mark.parametrize("vector", [np.array([0.5, 2.0]), [0.5, 2], (np.float32(0.5), np.int64(2))])
def test_a_query_of_numbers_is_a_vector(vector: object) -> None:
    g = RAGraph()
    g.add_retrieval("search", query="input", output="docs", topk=1)
    assert run(chain(g, "search"), vector)["docs"] == [Document(id=0, text="[0.5 2. ]")]


def _divide(state: State) -> float:
    return 1 / 0


def test_a_failure_names_its_node() -> None:
    g = RAGraph()
    g.add_generation("say", prompt="{input}")
    with pytest.raises(WorkflowError, match="node 'say' failed: the prompt is too long"):
        run(chain(g, "say"), "fail")
    g = RAGraph()
    g.add_function("divide", _divide, "x")
    with pytest.raises(WorkflowError, match="node 'divide' failed: ZeroDivisionError: division"):
        run(chain(g, "divide"), 0)
