"""What ran for a request, as a graph: sub-stages, guesses and devices as they really were."""

from __future__ import annotations

from dataclasses import replace

from dovetail import workflows
from dovetail.ir.graph import ExecutionGraph, contract
from dovetail.ir.workflow import label
from dovetail.runtime.flows.control.messages import (
    Deliver,
    Embed,
    Finished,
    Generate,
    Invoke,
    Progressed,
    ScanClusters,
)
from dovetail.runtime.retrieval.budget import ScanCost
from tests.runtime.flows.control.by_hand import ALONE, Hand
from tests.runtime.flows.control.world import CountedClusters

NEAR = [(1.0, 1), (2.0, 2)]


def graph(hand: Hand) -> ExecutionGraph:
    found = hand.last(Deliver).graph
    assert found is not None
    return found.freeze()


def edges(graph: ExecutionGraph) -> list[str]:
    return [f"{edge.source} {edge.kind} {edge.target}" for edge in graph.edges]


def test_a_guess_that_held_and_its_sub_stages_are_in_the_graph() -> None:
    hand = Hand()
    hand.begin_search(3, 1, 2)
    hand.scanned(*NEAR)
    guess = hand.last(Generate)
    hand.tell(Progressed(guess.job, "ye", 2))
    hand.scanned((3.0, 3))
    hand.scanned((4.0, 4))
    hand.tell(Finished(guess.job, "yes"))
    found = graph(hand)
    assert edges(contract(found)) == ["search#0 data answer#0"]
    assert contract(found).node("search#0").clusters == (1, 2, 3)
    assert set(edges(found)) == {
        "search#0/0 data search#0/1",
        "search#0/1 data search#0/2",
        "search#0/2 data answer#0/check",
        "search#0/0 speculative answer#0/guess/0",
        "answer#0/guess/0 data answer#0/guess/1",
        "answer#0/guess/1 data answer#0/check",
    }
    assert found.node("answer#0/guess/0").steps == 2


def test_guesses_that_did_not_hold_are_rolled_back() -> None:
    hand = Hand()
    hand.begin_search(0, 1, 2)
    hand.scanned(*NEAR)
    hand.scanned((0.5, 3))
    hand.scanned((0.4, 4))
    real = hand.last(Generate)
    assert not real.provisional
    hand.tell(Progressed(real.job, "y", 1))
    hand.tell(Finished(real.job, "yes"))
    assert hand.front.statistics.rejected == 2
    assert [part.name for part in graph(hand).parts("answer#0")] == ["answer#0/0", "answer#0/1"]


def test_history_reorders_and_loops_are_unrolled() -> None:
    hand = Hand(generation_load=0)
    hand.begin_search(5, 6, graph=workflows.irg(topk=1, rounds=2))
    hand.scanned((2.0, 50))
    hand.scanned((1.0, 60))
    hand.tell(Finished(hand.last(Generate).job, "draft"))
    hand.tell(Finished(hand.last(Invoke).job, "x draft"))
    hand.tell(Finished(hand.last(Embed).job, [0.0, 1.0]))
    hand.probed(9, 6)
    hand.scanned((1.0, 60))
    hand.scanned((9.0, 90))
    hand.tell(Finished(hand.last(Generate).job, "final"))
    found = graph(hand)
    assert [n.clusters for n in found.parts("search 1#0")] == [(6,), (9,)]
    assert set(contract(found).parents("query 1#0")) == {"search 0#0", "read 0#0"}


def test_a_scan_on_two_devices_is_in_the_graph() -> None:
    hot = CountedClusters(2)
    hot.kept = frozenset({1})
    costs = replace(ALONE, device=ScanCost(1e-6, 1e-6))
    hand = Hand(hot=hot, costs=costs, fixed_clusters=2)
    hand.begin_search(0, 1)
    cpu, gpu = hand.all(ScanClusters)
    hand.end(gpu, (1.0, 1))
    hand.end(cpu, (2.0, 2))
    hand.tell(Finished(hand.last(Generate).job, "yes"))
    parts = graph(hand).parts("search#0")
    assert [(p.name, p.clusters, p.device) for p in parts] == [
        ("search#0/cpu", (0,), "cpu"),
        ("search#0/gpu", (1,), "gpu"),
        ("search#0/merge", (), None),
    ]


def test_a_number_and_its_text_name_two_nodes() -> None:
    assert len({label(name) for name in (1, "1", -1, "-1", "a")}) == 5
