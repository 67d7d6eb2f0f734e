"""`place`: what it makes of a graph, that it can be undone, and that nothing else is computed."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import (
    ALL_REDUCE,
    DATA,
    KINDS,
    PHASE_SWITCH,
    ExecutionGraph,
    GraphEdge,
    GraphNode,
    Placement,
    contract,
)
from dovetail.ir.place import (
    PHASES,
    find_searches,
    find_shares,
    place,
    read_plan,
    serving_graph,
    share_out,
)
from tests.ir.live import read_graph


def make_plan(
    processes: int, prefill: int, decode: int, before: int = 0, *, bound: bool = True
) -> ServicePlan:
    """Return a plan of so many processes and threads; `before`: processes of prefill, 0 = alike."""

    def phase(count: int, threads: int) -> PhasePlan:
        cpus = tuple(10 * rank + i for rank in range(count) for i in range(threads))
        return PhasePlan(threads=threads, cpus=cpus if bound else ())

    before = before * (before != processes)
    return ServicePlan(
        processes=processes,
        prefill_processes=before,
        nodes=tuple(range(processes)) if bound else (),
        prefill=phase(before or processes, prefill),
        decode=phase(processes, decode),
    )


@st.composite
def graphs(draw: st.DrawFn) -> ExecutionGraph:
    count = draw(st.integers(1, 8))
    nodes = []
    for i in range(count):
        kind = draw(st.sampled_from(KINDS))
        model = draw(st.sampled_from(("llm", "other"))) if kind in PHASES else None
        nodes.append(GraphNode(name=f"n{i}", kind=kind, model=model))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return ExecutionGraph(nodes, (GraphEdge(source=f"n{a}", target=f"n{b}") for a, b in chosen))


plans = st.builds(
    make_plan,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 5),
    bound=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(graphs(), plans)
def test_placing_can_be_undone_and_places_every_node_of_the_model(
    graph: ExecutionGraph, plan: ServicePlan
) -> None:
    placed = place(graph, {"llm": plan})
    assert contract(placed) == graph
    assert place(placed, {"llm": plan}) == placed and place(graph, {}) == graph
    assert read_graph(placed.to_json()) == placed
    for node in graph.nodes:
        subs = [sub for sub in placed.nodes if sub.origin == node.name]
        wanted = PHASES.get(node.kind, ()) if node.model == "llm" else ()
        assert len(subs) == sum(map(plan.processes_of, wanted))
        assert (node in placed.nodes) == (not wanted)
        for sub in subs:
            assert sub.place is not None and (sub.kind, sub.model) == (node.kind, node.model)
            phase: PhasePlan = getattr(plan, sub.place.phase)
            first = sub.place.process * phase.threads
            assert sub.place.cpus == phase.cpus[first : first + phase.threads]
            homes = dict(enumerate(plan.nodes))
            assert sub.place.node == homes.get(sub.place.process)


@settings(max_examples=60, deadline=None)
@given(graphs(), plans)
def test_every_rank_is_in_one_ring_and_switches_once(
    graph: ExecutionGraph, plan: ServicePlan
) -> None:
    placed = place(graph, {"llm": plan})
    followers: dict[str, list[str]] = defaultdict(list)
    for edge in placed.edges:
        if edge.kind == ALL_REDUCE:
            followers[edge.source].append(edge.target)
    for node in placed.nodes:
        if node.place is None or plan.processes_of(node.place.phase) == 1:
            assert node.name not in followers
            continue
        ring, at = set(), node.name
        while at not in ring:
            ring.add(at)
            (at,) = followers[at]
        assert at == node.name and len(ring) == plan.processes_of(node.place.phase)
        alike = {placed.node(name).place.phase for name in ring}  # type: ignore[union-attr]
        assert alike == {node.place.phase}
    for node in placed.nodes:
        if node.place is not None and node.place.phase == "decode":
            wrote, own = plan.processes_of("prefill"), plan.processes
            heads = range(60 * node.place.process // own, 60 * (node.place.process + 1) // own)
            parents = placed.parents(node.name, PHASE_SWITCH)
            found = {placed.node(name).place.process for name in parents}  # type: ignore[union-attr]
            assert found == {head * wrote // 60 for head in heads}, "who wrote its heads"


def evaluate(graph: ExecutionGraph) -> dict[str, int]:
    """Run a graph in which a model multiplies: each rank a share of the factor, summed in rings."""
    values: dict[str, int] = {}
    rings: dict[tuple[str | None, str], list[GraphNode]] = defaultdict(list)
    for node in graph.nodes:
        if node.place is not None:
            rings[node.origin, node.place.phase].append(node)
    for name in graph.ordered():
        node = graph.node(name)
        took = sum(values[parent] for parent in graph.parents(name, DATA))
        took += max((values[p] for p in graph.parents(name, PHASE_SWITCH)), default=0)
        phases = PHASES.get(node.kind, ()) if node.model else ()
        if node.place is None:
            values[name] = (took + 1) * 12 ** len(phases) if phases else took + len(name)
            continue
        first = node.place.phase == "prefill"
        share = [12 * (r + 1) // len(ranks) - 12 * r // len(ranks)
                 for ranks in [rings[node.origin, node.place.phase]]
                 for r in range(len(ranks))]  # fmt: skip
        values[name] = sum((took + first) * part for part in share)
    return values


@settings(max_examples=60, deadline=None)
@given(graphs(), plans)
def test_the_result_is_that_of_one_device(graph: ExecutionGraph, plan: ServicePlan) -> None:
    placed = evaluate(place(graph, {"llm": plan}))
    whole = evaluate(graph)
    for node in graph.nodes:
        name = node.name
        if node.name not in placed:
            name = f"{node.name}/{PHASES[node.kind][-1]}/0"
        assert placed[name] == whole[node.name]


def test_one_request_to_a_model() -> None:
    placed = place(serving_graph(("llm",)), {"llm": make_plan(2, 2, 1)})
    assert [node.name for node in placed.nodes] == [
        "llm/prefill/0", "llm/prefill/1", "llm/decode/0", "llm/decode/1",
    ]  # fmt: skip
    kinds = [edge.kind for edge in placed.edges]
    assert kinds == [ALL_REDUCE] * 4 + [PHASE_SWITCH] * 2


def test_a_plan_whose_cpus_do_not_fit_is_refused() -> None:
    wrong = ServicePlan(
        processes=2,
        prefill=PhasePlan(threads=2, cpus=(0, 1, 2)),
        decode=PhasePlan(threads=1, cpus=()),
    )
    with pytest.raises(WorkflowError, match="'llm': 2 processes of 2 threads"):
        place(serving_graph(("llm",)), {"llm": wrong})


@given(plans)
def test_the_plan_of_a_model_is_read_from_its_nodes(plan: ServicePlan) -> None:
    plan = replace(plan, kv_blocks=7, spin_iterations=11, prefill_token_threshold=13)
    searches = Placement(threads=3, cpus=(5, 6, 7))
    graph = place(serving_graph(("llm",), ("e",), searches), {"llm": plan, "e": make_plan(1, 2, 2)})
    again = read_graph(graph.to_json())
    assert read_plan(again, "llm") == plan
    encoder = read_plan(again, "e")
    assert encoder.prefill == encoder.decode == PhasePlan(threads=2, cpus=(0, 1))
    assert find_searches(again) == PhasePlan(threads=3, cpus=(5, 6, 7))


def test_shares_stand_beside_the_plan_and_change_nothing_of_it() -> None:
    searches, plan = Placement(threads=1), make_plan(2, 2, 1)
    plans = {"llm": plan, "e": make_plan(1, 2, 2)}
    graph = place(serving_graph(("llm",), ("e",), searches), plans)
    assert find_shares(graph) == {}
    shares = {"prefill": (0, 1), "decode": (0,), "searches": (2,), "encoders": (2, 3)}
    shared = read_graph(share_out(graph, shares).to_json())
    assert find_shares(shared) == shares and read_plan(shared, "llm") == plan
    assert share_out(shared, {}) == graph


PLACED = place(serving_graph(("llm",)), {"llm": make_plan(2, 2, 2)})


def moved(*names: str, **changes: object) -> ExecutionGraph:
    """Return PLACED with another placement of some nodes."""
    nodes = [
        replace(node, place=replace(node.place, **changes)) if node.name in names else node
        for node in PLACED.nodes
    ]
    return ExecutionGraph(nodes, PLACED.edges)


def test_a_node_that_is_placed_otherwise_is_read_so() -> None:
    assert read_plan(moved("llm/decode/1", cpus=(4, 5)), "llm").decode.cpus == (0, 1, 4, 5)
    assert read_plan(moved("llm/prefill/1", "llm/decode/1", node=3), "llm").nodes == (0, 3)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llm/prefill/1", {"process": 2}, "'llm/prefill/1' has not its own process"),
        ("llm/prefill/1", {"process": 0}, "'llm/prefill/1' has not its own process"),
        ("llm/prefill/1", {"phase": "decode", "process": 2}, "'llm/prefill/0' has not"),
        ("llm/decode/1", {"threads": 1}, "'llm/decode/1' has not"),
        ("llm/decode/1", {"cpus": (1,)}, "2 processes of 2 threads cannot have 3 PUs"),
        ("llm/decode/1", {"node": None}, "'llm/prefill/0' has not"),
    ],
)
def test_places_that_make_no_plan_are_refused(
    name: str, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(WorkflowError, match=said):
        read_plan(moved(name, **changes), "llm")
    for empty in (lambda: read_plan(PLACED, "other"), lambda: find_searches(PLACED)):
        with pytest.raises(WorkflowError, match="execution graph is wrong"):
            empty()
