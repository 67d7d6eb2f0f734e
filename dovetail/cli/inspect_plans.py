"""The plans of an artifact, as `dovetail inspect` prints them.

In: the PlanChoice and the placed execution graph. Out: tables of candidates and pairs with their
scores, of the figures behind these with their sources, and of what runs where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from dovetail.cli.report import make_table
from dovetail.ir.graph import GraphFile, GraphNode
from dovetail.ir.plans import ASKED, DivisionChoice, PairChoice, PlanCandidate, PlanChoice
from dovetail.topology.division import ENOUGH
from dovetail.topology.textfile import show_ids

EACH_KIND = "a request of each kind"
WHY_CHOSEN = (
    f"chosen: of the divisions at most {ENOUGH:.0%} slower than the fastest, the one whose busiest "
    "worker has least to do"
)


def plan_tables(
    choice: PlanChoice, divisions: Mapping[str, Sequence[DivisionChoice]] | None = None
) -> Iterator[Table | str]:
    """Yield what explains a choice: candidates, pairs, figures, notes.

    divisions: by load, by default those of the choice.
    """
    if choice.source == ASKED:
        yield "the plan was given by the user; no plans were compared"
        return
    batches = ", ".join(map(str, choice.batches))
    yield f"plans {choice.source} for trace {choice.trace}, batch {batches}"
    if choice.replay:
        yield f"replayed: {choice.replay}"
    best = choice.pairs[0]
    yield _candidate_table("prefill candidates", choice.prefill, best.prefill)
    yield _candidate_table("decode candidates", choice.decode, best.decode)
    yield _pair_table(choice)
    for load, those in (divisions or {EACH_KIND: choice.divisions}).items():
        yield _division_table(those, load)
    yield WHY_CHOSEN
    yield _figure_table(choice)
    yield from (f"cut: {text}" for text in choice.cut)
    yield from (f"note: {text}" for text in choice.notes)


def _candidate_table(title: str, candidates: Sequence[PlanCandidate], chosen: int) -> Table:
    columns = ("", ">processes", ">threads each", "tree", "PUs", "memory nodes", ">simulated s")
    rows = [
        (
            "chosen" if i == chosen else "",
            str(item.processes),
            str(item.threads),
            item.levels,
            show_cpus(item.cpus),
            " ".join(",".join(map(str, process)) for process in item.nodes),
            _show(item.simulated),
            _show(item.measured),
            "searched" if item.tuned else "by rules",
            "" if i == chosen else explain_loss(item, candidates[chosen]),
        )
        for i, item in enumerate(candidates)
    ]
    title = f"{title}, seconds of the phase per request"
    return make_table(title, (*columns, ">measured s", "kernels", "why not"), rows)


def _pair_table(choice: PlanChoice) -> Table:
    columns = ("", "prefill", "decode", ">simulated s", ">of that switch", ">measured s", "why not")
    rows = []
    for i, pair in enumerate(choice.pairs):
        phases = choice.prefill[pair.prefill], choice.decode[pair.decode]
        shapes = (f"{plan.processes} x {plan.threads}" for plan in phases)
        figures = map(_show, (pair.simulated, pair.switch, pair.measured))
        why = explain_loss(pair, choice.pairs[0]) if i else ""
        rows.append(("" if i else "chosen", *shapes, *figures, why))
    return make_table("pairs, seconds per request", columns, rows)


def explain_loss(lost: PlanCandidate | PairChoice, chosen: PlanCandidate | PairChoice) -> str:
    """Return why another candidate, or pair of them, was preferred."""
    for how, mine, best in (
        ("measured", lost.measured, chosen.measured),
        ("simulated", lost.simulated, chosen.simulated),
    ):
        if mine and best and mine >= best:
            return f"{mine / best:.2f}x the time, {how}"
        if mine and best and how == "measured":
            return "alone as fast; the pair decides"
    if lost.measured is None and chosen.measured is None:
        return "not measured: only that may prefer fewer cores"
    return "not measured" if lost.measured is None else ""


def _division_table(divisions: Sequence[DivisionChoice], load: str) -> Table:
    """Return what each stage keeps while others work, and what a load takes by that."""
    title = f"division of the CPU for {load}; the first one is chosen"
    stages = list(divisions[0].shares) if divisions else []
    columns = (
        *(f"PUs of {stage}" for stage in stages),
        ">simulated s",
        ">seconds of the busiest worker",
    )
    rows = []
    for each in divisions:
        cpus = (show_ids(sorted(each.shares[stage])) for stage in stages)
        rows.append((*cpus, _show(each.seconds), _show(each.busiest)))
    return make_table(title, columns, rows)


def _figure_table(choice: PlanChoice) -> Table:
    figures = choice.figures.items()
    rows = [(name, f"{figure.value:.4g}", figure.source) for name, figure in figures]
    return make_table("figures of the contention model", ("figure", ">value", "source"), rows)


def graph_table(name: str, graph: GraphFile) -> Table:
    """Return what runs where in an execution graph, and what each node leads to."""
    columns = ("node", "kind", "device", ">process", ">threads", "PUs", "memory node", "leads to")
    rows = []
    for node in graph.nodes:
        edges = (f"{e.target} ({e.kind})" for e in graph.edges if e.source == node.name)
        rows.append((node.name, node.kind, *_show_place(node), ", ".join(edges)))
    return make_table(f"execution graph {name}", columns, rows)


def _show_place(node: GraphNode) -> tuple[str, ...]:
    place = node.place
    if place is None:
        return ("",) * 5
    memory = "its PUs' own" if place.node is None else str(place.node)
    process, threads = str(place.process), str(place.threads)
    return place.device, process, threads, show_cpus(place.cpus), memory


def show_cpus(cpus: Sequence[int]) -> str:
    """Return the PUs of a phase."""
    return show_ids(cpus) or "any (unpinned)"


def _show(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.4f}"
