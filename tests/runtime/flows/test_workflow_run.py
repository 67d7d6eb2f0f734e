"""A run of a workflow: joins, loops, limits, and the same result whatever is faster."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Function, State, Workflow
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun, run_in_order


def call(work: Call) -> object:
    assert isinstance(work.node, Function)
    return work.node.function(work.state)


def run_in_any_order(workflow: Workflow, inputs: dict[str, object], seed: int) -> dict[str, Any]:
    """Finish calls one by one, drawn from all that are under way."""
    rng, run, under_way = random.Random(seed), WorkflowRun(workflow, inputs), []
    while not run.done:
        under_way += run.ready()
        work = under_way.pop(rng.randrange(len(under_way)))
        run.finish(work, call(work))
    return run.result


def trail(name: str) -> Callable[[State], str]:
    """Return a function whose value tells all that its node could see."""
    return lambda state: f"{name}({','.join(f'{k}={state[k]}' for k in sorted(state))})"


def graph(names: str, *edges: tuple[Any, Any], **options: Any) -> RAGraph:
    g = RAGraph("t", **options)
    for name in names:
        g.add_function(name, trail(name), f"o{name}")
    for source, target in edges:
        g.add_edge(source, target)
    return g


def test_a_chain_passes_the_state_on() -> None:
    g = graph("ab", (START, "a"), ("a", "b"), ("b", END))
    assert run_in_order(g.workflow(), {"input": "x"}, call) == {
        "input": "x",
        "oa": "a(input=x)",
        "ob": "b(input=x,oa=a(input=x))",
    }


def test_branches_run_side_by_side_and_a_join_waits_for_both() -> None:
    g = graph("abcd", (START, "a"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", END))
    run = WorkflowRun(g.workflow(), {"input": "x"})
    (first,) = run.ready()
    run.finish(first, "A")
    left, right = run.ready()
    assert (left.node.name, right.node.name) == ("b", "c") and left.state == right.state
    run.finish(right, "C")
    assert run.ready() == ()
    run.finish(left, "B")
    (join,) = run.ready()
    assert dict(join.state) == {"input": "x", "oa": "A", "ob": "B", "oc": "C"}
    run.finish(join, "D")
    assert run.done and run.result["od"] == "D"


def test_a_join_does_not_wait_for_a_branch_that_was_not_taken() -> None:
    g = graph("abcd", (START, "a"), ("b", "d"), ("c", "d"), ("d", END))
    g.add_edge("a", lambda state: "c", ["b", "c"])
    result = run_in_order(g.workflow(), {"input": "x"}, call)
    assert "oc" in result and "ob" not in result


def test_a_choice_may_take_several_ways() -> None:
    g = graph("abc", (START, "a"), ("b", END), ("c", END))
    g.add_edge("a", lambda state: ["b", "c", END])
    assert set(run_in_order(g.workflow(), {"input": 0}, call)) == {"input", "oa", "ob", "oc"}


def counting(limit: int, **options: Any) -> RAGraph:
    g = RAGraph("t", **options)
    g.add_function("count", lambda state: state.get("n", 0) + 1, "n")
    g.add_edge(START, "count")
    g.add_edge("count", lambda state: "count" if state["n"] < limit else END, ["count", END])
    return g


def test_a_loop_ends_by_its_choice() -> None:
    assert run_in_order(counting(7).workflow(), {"input": 0}, call)["n"] == 7


def test_a_loop_ends_at_the_limit_with_an_error_that_names_the_node() -> None:
    assert run_in_order(counting(3, max_steps=3).workflow(), {"input": 0}, call)["n"] == 3
    with pytest.raises(WorkflowError, match="node 'count' has run 3 times"):
        run_in_order(counting(4, max_steps=3).workflow(), {"input": 0}, call)


def test_branches_inside_a_loop_stay_parallel_and_meet_again_in_each_round() -> None:
    g = graph("pcdj", (START, "p"), ("p", "c"), ("p", "d"), ("c", "j"), ("d", "j"))
    rounds: list[str] = []
    g.add_edge(
        "j", lambda state: rounds.append("j") or ("p" if len(rounds) < 3 else END), ["p", END]
    )  # type: ignore[func-returns-value, arg-type, return-value]
    run = WorkflowRun(g.workflow(), {"input": 0})
    sides = []
    while not run.done:
        found = run.ready()
        sides.append("".join(str(work.node.name) for work in found))
        for work in found:
            run.finish(work, (work.node.name, work.round))
    assert sides == ["p", "cd", "j"] * 3 + [] and len(rounds) == 3
    assert run.result["oc"] == ("c", 2) and run.result["od"] == ("d", 2)


def test_two_ways_back_meet_whichever_is_faster() -> None:
    g = graph("cab", (START, "c"), ("a", "c"), ("b", "c"))
    g.add_edge("c", lambda state: END if "oa" in state else ["a", "b"], ["a", "b", END])
    results = [run_in_any_order(g.workflow(), {"input": 0}, seed) for seed in range(8)]
    assert all(result == results[0] for result in results)
    assert {"oa", "ob"} <= set(results[0])


@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=14),
    chosen=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    declared=st.booleans(),
    starts=st.sets(st.integers(0, 5), min_size=1),
    seed=st.integers(0, 9),
)
def test_no_result_depends_on_what_is_faster(
    pairs: list[tuple[int, int]], chosen: list[int], declared: bool, starts: set[int], seed: int
) -> None:
    def place(number: int) -> Any:
        return END if number == 6 else number

    g = RAGraph("t", max_steps=4)
    for node in range(6):
        g.add_function(
            node, lambda state, node=node: hash((node, *sorted(state.items()))), f"o{node}"
        )
        # each goes on to one of two places, the other way once it has been through
        there, back = place(chosen[node]), place((chosen[node] + node + 1) % 7)
        g.add_edge(
            node,
            lambda state, there=there, back=back, node=node: (
                back if state[f"o{node}"] % 3 else there
            ),
            [there, back] if declared else None,
        )
    for first in starts:
        g.add_edge(START, first)
    for source, target in pairs:
        if source < target:
            g.add_edge(source, place(target))
    try:
        workflow = g.workflow()
    except WorkflowError:
        reject()
    wanted, error = outcome(lambda: run_in_order(workflow, {"input": 0}, call))
    found, other = outcome(lambda: run_in_any_order(workflow, {"input": 0}, seed))
    assert found == wanted and (error is None) == (other is None)


def outcome(run: Callable[[], object]) -> tuple[object, str | None]:
    try:
        return run(), None
    except WorkflowError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda state: "nowhere", "the choice after node 'a' gave 'nowhere'"),
        (lambda state: START, "the choice after node 'a' gave START"),
        (lambda state: None, "the choice after node 'a' gave None"),
        (lambda state: sys.exit(3), "the choice after node 'a' failed: SystemExit: 3"),
        (lambda state: state["none"], "the choice after node 'a' failed: KeyError"),
        (lambda state: [["b"]], "the choice after node 'a' failed: TypeError"),
    ],
)
def test_wrong_choices_name_the_node(choose: Any, said: str) -> None:
    g = graph("ab", (START, "a"), ("b", END))
    g.add_edge("a", choose)
    with pytest.raises(WorkflowError, match=said):
        run_in_order(g.workflow(), {"input": 0}, call)


def test_a_run_ends_with_its_state_where_nothing_is_chosen() -> None:
    g = graph("ab", (START, "a"), ("b", END))
    g.add_edge("a", lambda state: [])
    assert run_in_order(g.workflow(), {"input": 0}, call)["input"] == 0


def test_a_value_read_before_it_is_written_names_the_node() -> None:
    g = RAGraph("t")
    g.add_retrieval("a", query="late", output="docs")
    g.add_function("b", lambda state: 1, "late")
    g.add_edge(START, "a")
    g.add_edge("a", "b")
    g.add_edge("b", lambda state: END, ["a", END])
    with pytest.raises(WorkflowError, match="node 'a' reads 'late' before any node has written it"):
        WorkflowRun(g.workflow(), {"input": 0}).ready()


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "'input' is missing"),
        ({"input": 0, "more": 1}, "'more' is no input"),
        ({1: 0}, "1 is no input"),
    ],
)
def test_wrong_inputs_are_refused(inputs: dict[Any, object], said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        WorkflowRun(counting(1).workflow(), inputs)


def test_a_null_is_no_text() -> None:
    """Functions may take one; a search and a prompt would read the word None."""
    g = RAGraph("t")
    g.add_retrieval("a", query="input", output="docs")
    g.add_edge(START, "a")
    g.add_edge("a", END)
    with pytest.raises(WorkflowError, match="the input 'input' is null; give a text"):
        WorkflowRun(g.workflow(), {"input": None})
    assert run_in_order(counting(1).workflow(), {"input": None}, call)["input"] is None


def test_a_function_cannot_write_into_the_state() -> None:
    g = RAGraph("t")
    g.add_function("a", lambda state: state.update(x=1), "o")  # type: ignore[attr-defined]
    g.add_edge(START, "a")
    g.add_edge("a", END)
    with pytest.raises(AttributeError):
        run_in_order(g.workflow(), {"input": 0}, call)
