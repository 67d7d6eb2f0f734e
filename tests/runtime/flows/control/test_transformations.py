"""The registry: what is not in it never happens, what is added does; whatever fails meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail
from dovetail.ir.errors import DeviceError, SpecError
from dovetail.ir.live_graph import LiveGraph
from dovetail.ir.transform import split_search, stop
from dovetail.runtime.flows.control.costs import Learned
from dovetail.runtime.flows.control.front import Changes, Front
from dovetail.runtime.flows.control.messages import (
    Deliver,
    Failed,
    Invoke,
    Order,
    Report,
    Rewrote,
    ScanClusters,
    Source,
    Written,
)
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import NEWS, REGISTRY
from dovetail.runtime.flows.control.wavefront import Wavefront
from tests.runtime.flows.control.by_hand import Hand
from tests.runtime.flows.control.integrity import check_dispatched, check_wavefront, is_idle
from tests.runtime.flows.control.test_wavefront import (
    DRAWN,
    Computed,
    check,
    computed,
    plain,
    runs,
    served,
    shown,
)
from tests.runtime.flows.control.world import (
    COSTS,
    CountedClusters,
    HashWorld,
    machine,
    simulate,
)

BUILT_IN = (
    *("reorder", "stop", "speculate_retrieval", "prefetch"),
    *("put", "split", "speculate_generation", "arrange", "split_reply"),
)
SEEDS, REQUESTS = range(2, 5), 12


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def serve_all(seed: int, **settings: Any) -> tuple[Wavefront, list[Any], Counter[str]]:
    """Serve requests of each kind; also return how often each transformation was applied."""
    seen, world = Counter[str](), HashWorld(seed)
    wavefront = WavefrontSettings(refresh=3, **settings)
    front = Wavefront(wavefront, COSTS, world, {None: CountedClusters(4)})

    def watch(now: float, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, Rewrote):
                assert order.rewrite.gain > 0
                seen[order.rewrite.transformation] += 1

    outcomes = simulate(front, world, machine(seed), seed).run(runs(seed, REQUESTS, 500.0), watch)
    assert len(outcomes) == REQUESTS and is_idle(front)
    return front, outcomes, seen


def applied(patience: int | None = 3) -> Counter[str]:
    """Serve some requests of each kind; return how often each transformation was applied."""
    return sum((serve_all(seed, patience=patience)[2] for seed in SEEDS), Counter[str]())


def test_each_is_applied_and_they_are_asked_in_a_known_order() -> None:
    assert tuple(REGISTRY) == BUILT_IN
    free = {"arrange"}  # where the order of documents is free: see test_prefixes.py
    assert set(applied()) == set(BUILT_IN) - free
    assert set(applied(patience=None)) == set(BUILT_IN) - free - {"stop"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_one_that_is_not_registered_never_happens_and_answers_stay(name: str) -> None:
    removed = dovetail.unregister_transformation(name)
    assert removed.name == name
    assert not applied()[name]
    with pytest.raises(SpecError, match=f"there is no transformation '{name}'"):
        dovetail.unregister_transformation(name)
    check(HashWorld(1), frozenset(BUILT_IN) - {name}, 1, requests=6)


@dataclass(frozen=True, slots=True)
class Halve(dovetail.Transformation):
    """Cut each search in two halves once its clusters are known."""

    name = "halve"
    expected: float = 0.25

    @classmethod
    def fits(cls, front: Front) -> Iterator[Halve]:
        """See Transformation."""
        for search in front.news.found:
            if len(search.node.clusters) > 1:
                yield cls(search.graph, search.node)

    def gain(self, costs: Learned) -> float:
        """See Transformation."""
        return self.expected

    def apply(self, graph: LiveGraph) -> None:
        """See Transformation."""
        split_search(graph, self.node, len(self.node.clusters) // 2)


def test_one_of_a_user_is_applied_where_it_is_expected_to_gain() -> None:
    assert dovetail.register_transformation(Halve) is Halve
    assert list(REGISTRY)[-1] == "halve" and applied()["halve"]
    for subset in (frozenset({"halve"}), frozenset(REGISTRY), frozenset({"halve", "put"})):
        check(HashWorld(2), subset, 2, requests=6)
    dovetail.unregister_transformation("halve")
    assert not applied()["halve"]


def test_one_of_a_user_that_gains_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Halve, "gain", lambda self, costs: 0.0)
    dovetail.register_transformation(Halve)
    assert not applied()["halve"]


def test_one_of_a_user_says_why_it_is_left_in_its_own_words() -> None:
    class Wary(Halve):
        __slots__ = ()
        name = "wary"

        def gain(self, costs: Learned) -> float:
            return 0.0

        def why_not(self, costs: Learned) -> str:
            return "not today"

    dovetail.register_transformation(Wary)
    try:
        world = HashWorld(0)
        front = Wavefront(WavefrontSettings(refresh=3), COSTS, world)
        simulate(front, world, machine(0), 0).run(runs(0, 4, 500.0), lambda now, orders: None)
    finally:
        dovetail.unregister_transformation("wary")
    assert front.front.statistics.left["wary"] == ("gain", "not today")


@dataclass(frozen=True, slots=True)
class Enough(dovetail.Transformation):
    """Leave out what a search has not scanned after its first sub-stage."""

    name = "enough"
    wakes = "scanned"

    @classmethod
    def fits(cls, front: Front) -> Iterator[Enough]:
        """See Transformation."""
        for search in front.news.scanned:
            if not search.over:
                yield cls(search.graph, search.node)

    def gain(self, costs: Learned) -> float:
        """See Transformation."""
        return 1.0

    def apply(self, graph: LiveGraph) -> None:
        """See Transformation."""
        stop(graph, self.node)


@pytest.mark.parametrize("mine", [True, False])
def test_a_search_may_be_ended_when_the_next_sub_stage_is_chosen(mine: bool) -> None:
    """By one that is asked after those which choose: a user's, or ours registered again."""
    kind = Enough if mine else dovetail.unregister_transformation("stop")
    dovetail.register_transformation(kind)
    for seed in SEEDS:
        front, outcomes, seen = serve_all(seed, patience=None if mine else 1, fixed_clusters=1)
        assert seen[kind.name] and all(outcome.error is None for outcome in outcomes)
        assert "failed" not in {why.reason for why in front.statistics.left.values()}


@pytest.mark.parametrize("mine", [True, False])
def test_others_have_their_turn_when_all_of_the_next_sub_stage_is_ended(mine: bool) -> None:
    """They search another index, so the sub-stage that was chosen is not theirs."""
    kind = Enough if mine else dovetail.unregister_transformation("stop")
    dovetail.register_transformation(kind)
    hand = Hand(patience=None if mine else 1)
    for index in ("a", "b"):
        graph = dovetail.RAGraph(index)
        graph.add_retrieval("search", query="input", output="docs", topk=1, index=index)
        graph.add_edge(dovetail.START, "search")
        graph.add_edge("search", dovetail.END)
        hand.begin_search(0, 1, 2, 3, graph=graph)
    while not is_idle(hand.front):
        assert "cpu" in hand.front.front.busy, "nobody waits for a CPU that is free"
        hand.scanned((1.0, 1))
    assert [order.error for order in hand.all(Deliver)] == [None, None]
    scans = hand.all(ScanClusters)
    assert [scan.index for scan in scans] == sorted(scan.index for scan in scans if scan.index)
    assert all(len(part.clusters) == 1 for scan in scans for part in scan.parts), "it is split, too"


class Faulty(Halve):
    """Fails in one of its methods, for every second place at most."""

    __slots__ = ()
    name, breaks = "faulty", "apply"

    @classmethod
    def fits(cls, front: Front) -> Iterator[Halve]:
        if cls.breaks == "fits" and front.news.found:
            raise ZeroDivisionError("in fits")
        return super().fits(front)

    def gain(self, costs: Learned) -> float:
        if self.breaks == "gain":
            raise ZeroDivisionError("in gain")
        return 0.0 if self.breaks == "why_not" else 1.0

    def why_not(self, costs: Learned) -> str:
        raise ZeroDivisionError("in why_not")

    def apply(self, graph: LiveGraph) -> None:
        super().apply(graph)
        raise ZeroDivisionError("in apply")


@pytest.mark.parametrize("method", ["fits", "gain", "why_not", "apply"])
def test_one_of_a_user_that_raises_ends_one_request_at_most(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Faulty, "breaks", method)
    dovetail.register_transformation(Faulty)
    front, outcomes, seen = serve_all(1)
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert len(failed) == (method == "apply") and not seen["faulty"]
    assert all("transformation 'faulty' has failed: " in str(error) for error in failed)
    assert front.statistics.left["faulty"].reason == "failed"
    assert f"in {method}" in front.statistics.left["faulty"].said and "faulty" in caplog.text
    assert "faulty" not in front.front.asked, "it is asked no longer"


def test_one_that_wakes_on_what_is_never_told_is_refused() -> None:
    assert {f.name for f in fields(Changes)} == set(NEWS)

    class Asleep(Halve):
        __slots__ = ()
        name, wakes = "asleep", "scaned"

    with pytest.raises(SpecError, match=r"wakes is one of found, scanned, .* not 'scaned'"):
        dovetail.register_transformation(Asleep)


def test_what_is_copied_for_all_requests_is_not_kept_for_ever() -> None:
    front, _, seen = serve_all(2)
    assert seen["prefetch"] and not front.front.beside.rewrites


def test_names_are_taken_once_and_those_of_settings_must_be_there() -> None:
    @dataclass(frozen=True, slots=True)
    class Other(Halve):
        name = "split"

    with pytest.raises(SpecError, match="there is a transformation 'split'"):
        dovetail.register_transformation(Other)
    with pytest.raises(SpecError, match="no transformation 'halve'; there are reorder, stop"):
        Wavefront(WavefrontSettings(transformations=frozenset({"halve"})), COSTS, HashWorld(0))


class Restless:
    """A control plane whose reports fail, come twice, or come after their request was cancelled.

    Calls of functions are kept, to see that each runs once.
    """

    def __init__(self, front: Wavefront, draw: random.Random, fails: float, cancels: float) -> None:
        self.front, self.draw, self.submit = front, draw, front.submit
        self.fails, self.cancels = fails, cancels
        self.cancelled: set[int] = set()
        self.invoked, self.written = Counter[Source](), Counter[Source]()
        self.graphs: dict[int, Computed] = {}

    def orders(self, now: float) -> Sequence[Order]:
        orders = self.front.orders(now)
        check_wavefront(self.front)
        check_dispatched(self.front, orders)
        for order in orders:
            if isinstance(order, Invoke):
                self.invoked[order.source] += 1
            elif isinstance(order, Written):
                self.written[order.source] += 1
            elif isinstance(order, Deliver):
                assert order.request not in self.cancelled
                if order.graph is not None:
                    self.graphs[order.request] = computed(order.graph)
        return orders

    def tell(self, report: Report, now: float) -> None:
        under_way = sorted(self.front.front.tickets)
        if under_way and self.draw.random() < self.cancels:
            self.cancelled.add(number := self.draw.choice(under_way))
            self.front.cancel(number)
        if self.draw.random() < self.fails:
            report = Failed(report.job, DeviceError("the worker died"))
        for _ in range(self.draw.choice((1, 1, 2))):
            self.front.tell(report, now)


@cache
def unrolled(seed: int, requests: int) -> dict[int, Computed]:
    """Return what the graph of each request computes where nothing is transformed."""
    return served(HashWorld(seed % 3), frozenset(), seed, requests)[2]


@given(
    seed=st.integers(0, 3),
    subset=st.sampled_from([frozenset(BUILT_IN), *DRAWN]),
    number=st.integers(0, 1 << 20),
    fails=st.sampled_from([0.0, 0.02, 0.1]),
    cancels=st.sampled_from([0.0, 0.02]),
)
def test_no_node_is_lost_or_run_twice_whatever_fails_or_is_cancelled(
    seed: int, subset: frozenset[str], number: int, fails: float, cancels: float
) -> None:
    world, count = HashWorld(seed % 3), 8
    settings = WavefrontSettings(transformations=subset, refresh=3)
    front = Wavefront(settings, COSTS, world, {None: CountedClusters(4)})
    restless = Restless(front, random.Random(number), fails, cancels)
    made = runs(seed, count, 500.0)
    outcomes = simulate(restless, world, machine(number), number).run(made)
    assert is_idle(front)
    assert {o.request for o in outcomes} | restless.cancelled == set(range(1, count + 1))
    assert set(restless.invoked.values()) | set(restless.written.values()) <= {1}
    for outcome in outcomes:
        if outcome.error is not None:
            assert "the worker died" in str(outcome.error)
            continue
        inputs = {"input": f"question {seed} {outcome.request - 1}"}
        assert shown(outcome.state) == plain(world, made[outcome.request - 1][1].workflow, inputs)
        assert restless.graphs[outcome.request] == unrolled(seed, count)[outcome.request]
