"""`dovetail topo`: what a machine is, and how it would serve a model.

In: this machine, a file of another one or a line that describes one; a model to plan for.
Out: its TopoTree, and the candidates of both phases with their scores and the winner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from dovetail.cli.options import WeightDtype
from dovetail.cli.report import (
    print_json,
    report_errors,
    show_bytes,
    show_count,
    stdout_console,
    writing,
)
from dovetail.ir.files import write_whole

if TYPE_CHECKING:
    from dovetail.codegen.isa.target import Target
    from dovetail.ir.model import ModelSpec
    from dovetail.topology.report import CandidateReport, PlanReport, TopologyReport, TreeNode
    from dovetail.topology.values import HardwareSpec

CORE_KINDS = ("core", "pu")


@report_errors
def topo_command(
    hardware: Annotated[
        str,
        typer.Option(
            help="auto; a file (hwloc XML, output of lscpu -p or -J, hardware.json); or a line "
            "such as 'package:2 numa:2 l3:4 core:4 pu:2'."
        ),
    ] = "auto",
    plan: Annotated[
        str | None,
        typer.Option(help="Plan for this model: a model directory, or a name such as llama-3-8b."),
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="A trace of prompt and output lengths, CSV or JSON lines.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded together; default: 1, 2, .. 16.")
    ] = None,
    weight_dtype: WeightDtype = "auto",
    every_divisor: Annotated[
        bool, typer.Option("--every-divisor", help="Groups of any size, not of powers of two.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Also draw the tree, with the decode plan, to this file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a machine's topology, and with --plan the best plans of a model for it."""
    from dovetail.topology.hardware import read_hardware
    from dovetail.topology.report import report_topology

    spec = read_hardware(hardware)
    planned = None
    if plan is not None:
        planned = _plan(hardware, spec, plan, workload, batch, weight_dtype, every_divisor)
    report = report_topology(spec, planned)
    if json:
        print_json(report)
    else:
        print_topology(report, stdout_console())
    if svg is not None:
        with writing(svg):
            write_whole(svg, _draw(report).encode())


def _plan(
    source: str,
    spec: HardwareSpec,
    model: str,
    workload: Path | None,
    batch: int | None,
    weight_dtype: str,
    every_divisor: bool,
) -> PlanReport:
    from dovetail.compiler.calibrate import figures_of
    from dovetail.compiler.request import MAX_STEP_SEQUENCES, choose_targets
    from dovetail.compiler.service import sample_trace, within_quota
    from dovetail.compiler.workload import read_workload
    from dovetail.topology.plan import PlanBudget, plan_topology
    from dovetail.topology.report import report_plan

    trace = sample_trace(read_workload(workload), MAX_STEP_SEQUENCES, batch)
    (target,) = choose_targets((), spec)
    dimensions = _read_model(model, weight_dtype, target)
    figures = figures_of(source, spec, dimensions, target, trace, measured=False)
    usable, notes = within_quota(spec)
    found = plan_topology(
        usable,
        dimensions,
        trace,
        parameters=figures,
        budget=PlanBudget(every_divisor=every_divisor),
    )
    return report_plan(found, model, notes)


def _draw(report: TopologyReport) -> str:
    from dovetail.topology.picture import draw_tree

    if report.plan is None:
        return draw_tree(report.tree, {}, report.cpu)
    ranks = {pu: rank for rank, item in enumerate(report.plan.decode.ranks) for pu in item.pus}
    plan = f"decode plan for {report.plan.model}: {_show_processes(report.plan.decode)}"
    return draw_tree(report.tree, ranks, plan)


def _read_model(name: str, weight_dtype: str, target: Target) -> ModelSpec:
    from dovetail.compiler.model_spec import read_dimensions
    from dovetail.compiler.weight_dtype import resolve_weight_dtype
    from dovetail.topology.presets import preset_model

    if Path(name).exists():
        return read_dimensions(name, weight_dtype=weight_dtype, target=target)
    return preset_model(name, weight_dtype=resolve_weight_dtype(weight_dtype, "bf16", target))


def print_topology(report: TopologyReport, console: Console) -> None:
    """Print a report as a tree and tables."""
    console.print(_machine_tree(report))
    notes = report.notes if report.plan is None else report.plan.notes
    for note in notes:
        console.print(f"note: {note}")
    if report.plan is not None:
        _print_plan(report.plan, console)


def _machine_tree(machine: TopologyReport) -> Tree:
    facts = (
        f"{machine.cpu} ({machine.arch}): {show_count(machine.sockets, 'socket')}, "
        f"{show_count(machine.numa_nodes, 'NUMA node')} ({machine.memory_only_nodes} memory only), "
        f"{show_count(machine.l3_groups, 'L3 group')}, {show_count(machine.cores, 'core')}, "
        f"{show_count(machine.pus, 'PU')} ({machine.allowed_pus} allowed)"
    )
    memory = show_bytes(machine.memory_bytes) if machine.memory_bytes else "unknown memory"
    quota = f", quota {machine.cpu_quota:.2f} cores" if machine.cpu_quota else ""
    tree = Tree(f"{facts}, {memory}{quota}")
    _grow(tree, machine.tree)
    for node in machine.nodes:
        if not node.pus:
            tree.add(f"NUMA node {node.id}: {show_bytes(node.memory_bytes)} {node.kind}, no PUs")
    for device in machine.accelerators:
        tree.add(f"{device.name} {device.model}")
    return tree


def _grow(tree: Tree, node: TreeNode) -> None:
    if _only_cores(node):
        tree.label = f"{tree.label}: {_describe_cores(node)}"
        return
    for number, child in enumerate(node.children):
        _grow(tree.add(f"{child.kind} {number}"), child)


def _only_cores(node: TreeNode) -> bool:
    return all(
        item.kind in CORE_KINDS for child in node.children for item in (child, *child.children)
    )


def _describe_cores(node: TreeNode) -> str:
    threads = len(node.children[0].children) if node.children else 0
    smt = f" of {show_count(threads, 'PU')}" if threads else ""
    return f"{show_count(len(node.children), 'core')}{smt}, PUs {show_ids(_pus(node))}"


def _pus(node: TreeNode) -> Iterable[int]:
    if node.pu is not None:
        yield node.pu
    for child in node.children:
        yield from _pus(child)


def _show_processes(plan: CandidateReport) -> str:
    return f"{show_count(plan.processes, 'process')} of {show_count(plan.threads, 'thread')}"


def show_batches(batches: Iterable[int]) -> str:
    """Return how many sequences decode together: `1, 2, 4`."""
    return ", ".join(map(str, batches))


def show_ids(ids: Iterable[int]) -> str:
    """Return ids as the kernel lists them: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _print_plan(plan: PlanReport, console: Console) -> None:
    console.print(
        f"\nplan for {plan.model}, batch {show_batches(plan.batches)}, trace {plan.trace}"
    )
    console.print(f"{plan.evaluation}; every figure and its source are in --json")
    console.print(_candidate_table("prefill", plan.prefill_candidates, plan.prefill))
    console.print(_candidate_table("decode", plan.decode_candidates, plan.decode))
    for phase, winner in (("prefill", plan.prefill), ("decode", plan.decode)):
        console.print(f"{phase}: {_show_processes(winner)}")
        for rank, process in enumerate(winner.ranks):
            nodes = show_ids(process.memory_nodes)
            console.print(f"  rank {rank}: PUs {show_ids(process.pus)}, memory node {nodes}")
    score = plan.score
    console.print(
        f"{plan.seconds_per_request:.3f} s per request: prefill {score.prefill:.3f}, decode "
        f"{score.decode:.3f}, switch {score.switch:.3f}"
    )
    search = plan.search
    console.print(
        f"looked at {search.group_trees} of {search.group_trees_total} group patterns, "
        f"{search.trees_scored} trees, {search.configurations} configurations"
    )
    for text in search.cut:
        console.print(f"cut: {text}")


def _candidate_table(
    phase: str, candidates: Sequence[CandidateReport], winner: CandidateReport
) -> Table:
    table = Table(title=f"{phase} candidates", title_justify="left")
    for column in ("", "processes", "threads each", "tree", "memory nodes", "s per request"):
        numeric = column in ("processes", "threads each", "s per request")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for item in candidates if winner in candidates else (*candidates, winner):
        nodes = [show_ids(process.memory_nodes) for process in item.ranks]
        table.add_row(
            "chosen" if item == winner else "",
            str(item.processes),
            str(item.threads),
            item.tree,
            " ".join(dict.fromkeys(nodes)),
            f"{item.seconds:.4f}",
        )
    return table
