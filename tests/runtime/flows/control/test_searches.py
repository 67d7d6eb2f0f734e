"""Sub-stages of searches: what they hold, where they run, and that nothing of a search is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import sqrt
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import workflows
from dovetail.ir.errors import DeviceError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START
from dovetail.runtime.flows.control.messages import (
    Copy,
    Deliver,
    Embed,
    Failed,
    FindClusters,
    Finished,
    Generate,
    Invoke,
    Order,
    RankDocuments,
    ScanClusters,
)
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.hot import HotSet
from tests.runtime.flows.control.by_hand import ALONE, Hand
from tests.runtime.flows.control.integrity import check_wavefront, is_idle
from tests.runtime.flows.control.world import (
    COSTS,
    MACHINE,
    CountedClusters,
    Exact,
    HashWorld,
    simulate,
)


def search_only(topk: int) -> RAGraph:
    g = RAGraph("search")
    g.add_retrieval("search", query="input", output="docs", topk=topk)
    g.add_edge(START, "search")
    g.add_edge("search", END)
    return g


def scans(
    world: HashWorld, graph: RAGraph, requests: int, **settings: Any
) -> tuple[list[tuple[ScanClusters, float]], list[dict[str, Any]]]:
    """Serve requests that come together; return scans with their budgets, and all results."""
    hot = CountedClusters(4)
    front = Wavefront(WavefrontSettings(refresh=2, **settings), COSTS, world, {None: hot})
    seen: list[tuple[ScanClusters, float]] = []

    def watch(now: float, orders: Sequence[Order]) -> None:
        budget = front.front.costs.budget(front.front.backlog)
        seen.extend((o, budget) for o in orders if isinstance(o, ScanClusters))
        check_wavefront(front)

    workflow = graph.workflow()
    runs = [(0.0, WorkflowRun(workflow, {"input": f"q {n}"})) for n in range(requests)]
    outcomes = simulate(front, world).run(runs, watch)
    states = [dict(o.state or {}) for o in sorted(outcomes, key=lambda o: o.request)]
    return seen, states


@given(
    topk=st.sampled_from([1, 5, 20]),
    settings=st.sampled_from([{}, {"fixed_clusters": 1}, {"fixed_clusters": 3}]),
    metric=st.sampled_from(["l2", "ip"]),
    seed=st.integers(0, 3),
)
def test_a6_1_and_9_any_split_on_any_device_finds_what_one_scan_finds(
    topk: int, settings: dict[str, Any], metric: str, seed: int
) -> None:
    world = HashWorld(seed, metric=metric)
    _, states = scans(world, search_only(topk), 6, **settings)
    services = Exact(world)
    node = search_only(topk).workflow().nodes["search"]
    for state in states:
        assert state["docs"] == services.retrieve(state["input"], node)  # type: ignore[arg-type]


class Skewed(HashWorld):
    """Clusters whose sizes are up to ten times apart; what they hold does not matter."""

    def sizes(self, index: str | None) -> Sequence[int]:
        return [1 + 9 * (i % 5 == 0) for i in range(len(self.centroids))]


def test_a6_2_sub_stages_keep_to_their_budget_and_vary_less_than_those_of_fixed_counts() -> None:
    """Less than half as much: than shorter ones of 2 clusters, than ones as long of 12."""
    world = Skewed(0, clusters=600, probes=400)
    sizes = world.sizes(None)
    only_split = frozenset({"split"})

    def seconds(scan: ScanClusters) -> float:
        return COSTS.scan.seconds([sum(sizes[c] for c in part.clusters) for part in scan.parts])

    def spread(**settings: Any) -> float:
        """Return the coefficient of variation of the seconds of sub-stages in the first quarter.

        So much less waits later that budgets fall; in this stretch they do by a seventh.
        """
        found, _ = scans(world, search_only(5), 8, transformations=only_split, **settings)
        taken = [seconds(scan) for scan, _ in found]
        before = accumulate(taken[:-1], initial=0.0)
        early = [s for s, at in zip(taken, before, strict=True) if at < sum(taken) / 4]
        assert len(early) > 5
        return pstdev(early) / mean(early)

    budgeted, _ = scans(world, search_only(5), 8, transformations=only_split)
    for scan, budget in budgeted:
        alone = len({source.request for source in scan.sources}) == 1
        undealt = COSTS.scan.fixed  # a search is dealt to threads where that saves more
        assert seconds(scan) <= budget + undealt or alone
    assert all(2 * spread() < spread(fixed_clusters=count) for count in (2, 12))


def test_a6_3_the_budget_follows_what_is_measured_while_serving() -> None:
    world = HashWorld(0, clusters=60, probes=40)
    wrong = replace(COSTS, overhead=1.0, scan=ScanCost(1e-3, 1e-3))
    machine = replace(MACHINE, scan=ScanCost(1e-4, 1e-4))
    front = Wavefront(WavefrontSettings(), wrong, world)
    workflow = search_only(3).workflow()
    runs = [(n * 0.02, WorkflowRun(workflow, {"input": f"q {n}"})) for n in range(120)]
    simulate(front, world, machine).run(runs)
    known = front.front.costs
    assert known.stage is not None and known.speed == pytest.approx(0.1, rel=0.2)
    assert known.overhead == pytest.approx(machine.turn + machine.scan.fixed, rel=0.05)
    mb = sqrt(2 * (machine.turn + machine.scan.fixed) * known.stage)
    assert known.budget() == pytest.approx(mb, rel=0.05)


def test_a6_5_a_search_may_end_early_and_scans_less() -> None:
    world = HashWorld(1, clusters=40, probes=30)
    whole, exact = scans(world, search_only(3), 8, fixed_clusters=1)
    early, states = scans(world, search_only(3), 8, fixed_clusters=1, patience=8)

    def clusters(found: list[tuple[ScanClusters, float]]) -> int:
        return sum(len(part.clusters) for scan, _ in found for part in scan.parts)

    same = [
        len({d.id for d in a["docs"]} & {d.id for d in b["docs"]}) / 3
        for a, b in zip(exact, states, strict=True)
    ]
    assert clusters(early) < 0.8 * clusters(whole) and mean(same) >= 0.8


def test_a6_8_hot_clusters_are_scanned_on_the_device_once_they_are_there() -> None:
    hot = CountedClusters(2)
    costs = replace(ALONE, device=ScanCost(1e-6, 1e-6))
    hand = Hand(hot=hot, costs=costs, fixed_clusters=4, refresh=1, generation_load=0)
    graph = search_only(1)
    hand.begin_search(0, 1, 2, 3, graph=graph)
    hand.scanned((1.0, 1))
    hand.begin_search(0, 1, 4, 5, graph=graph)
    copy = hand.last(Copy)
    assert set(copy.load) == {0, 1} and {s.device for s in hand.all(ScanClusters)} == {"cpu"}
    hand.scanned((1.0, 1))
    hand.begin_search(0, 1, 6, 7, graph=graph)
    assert hand.last(ScanClusters).device == "cpu", "clusters in transfer count as absent"
    hand.scanned((1.0, 1))
    hand.tell(Finished(copy.job))
    hand.begin_search(0, 1, 8, 9, graph=graph)
    cpu, gpu = hand.all(ScanClusters)[-2:]
    assert (cpu.device, cpu.parts[0].clusters) == ("cpu", (8, 9))
    assert (gpu.device, gpu.parts[0].clusters) == ("gpu", (0, 1))


def begin_copy(hand: Hand) -> Copy:
    """Have two clusters scanned and ordered to the device; `refresh` is 1."""
    for _ in range(2):
        hand.begin_search(0, 1, graph=search_only(1))
        hand.scanned((1.0, 1))
    return hand.last(Copy)


@pytest.mark.parametrize("outright", [True, False])
def test_clusters_that_do_not_arrive_are_absent_and_copied_again(outright: bool) -> None:
    hot = CountedClusters(2)
    hand = Hand(
        hot=hot, costs=replace(ALONE, device=ScanCost(1e-6, 1e-6)), fixed_clusters=4, refresh=1
    )
    copy = begin_copy(hand)
    assert set(copy.load) == {0, 1}
    failed = Failed(copy.job, DeviceError("the link is down"))
    hand.tell(failed if outright else Finished(copy.job, (1,)))
    assert hot.kept == (frozenset() if outright else {0})
    hand.begin_search(1, 2, graph=search_only(1))
    assert hand.last(ScanClusters).device == "cpu"
    hand.scanned((1.0, 1))
    again = hand.last(Copy)
    assert again is not copy and 1 in again.load
    hand.tell(Finished(again.job))
    assert hot.kept == {0, 1}


def test_a_copy_for_an_index_that_was_replaced_meanwhile_changes_nothing() -> None:
    first, then = (HotSet([10] * 40, 20) for _ in range(2))
    costs = replace(ALONE, device=ScanCost(1e-6, 1e-6))
    hand = Hand(hot=first, costs=costs, fixed_clusters=4, refresh=1)
    copy = begin_copy(hand)
    hand.hot_sets[None] = then
    hand.tell(Finished(copy.job))
    assert first.residents == {0, 1} and not then.residents
    hand.begin_search(0, 1, graph=search_only(1))
    hand.scanned((1.0, 1))
    assert hand.last(Copy) is not copy, "the new one is filled, too"


def test_what_the_device_fails_to_scan_the_cpu_scans_in_the_same_sub_stage() -> None:
    hot = CountedClusters(2)
    hot.kept = frozenset({0, 1})
    hand = Hand(hot=hot, costs=replace(ALONE, device=ScanCost(1e-6, 1e-6)), fixed_clusters=4)
    hand.begin_search(0, 1, 2, 3, graph=search_only(2))
    cpu, gpu = hand.all(ScanClusters)
    hand.tell(Failed(gpu.job, DeviceError("a kernel failed")))
    assert hand.all(ScanClusters) == [cpu, gpu] and not hot.kept, "the CPU is at work"
    hand.end(cpu, (2.0, 20))
    again = hand.last(ScanClusters)
    assert (again.device, again.parts[0].clusters) == ("cpu", (0, 1))
    hand.end(again, (1.0, 10), (3.0, 11))
    (done,) = hand.all(Deliver)
    assert done.state is not None and [d.id for d in done.state["docs"]] == [10, 20]
    assert done.graph is not None and "gpu" not in {node.device for node in done.graph}


def test_a_device_that_fails_with_a_request_that_is_cancelled_is_not_asked_for_again() -> None:
    hot = CountedClusters(2)
    hot.kept = frozenset({0, 1})
    hand = Hand(hot=hot, costs=replace(ALONE, device=ScanCost(1e-6, 1e-6)), fixed_clusters=4)
    number = hand.begin_search(0, 1, 2, 3, graph=search_only(2))
    cpu, gpu = hand.all(ScanClusters)
    hand.tell(Failed(gpu.job, DeviceError("a kernel failed")))
    hand.front.cancel(number)
    hand.end(cpu, (2.0, 20))
    assert hand.all(ScanClusters) == [cpu, gpu] and is_idle(hand.front)


def test_a_device_that_is_slower_than_leaving_it_out_is_left_out() -> None:
    hot = CountedClusters(2)
    hot.kept = frozenset({0, 1})
    costs = replace(ALONE, device=ScanCost(fixed=1.0, per_vector=0.0))
    hand = Hand(hot=hot, costs=costs, fixed_clusters=4)
    hand.begin_search(0, 1, 2, 3)
    assert [scan.device for scan in hand.all(ScanClusters)] == ["cpu"]


@pytest.mark.parametrize(("replies", "devices"), [(1, {"cpu", "gpu"}), (3, {"cpu"})])
def test_generations_on_the_device_lose_no_more_than_searches_gain(
    replies: int, devices: set[str]
) -> None:
    g = RAGraph("reply")
    g.add_generation("answer", prompt="{input}", output="answer")
    g.add_edge(START, "answer")
    g.add_edge("answer", END)
    hot = CountedClusters(2)
    hot.kept = frozenset({0, 1})
    hand = Hand(hot=hot, costs=replace(ALONE, device=ScanCost(1e-3, 0.0)), fixed_clusters=4)
    for _ in range(replies):
        hand.submit(g)
    hand.begin_search(0, 1, 2, 3)
    assert {scan.device for scan in hand.all(ScanClusters)} == devices


def test_a_request_that_comes_later_joins_at_the_next_sub_stage() -> None:
    hand = Hand()
    hand.begin_search(0, 1, 2)
    hand.begin_search(3, 4, 5)
    assert len(hand.all(ScanClusters)) == 1
    hand.scanned((1.0, 1))
    assert [part.clusters for part in hand.last(ScanClusters).parts] == [(3,), (1,)]


def test_the_oldest_goes_first_but_for_a_taste_of_what_is_new() -> None:
    hand = Hand(fixed_clusters=None)
    old = hand.begin_search(*range(32))
    new = hand.begin_search(*range(8, 40))
    hand.scanned((1.0, 1))
    scan = hand.last(ScanClusters)
    first, rest = scan.parts
    assert [source.request for source in scan.sources] == [new, old]
    assert len(first.clusters) == 2 and len(rest.clusters) >= 1, "a sixteenth of its clusters"
    hand.scanned([(1.0, 2)], [])
    assert {s.request for s in hand.last(ScanClusters).sources} == {old}


@pytest.mark.parametrize("ranked", [False, True])
def test_a_search_alone_is_cut_only_where_a_generation_may_begin_on_a_part(ranked: bool) -> None:
    """A rerank reads all that is found: who looks before the end would see nothing to begin on."""
    g = RAGraph("ranked")
    g.add_retrieval("search", query="input", output="found", topk=2)
    g.add_rerank("rank", query="input", documents="found", output="docs", topk=1)
    g.add_generation("answer", prompt="{docs}")
    for source, target in pairwise([START, "search", "rank", "answer", END]):
        g.add_edge(source, target)
    hand = Hand(fixed_clusters=None)
    hand.begin_search(*range(32), graph=g if ranked else None)
    (part,) = hand.last(ScanClusters).parts
    assert len(part.clusters) == (32 if ranked else 2)
    if ranked:
        hand.scanned((1.0, 1), (2.0, 2))
        (order,) = hand.all(RankDocuments)
        assert [each.id for each in order.documents] == [1, 2] and order.query == "x"
        hand.tell(Finished(order.job, order.documents[1:]))
        assert hand.last(Generate).prompt == "- document 2"


@pytest.mark.parametrize("pays", [True, False])
def test_what_is_new_has_no_taste_where_no_guess_pays(pays: bool) -> None:
    """A prompt that holds up a reply under way for longer than it takes is not begun."""
    step = replace(COSTS.step, prefill=0.0 if pays else 1.0)
    hand = Hand(fixed_clusters=None, costs=replace(ALONE, overhead=1e-3, step=step))
    old = hand.begin_search(*range(32))
    hand.begin_search(*range(32), graph=search_only(2))
    hand.submit(workflows.hyde(topk=2))
    hand.scanned((1.0, 1), (2.0, 2))
    hand.scanned(*([] for _ in hand.last(ScanClusters).parts))
    new = hand.begin_search(*range(8, 40))
    hand.scanned(*([] for _ in hand.last(ScanClusters).parts))
    assert hand.last(ScanClusters).sources[0].request == (new if pays else old)


@pytest.mark.parametrize("load", [1, 2])
def test_what_is_new_has_no_taste_where_the_engine_has_no_room_for_a_guess(load: int) -> None:
    hand = Hand(fixed_clusters=None, generation_load=load)
    come_often(hand)
    hand.submit(workflows.hyde(topk=2))
    old = hand.begin_search(*range(32))
    new = hand.begin_search(*range(8, 40))
    hand.scanned((1.0, 1))
    assert hand.last(ScanClusters).sources[0].request == (old if load == 1 else new)


def test_what_is_new_has_a_taste_where_a_guess_on_any_search_pays() -> None:
    """The prompt of one is short, that of the other would take most of the engine's time."""
    hand = Hand(costs=replace(ALONE, step=replace(COSTS.step, prefill=2e-4)))
    hand.submit(workflows.hyde(topk=2))
    hand.begin_search(*range(8), graph=workflows.one_shot(topk=2, answer="?"))
    hand.begin_search(*range(8))
    hand.scanned([])
    hand.scanned([(3.0, 3), (4.0, 4)], [(1.0, 1), (2.0, 2)])
    assert hand.front.statistics.attempted == 1
    for _ in range(2):  # then the only guess weighed is the one that does not pay
        new = hand.begin_search(*range(8))
        hand.scanned(*([] for _ in hand.last(ScanClusters).parts))
        assert hand.last(ScanClusters).sources[0].request == new


@pytest.mark.parametrize("more_come", [True, False])
def test_who_has_searched_least_goes_first_where_no_more_come(more_come: bool) -> None:
    hand = Hand(transformations=frozenset({"split"}))
    costs = hand.front.front.costs
    costs.replied(("other", "answer"), 600.0)  # of a workflow that nobody asks for now
    hand.begin_search(0, graph=workflows.irg(topk=1, rounds=2))
    hand.scanned((1.0, 1))
    hand.tell(Finished(hand.last(Generate).job, "draft"))
    late = hand.begin_search(1, 2, 3, 4, graph=search_only(1))
    hand.tell(Finished(hand.last(Invoke).job, "x draft"))
    hand.tell(Finished(hand.last(Embed).job, [0.0, 1.0]))
    hand.probed(5, 6)
    hand.now += 0.0 if more_come else 1.0
    hand.scanned((1.0, 1))
    assert (hand.last(ScanClusters).sources[0].request == late) is not more_come


def test_one_search_has_all_threads() -> None:
    hand = Hand(fixed_clusters=None, costs=replace(COSTS, overhead=1.4e-3))
    hand.begin_search(*range(6), graph=search_only(3))
    parts = [part.clusters for part in hand.last(ScanClusters).parts]
    assert parts == [(0, 2, 4), (1, 3, 5)], "too short to be cut"
    hand.scanned([(3.0, 1)], [(1.0, 2), (2.0, 3), (4.0, 4)])
    assert [d.id for d in hand.last(Deliver).state["docs"]] == [2, 3, 1]  # type: ignore[index]
    hand.begin_search(*range(32))
    assert [part.clusters for part in hand.last(ScanClusters).parts] == [(0,), (1,)], "its taste"


def test_a_search_that_nobody_waits_for_is_scanned_at_once() -> None:
    hand = Hand(fixed_clusters=None, generation_load=0)
    hand.begin_search(*range(32))
    assert len(hand.last(ScanClusters).parts[0].clusters) == 32
    hand.scanned([])
    come_often(hand)
    hand.begin_search(*range(32))
    assert len(hand.last(ScanClusters).parts[0].clusters) < 32


def come_often(hand: Hand) -> None:
    """Have it known that searches come all the time."""
    for ago in (1e-6, 0.0):
        hand.front.front.costs.begun(hand.now - ago)


def test_a_scan_that_fails_ends_its_requests_with_an_error_that_names_the_node() -> None:
    hand = Hand()
    one = hand.begin_search(0, 1)
    two = hand.begin_search(2, 3)
    hand.tell(Failed(hand.last(ScanClusters).job, DeviceError("the worker died")))
    assert hand.last(Deliver).request == one
    assert "node 'search' failed: the worker died" in str(hand.last(Deliver).error)
    assert hand.last(ScanClusters).sources[0].request == two


def test_of_searches_whose_scan_fails_together_each_is_scanned_alone() -> None:
    hand = Hand(fixed_clusters=4)
    hand.begin_search(0, 1)
    wrong, right = (hand.begin_search(2, 3, graph=search_only(1)) for _ in range(2))
    hand.scanned((1.0, 1))
    both = hand.last(ScanClusters)
    assert {source.request for source in both.sources} == {wrong, right}
    hand.tell(Failed(both.job, DeviceError("no memory")))
    first = hand.last(ScanClusters)
    assert {source.request for source in first.sources} == {wrong}
    hand.tell(Failed(first.job, DeviceError("no memory")))
    hand.end(hand.last(ScanClusters), (1.0, 20))
    lost, found = hand.all(Deliver)[-2:]
    assert lost.request == wrong and "'search' failed: no memory" in str(lost.error)
    assert found.request == right and found.state is not None
    assert [d.id for d in found.state["docs"]] == [20]


def test_no_clusters_means_no_documents() -> None:
    hand = Hand()
    hand.begin_search(graph=search_only(3))
    assert hand.last(Deliver).state["docs"] == []  # type: ignore[index]


def test_a_vector_of_the_state_is_searched_with_as_it_is() -> None:
    g = search_only(1)
    hand = Hand()
    hand.front.submit(WorkflowRun(g.workflow(), {"input": np.ones(2, np.float32)}), 0.0)
    hand.tell()
    assert hand.last(FindClusters).vector == np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize("seed", range(30))
def test_cancelling_frees_all_that_a_request_holds(seed: int) -> None:
    draw, world = random.Random(seed), HashWorld(seed % 3)
    front = Wavefront(WavefrontSettings(), COSTS, world, {None: CountedClusters(3)})
    simulation = simulate(front, world, MACHINE, seed)
    makers = (workflows.irg, workflows.one_shot, workflows.hyde, workflows.recomp)
    cancelled = draw.sample(range(1, 13), 6)

    def watch(now: float, orders: Sequence[Order]) -> None:
        if cancelled and draw.random() < 0.2:
            front.cancel(cancelled.pop())
        check_wavefront(front)

    runs = [
        (n * 1e-3, WorkflowRun(draw.choice(makers)(topk=2).workflow(), {"input": f"q {n}"}))
        for n in range(12)
    ]
    outcomes = simulation.run(runs, watch)
    assert is_idle(front) and len(outcomes) >= 6
    check_wavefront(front)
