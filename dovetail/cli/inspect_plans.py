"""The plans of an artifact, as `dovetail inspect` prints them.

In: the PlanChoice and the placed execution graph. Out: tables of candidates and pairs with their
scores, of the figures behind these with their sources, and of what runs where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from dovetail.cli.topo import show_batches, show_ids
from dovetail.ir.graph import GraphFile, GraphNode
from dovetail.ir.plans import ASKED, PairChoice, PlanCandidate, PlanChoice


def plan_tables(choice: PlanChoice) -> Iterator[Table | str]:
    """Yield what explains a choice: candidates, pairs, figures, notes."""
    if choice.source == ASKED:
        yield "the plan was asked for, so that no plans were compared"
        return
    yield f"plans {choice.source} for trace {choice.trace}, batch {show_batches(choice.batches)}"
    if choice.replay:
        yield f"replayed: {choice.replay}"
    best = choice.pairs[0]
    yield _candidate_table("prefill candidates", choice.prefill, best.prefill)
    yield _candidate_table("decode candidates", choice.decode, best.decode)
    yield _pair_table(choice)
    yield _figure_table(choice)
    yield from (f"cut: {text}" for text in choice.cut)
    yield from (f"note: {text}" for text in choice.notes)


def _table(title: str, columns: Sequence[str], numeric: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    return table


def _candidate_table(title: str, candidates: Sequence[PlanCandidate], chosen: int) -> Table:
    numeric = ("processes", "threads each", "simulated s", "measured s")
    columns = ("", *numeric[:2], "tree", "PUs", "memory nodes", *numeric[2:], "kernels")
    table = _table(f"{title}, seconds of the phase per request", columns, numeric)
    for i, item in enumerate(candidates):
        nodes = " ".join(",".join(map(str, process)) for process in item.nodes)
        table.add_row(
            "chosen" if i == chosen else "",
            str(item.processes),
            str(item.threads),
            item.levels,
            _show_cpus(item.cpus),
            nodes,
            _show(item.simulated),
            _show(item.measured),
            "searched" if item.tuned else "by rules",
        )
    return table


def _pair_table(choice: PlanChoice) -> Table:
    numeric = ("simulated s", "of that switch", "measured s")
    table = _table("pairs, seconds per request", ("", "prefill", "decode", *numeric), numeric)
    for i, pair in enumerate(choice.pairs):
        table.add_row("" if i else "chosen", *_describe(choice, pair))
    return table


def _describe(choice: PlanChoice, pair: PairChoice) -> tuple[str, ...]:
    phases = (choice.prefill[pair.prefill], choice.decode[pair.decode])
    shapes = (f"{c.processes} x {c.threads}" for c in phases)
    return (*shapes, _show(pair.simulated), _show(pair.switch), _show(pair.measured))


def _figure_table(choice: PlanChoice) -> Table:
    table = _table("figures of the contention model", ("figure", "value", "source"), ("value",))
    for name, figure in choice.figures.items():
        table.add_row(name, f"{figure.value:.4g}", figure.source)
    return table


def graph_table(name: str, graph: GraphFile) -> Table:
    """Return what runs where in an execution graph, and what each node leads to."""
    columns = ("node", "kind", "process", "threads", "PUs", "memory node", "leads to")
    table = _table(f"execution graph {name}", columns, ("process", "threads"))
    for node in graph.nodes:
        edges = (f"{e.target} ({e.kind})" for e in graph.edges if e.source == node.name)
        table.add_row(node.name, node.kind, *_show_place(node), ", ".join(edges))
    return table


def _show_place(node: GraphNode) -> tuple[str, ...]:
    place = node.place
    if place is None:
        return ("",) * 4
    memory = "its PUs' own" if place.node is None else str(place.node)
    return str(place.process), str(place.threads), _show_cpus(place.cpus), memory


def _show_cpus(cpus: Sequence[int]) -> str:
    return show_ids(cpus) or "any (unpinned)"


def _show(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.4f}"
