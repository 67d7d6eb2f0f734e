"""The control plane: the answers of the plain run, whatever is switched on and whoever is fast."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any
from weakref import ref

import pytest

from dovetail import workflows
from dovetail.ir.errors import DeviceError
from dovetail.ir.graph import GraphEdge, GraphNode, contract
from dovetail.ir.live_graph import LiveGraph, State
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Workflow
from dovetail.runtime.flows.control.messages import (
    Copy,
    Deliver,
    Failed,
    Order,
    Report,
    ScanClusters,
)
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import REGISTRY
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.prompts import prompts_after
from dovetail.runtime.flows.workflow_run import WorkflowRun, run_in_order
from dovetail.runtime.retrieval.budget import ScanCost
from tests.runtime.flows.control.integrity import check_dispatched, check_wavefront, is_idle
from tests.runtime.flows.control.world import (
    COSTS,
    CountedClusters,
    Exact,
    HashWorld,
    WorkflowMachine,
    machine,
    rng,
    simulate,
)

SUBSETS = [
    frozenset(chosen)
    for count in (0, 1, 2, len(REGISTRY))
    for chosen in itertools.combinations(REGISTRY, count)
]
DRAWN = [
    frozenset(name for name in REGISTRY if draw.random() < 0.5)
    for draw in map(random.Random, range(64))
]
ONE_WORD = tuple(f"w{n}" for n in range(50))
LIBRARY: Sequence[Callable[[], RAGraph]] = (
    lambda: workflows.one_shot(topk=3),
    lambda: workflows.hyde(topk=5),
    lambda: workflows.recomp(topk=2),
    lambda: workflows.irg(topk=2, rounds=3),
    lambda: workflows.multistep(topk=2, rounds=3, ends=ONE_WORD),
)


def wide(seed: int) -> RAGraph:
    """Return a graph of searches and generations side by side, with a join, a vector, a loop."""
    draw = random.Random(seed)
    g = RAGraph(f"wide {seed}", max_steps=4)
    g.add_function("prepare", lambda state: f"{state['input']} prepared", "ready")
    g.add_edge(START, "prepare")
    g.add_embedding("vector", text="ready", output="point")
    g.add_edge("prepare", "vector")
    g.add_retrieval("near", query="point", output="near_docs", topk=draw.randint(1, 6))
    g.add_edge("vector", "near")
    g.add_rerank("best", query="ready", documents="near_docs", output="best_docs", topk=2)
    g.add_edge("near", "best")
    names = ["best_docs"]
    for i in range(draw.randint(1, 3)):
        g.add_retrieval(f"s{i}", query="ready", output=f"docs{i}", topk=draw.randint(1, 4))
        g.add_generation(f"g{i}", prompt=f"{i}: {{docs{i}}}", output=f"text{i}")
        g.add_edge("prepare", f"s{i}")
        g.add_edge(f"s{i}", f"g{i}")
        g.add_edge(f"g{i}", "join")
        names.append(f"text{i}")
    g.add_edge("best", "join")
    asked = " ".join(f"{{{name}}}" for name in names)
    g.add_generation("join", prompt=f"Join {asked}", output="joined")
    g.add_function("count", lambda state: state.get("n", 0) + 1, "n")
    g.add_edge("join", "count")
    rounds = draw.randint(1, 3)
    g.add_edge("count", lambda s: "again" if s["n"] < rounds else END, ["again", END])
    g.add_retrieval("again", query="joined", output="more", topk=2)
    g.add_edge("again", "join")
    return g


def runs(seed: int, requests: int, rate: float) -> list[tuple[float, WorkflowRun]]:
    """Return runs of all kinds of workflows with the seconds at which they come."""
    draw, at, found = rng("runs", seed), 0.0, []
    makers = [*LIBRARY, lambda: wide(seed), lambda: wide(seed + 1)]
    made = [make().workflow() for make in makers]
    for number in range(requests):
        at += draw.expovariate(rate)
        found.append((at, WorkflowRun(draw.choice(made), {"input": f"question {seed} {number}"})))
    return found


Computed = tuple[frozenset[GraphNode], frozenset[GraphEdge]]


def computed(live: LiveGraph) -> Computed:
    """Return what a graph computes, whatever came first of what runs side by side."""
    assert not [node.name for node in live if node.state is State.WAITING], "a node is lost"
    whole = contract(live.freeze())
    return frozenset(whole.nodes), frozenset(whole.edges)


def served(
    world: HashWorld, subset: frozenset[str], seed: int, requests: int, **settings: Any
) -> tuple[Wavefront, list[Any], dict[int, Computed]]:
    """Serve requests; also return what the graph of each computes."""
    graphs: dict[int, Computed] = {}
    chosen = WavefrontSettings(transformations=subset, refresh=5, **settings)
    front = Wavefront(chosen, COSTS, world, {None: CountedClusters(4)})

    def watch(now: float, orders: Sequence[Order]) -> None:
        check_wavefront(front)
        check_dispatched(front, orders)
        for order in orders:
            if isinstance(order, Deliver):
                assert order.graph is not None
                graphs[order.request] = computed(order.graph)

    draw = rng("rate", seed)
    simulation = simulate(front, world, machine(seed), seed)
    outcomes = simulation.run(runs(seed, requests, draw.choice([20.0, 200.0, 2000.0])), watch)
    assert is_idle(front)
    return front, outcomes, graphs


def plain(world: HashWorld, workflow: Workflow, inputs: Mapping[str, object]) -> str:
    return shown(run_in_order(workflow, inputs, Exact(world).do))


def shown(state: Mapping[str, Any] | None) -> str:
    """Return a state as text: documents by id and order, vectors by value."""
    assert state is not None
    return repr({key: str(value) for key, value in sorted(state.items())})


def check(world: HashWorld, subset: frozenset[str], seed: int, requests: int) -> Wavefront:
    """Serve requests; compare every answer, and what was computed, with the plain run."""
    front, outcomes, graphs = served(world, subset, seed, requests)
    assert graphs == served(world, frozenset(), seed, requests)[2]
    wanted = {
        number: plain(world, run.workflow, {"input": f"question {seed} {number - 1}"})
        for number, (_, run) in enumerate(runs(seed, requests, 1.0), start=1)
    }
    assert {o.request: shown(o.state) for o in outcomes} == wanted
    return front


@pytest.mark.parametrize("number", range(len(SUBSETS)))
def test_answers_are_those_of_the_plain_run_with_every_subset(number: int) -> None:
    check(HashWorld(number % 4), SUBSETS[number], number, requests=5)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("subset", DRAWN, ids=lambda subset: "-".join(sorted(subset)) or "none")
def test_answers_of_200_requests_are_those_of_the_plain_run(subset: frozenset[str]) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    check(HashWorld(seed), subset, seed, requests=200)


class LostDevice:
    """A control plane that is told of most copies and scans on the device that they failed."""

    def __init__(self, front: Wavefront, draw: random.Random) -> None:
        self.front, self.draw, self.submit = front, draw, front.submit
        self.on_device: set[int] = set()
        self.failed = 0

    def orders(self, now: float) -> Sequence[Order]:
        found = self.front.orders(now)
        self.on_device |= {o.job for o in found if isinstance(o, Copy)}
        self.on_device |= {
            o.job for o in found if isinstance(o, ScanClusters) and o.device == "gpu"
        }
        return found

    def tell(self, report: Report, now: float) -> None:
        if report.job in self.on_device and self.draw.random() < 0.7:
            report = Failed(report.job, DeviceError("the device is lost"))
            self.failed += 1
        self.front.tell(report, now)


@pytest.mark.parametrize("seed", range(4))
def test_all_answers_are_right_whatever_fails_on_the_device(seed: int) -> None:
    world, draw = HashWorld(seed), rng("device", seed)
    front = Wavefront(WavefrontSettings(refresh=2), COSTS, world, {None: CountedClusters(6)})
    lost, requests = LostDevice(front, draw), runs(seed, 24, 2000.0)

    def watch(now: float, orders: Sequence[Order]) -> None:
        check_wavefront(front)
        check_dispatched(front, orders)

    found = simulate(lost, world, machine(seed), seed).run(requests, watch)
    assert is_idle(front) and lost.failed and len(found) == 24
    for outcome in found:
        inputs = {"input": f"question {seed} {outcome.request - 1}"}
        run = requests[outcome.request - 1][1]
        assert shown(outcome.state) == plain(world, run.workflow, inputs)


def test_an_error_of_a_function_or_a_limit_ends_the_request_as_the_plain_run_does() -> None:
    def fail(state: object) -> object:
        raise ValueError("no")

    failing, endless = RAGraph("failing"), RAGraph("endless", max_steps=2)
    failing.add_function("f", fail, "x")
    endless.add_function("f", lambda state: 1, "x")
    failing.add_edge(START, "f")
    failing.add_edge("f", END)
    endless.add_edge(START, "f")
    endless.add_edge("f", lambda state: "f", ["f", END])
    world = HashWorld(0)
    front = Wavefront(WavefrontSettings(), COSTS, world)
    made = [WorkflowRun(g.workflow(), {"input": "x"}) for g in (failing, endless)]
    found = simulate(front, world, machine(0)).run([(0.0, run) for run in made])
    errors = {outcome.request: str(outcome.error) for outcome in found}
    assert errors[1] == "node 'f' failed: ValueError: no"
    assert "node 'f' has run 2 times" in errors[2]
    assert is_idle(front)


class Shy:
    def __str__(self) -> str:
        raise ValueError("no words")


def test_a_value_without_text_ends_its_request_alone() -> None:
    world = HashWorld(0)
    front = Wavefront(WavefrontSettings(), COSTS, world)
    workflow = workflows.hyde().workflow()
    made = [WorkflowRun(workflow, {"input": value}) for value in (Shy(), "fine")]
    found = simulate(front, world, machine(0)).run([(0.0, run) for run in made])
    errors = {outcome.request: outcome.error for outcome in found}
    assert str(errors[1]) == "node 'imagine' failed: ValueError: no words" and errors[2] is None


def test_what_is_over_is_freed_at_once_without_the_collector() -> None:
    graphs: list[ref[LiveGraph]] = []

    class Kept(Wavefront):
        def submit(self, run: WorkflowRun, now: float) -> int:
            number = super().submit(run, now)
            graphs.append(ref(self.front.tickets[number].graph))
            return number

    world = HashWorld(0)
    front = Kept(WavefrontSettings(), COSTS, world)
    gc.collect()
    gc.disable()
    try:
        simulate(front, world, machine(0)).run(runs(0, 40, 200.0))
        assert front.statistics.rejected, "what was rolled back held the rest"
        assert len(graphs) == 40 and not [graph for graph in graphs if graph() is not None]
    finally:
        gc.enable()


def test_looking_ahead_changes_nothing_and_sees_only_declared_ways() -> None:
    workflow = workflows.multistep().workflow()
    ahead = workflow.searches["next"]
    assert ahead is not None and ahead.name == "search"
    assert workflow.searches["read"] is None, "a generation comes first"
    run = WorkflowRun(workflows.one_shot().workflow(), {"input": "x"})
    (call,) = run.ready()
    ((after, prompt),) = prompts_after(run, call, ["guess"])
    assert "- guess" in prompt and after.node.name == "answer"
    assert not run.ready() and not run.done
    run.finish(call, ["truth"])
    (true,) = run.ready()
    assert true.state["docs"] == ["truth"]


def mean_latency(subset: frozenset[str], rate: float, *, slow: bool) -> float:
    """Return the mean latency of 60 requests on a machine whose scans are slow, or its replies."""
    world = HashWorld(2, count=400, clusters=40, probes=30)
    scan = ScanCost(1e-4, 3e-5 if slow else 1e-6, threads=2)
    costs = replace(COSTS, scan=scan)
    machine = WorkflowMachine(scan=scan, turn=1e-4)
    workflow = workflows.one_shot(topk=1).workflow()
    made = [(n / rate, WorkflowRun(workflow, {"input": f"q {n}"})) for n in range(60)]
    front = Wavefront(WavefrontSettings(transformations=subset), costs, world)
    return mean(o.latency for o in simulate(front, world, machine).run(made))


def test_sub_stages_let_requests_wait_less() -> None:
    none, split = frozenset[str](), frozenset({"split"})
    assert mean_latency(split, 150.0, slow=True) < 0.95 * mean_latency(none, 150.0, slow=True)
    assert mean_latency(split, 5.0, slow=False) < 1.05 * mean_latency(none, 5.0, slow=False)


def test_guesses_overlap_searches_and_replies() -> None:
    split, guess = frozenset({"split"}), frozenset({"split", "speculate_generation"})
    assert mean_latency(guess, 50.0, slow=True) < 0.9 * mean_latency(split, 50.0, slow=True)


@pytest.mark.parametrize("seed", range(12))
def test_a6_6_a_guess_never_makes_a_lone_request_later_than_a_sub_stage(seed: int) -> None:
    world = HashWorld(seed, longest=40)
    ends = {}
    for guess in (True, False):
        allowed = frozenset({"split", *(["speculate_generation"] if guess else [])})
        front = Wavefront(WavefrontSettings(transformations=allowed), COSTS, world)
        run = WorkflowRun(workflows.one_shot(topk=2).workflow(), {"input": f"question {seed}"})
        machine = WorkflowMachine(scan=COSTS.scan, turn=COSTS.overhead)
        (outcome,) = simulate(front, world, machine).run([(0.0, run)])
        ends[guess] = outcome.end
    one = front.front.costs.budget() + COSTS.step.seconds(2)
    assert ends[True] <= ends[False] + one
