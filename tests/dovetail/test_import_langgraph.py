"""Graphs of LangGraph itself: run there, imported and run here, with the same outcome."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

import pytest

import dovetail
from dovetail import bound
from dovetail.import_langgraph import from_langgraph
from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import run_in_order
from tests.dovetail.echo import Echo
from tests.processes import printed_with_seeds

graphs = pytest.importorskip("langgraph.graph")
START, END = graphs.START, graphs.END
ECHO = Echo()


class State(TypedDict, total=False):
    input: str
    query: str
    docs: list[Any]
    other: list[Any]
    many: list[Any]
    reply: str
    rounds: int
    answer: str


class Gathering(State):
    gathered: Annotated[list[str], operator.add]


class Asked(TypedDict):
    input: str


def start() -> Any:
    return graphs.StateGraph(State, input_schema=Asked)


def one_shot() -> Any:
    builder = start()
    builder.add_node("find", bound.retrieval(query="input", output="docs", topk=2, services=ECHO))
    prompt = "{docs} {input}"
    builder.add_node("say", bound.generation(prompt=prompt, services=ECHO, max_tokens=7))
    builder.add_edge(START, "find")
    builder.add_edge("find", "say")
    builder.add_edge("say", END)
    return builder


def test_a_bound_generation_takes_messages_as_a_graph_does() -> None:
    builder = start()
    prompt = [{"role": "user", "content": "{input}?"}]
    builder.add_node("say", bound.generation(prompt=prompt, max_tokens=7))
    builder.add_edge(START, "say")
    builder.add_edge("say", END)
    ours = RAGraph("ours")
    ours.add_generation("say", prompt=prompt, max_tokens=7)
    imported = from_langgraph(builder.compile()).workflow().nodes["say"]
    assert imported == ours._nodes["say"]


ENDS = """
from typing import TypedDict
from langgraph.graph import START, StateGraph
from dovetail import bound
from dovetail.import_langgraph import from_langgraph

builder = StateGraph(TypedDict("State", {"input": str, **dict.fromkeys("abcdef", str)}))
for name in "abcdef":
    builder.add_node(f"write {name}", bound.function(lambda state: "", name))
    builder.add_edge(START, f"write {name}")
print([edge.source for edge in from_langgraph(builder.compile()).workflow().template.edges])
"""


def test_a_template_does_not_depend_on_the_order_of_a_set() -> None:
    """Which is another in each process; an artifact's is compared with the file's at each load."""
    found = printed_with_seeds(ENDS)
    assert len(found) == 1 and b"write f" in found.pop()


def looped() -> Any:
    """Search and read until there were three rounds, then answer."""
    builder = start()
    count = bound.function(lambda state: state.get("rounds", 0) + 1, "rounds")
    query = bound.function(lambda state: f"{state['input']} {state.get('reply', '')}", "query")
    builder.add_node("count", count)
    builder.add_node("ask", query)
    builder.add_node("find", bound.retrieval(query="query", output="docs", services=ECHO))
    builder.add_node("read", bound.generation(prompt="{docs}", output="reply", services=ECHO))
    builder.add_node("say", bound.generation(prompt="{reply}", services=ECHO))
    builder.add_edge(START, "count")
    builder.add_edge("count", "ask")
    builder.add_edge("ask", "find")
    builder.add_edge("find", "read")
    builder.add_conditional_edges(
        "read", lambda state: state["rounds"] < 3, {True: "count", False: "say"}
    )
    builder.add_edge("say", END)
    return builder


def forked() -> Any:
    """Two searches side by side, both awaited by the answer."""
    builder = start()
    builder.add_node("left", bound.retrieval(query="input", output="docs", topk=1, services=ECHO))
    builder.add_node("right", bound.retrieval(query="input", output="many", services=ECHO))
    asked = {"query": "input", "documents": "many", "output": "other"}
    builder.add_node("best", bound.rerank(**asked, topk=2, services=ECHO))
    builder.add_node("say", bound.generation(prompt="{docs} {other}", services=ECHO))
    builder.add_edge(START, "left")
    builder.add_edge(START, "right")
    builder.add_edge("right", "best")
    builder.add_edge(["left", "best"], "say")
    builder.add_edge("say", END)
    return builder


def routed() -> Any:
    """A choice out of START, to a node or to the end."""
    builder = start()
    builder.add_node("say", bound.generation(prompt="{input}", services=ECHO))
    builder.add_conditional_edges(
        START, lambda state: "say" if state["input"] else END, ["say", END]
    )
    builder.add_edge("say", END)
    return builder


def run(graph: RAGraph, text: str) -> dict[str, Any]:
    return run_in_order(graph.workflow(), {"input": text}, lambda call: perform(call, ECHO))


@pytest.mark.parametrize("build", [one_shot, looped, forked, routed])
@pytest.mark.parametrize("text", ["What is it?", ""])
def test_an_imported_graph_gives_what_langgraph_gives(build: Any, text: str) -> None:
    compiled = build().compile()
    assert run(from_langgraph(compiled), text) == compiled.invoke({"input": text})


def test_settings_of_nodes_come_along() -> None:
    graph = from_langgraph(one_shot().compile(), "shot", max_steps=3)
    workflow = graph.workflow()
    assert (workflow.name, workflow.inputs, workflow.max_steps) == ("shot", ("input",), 3)
    find, say = workflow.nodes["find"], workflow.nodes["say"]
    assert find.topk == 2 and dict(say.options) == {"max_tokens": 7}  # type: ignore[union-attr]
    embed = bound.embedding(text="input", output="query", model="e", services=ECHO)
    assert list(embed({"input": "abc"})["query"]) == [3, 3]  # type: ignore[call-overload]
    made = RAGraph()
    made.add_node(embed.node)
    made.add_edge(dovetail.START, "query")
    made.add_edge("query", dovetail.END)
    assert made.workflow().nodes["query"].model == "e"  # type: ignore[union-attr]


def plain() -> Any:
    builder = one_shot()
    builder.add_node("mine", lambda state: {"reply": "?"})
    builder.add_edge("find", "mine")
    return builder.compile()


def nested() -> Any:
    builder = start()
    builder.add_node("inner", one_shot().compile())
    builder.add_edge(START, "inner")
    return builder.compile()


def reduced() -> Any:
    builder = graphs.StateGraph(Gathering)
    builder.add_node("gather", bound.function(lambda state: ["x"], "gathered"))
    builder.add_edge(START, "gather")
    return builder.compile()


def retried() -> Any:
    from langgraph.types import RetryPolicy

    builder = start()
    say = bound.generation(prompt="{input}")
    builder.add_node("say", say, retry_policy=RetryPolicy())
    builder.add_edge(START, "say")
    return builder.compile()


def deferred() -> Any:
    """LangGraph runs `last` once nothing else is left to run, and not as soon as `find` is done."""
    builder = one_shot()
    last = bound.function(lambda state: state["answer"], "reply")
    builder.add_node("last", last, defer=True)
    builder.add_edge("find", "last")
    return builder.compile()


def unknown_key() -> Any:
    builder = start()
    builder.add_node("say", bound.generation(prompt="{input}", output="elsewhere"))
    builder.add_edge(START, "say")
    return builder.compile()


def twice_written() -> Any:
    builder = one_shot()
    builder.add_node("again", bound.generation(prompt="{docs}", services=ECHO))
    builder.add_edge("say", "again")
    return builder.compile()


def endless() -> Any:
    builder = one_shot()
    builder.add_edge("say", "find")
    return builder.compile()


def stopped() -> Any:
    return one_shot().compile(interrupt_before=["say"])


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (plain, "node 'mine' is a plain function"),
        (nested, "node 'inner' is a graph itself"),
        (reduced, "node 'gather' writes 'gathered', which the graph gathers with a reducer"),
        (retried, "node 'say' has retry_policy"),
        (deferred, "node 'last' has defer"),
        (unknown_key, "node 'say' writes 'elsewhere', which the graph's state has not"),
        (twice_written, "node 'again' writes 'answer', which node 'say' writes too"),
        (endless, "'find'|'say'"),
        (stopped, "interrupt_before_nodes"),
        (one_shot, "StateGraph is not a compiled graph"),
    ],
)
def test_what_cannot_be_imported_is_named(build: Any, told: str) -> None:
    with pytest.raises(WorkflowError, match=told):
        from_langgraph(build())


def test_a_choice_that_sends_work_of_its_own_is_named() -> None:
    from langgraph.types import Send

    builder = start()
    builder.add_node("say", bound.generation(prompt="{input}", services=ECHO))
    builder.add_conditional_edges(START, lambda state: [Send("say", state)])
    builder.add_edge("say", END)
    with pytest.raises(
        WorkflowError, match=r"choice after node START failed: .*Send is not the name"
    ):
        run(from_langgraph(builder.compile()), "?")


def test_a_node_without_services_says_so_when_langgraph_runs_it() -> None:
    builder = start()
    builder.add_node("say", bound.generation(prompt="{input}"))
    builder.add_edge(START, "say")
    with pytest.raises(WorkflowError, match=r"node 'answer' calls .* pass `services` that do"):
        builder.compile().invoke({"input": "?"})
