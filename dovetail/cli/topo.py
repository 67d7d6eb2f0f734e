"""`dovetail topo`: what a machine is, and how it would serve a model.

In: this machine, a file of another one or a line that describes one; a model to plan for.
Out: its TopoTree, and the candidates of both phases with their scores and the winner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace
from rich.console import RenderableType
from rich.tree import Tree

from dovetail.cli.options import AsJson, Indexes, Mixed, flag_of
from dovetail.cli.report import show_bytes, show_count, show_report, writing
from dovetail.errors import SpecError
from dovetail.ir.files import write_whole

if TYPE_CHECKING:
    from dovetail.codegen.isa.target import Target
    from dovetail.ir.model import ModelSpec
    from dovetail.topology.report import PlanReport, TopologyReport, TreeNode
    from dovetail.topology.values import HardwareSpec

SHOWN_DIVISIONS = 4
CORE_KINDS = ("core", "pu")


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What is planned for a machine."""

    PANEL = "Plan"

    plan: Annotated[
        str | None, "Plan for this model: a model directory, or a name such as llama-3-8b."
    ] = None
    workload: Annotated[Path | None, "Trace of prompt and output lengths, CSV or JSON lines."] = (
        None
    )
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded together; default 1, 2, .. 16.")
    ] = None
    weight_dtype: Annotated[str, "Type of weights: auto, f32, bf16, int8 or int4."] = "auto"
    every_divisor: Annotated[bool, "Try groups of any size, not only powers of two."] = False
    mix: Mixed = None
    index: Indexes = None

    def check(self) -> None:
        """Raise SpecError for options of a plan where nothing is planned."""
        given = [
            flag_of(n) for n, v in vars(self).items() if v != [] and v != getattr(PlanFlags, n)
        ]
        if self.plan is None and given:
            raise SpecError(f"{given[0]} only works with --plan MODEL")


def topo_command(
    hardware: Annotated[
        str,
        "Machine: auto (this one); a file (hwloc XML, output of lscpu -p or -J, hardware.json); or "
        "a line such as 'package:2 numa:2 l3:4 core:4 pu:2'.",
    ] = "auto",
    *,
    planned: PlanFlags,
    svg: Annotated[Path | None, "Draw the tree, with the decode plan, in this file."] = None,
    json: AsJson = False,
) -> None:
    """Show a machine's topology, and with --plan the best plans of a model for it."""
    from dovetail.topology.hardware import read_hardware
    from dovetail.topology.report import report_topology

    planned.check()
    spec = read_hardware(hardware)
    report = report_topology(spec, _plan(hardware, spec, planned) if planned.plan else None)
    show_report(report, describe_topology, json=json)
    if svg is not None:
        with writing(svg):
            write_whole(svg, _draw(report).encode())


def _plan(source: str, spec: HardwareSpec, asked: PlanFlags) -> PlanReport:
    from dovetail.compiler.plan.calibrate import figures_of
    from dovetail.compiler.plan.division import MIXES, divide_load, read_mix
    from dovetail.compiler.plan.service import (
        describe_choice,
        sample_trace,
        simulated_choice,
        whole_first,
        within_quota,
    )
    from dovetail.compiler.request import MAX_STEP_SEQUENCES, choose_targets
    from dovetail.compiler.rules.workload import read_workload
    from dovetail.runtime.index.manifest import read_manifest
    from dovetail.topology.plan import PlanBudget, plan_topology
    from dovetail.topology.report import PlanReport

    trace = sample_trace(read_workload(asked.workload), MAX_STEP_SEQUENCES, asked.batch)
    (target,) = choose_targets((), spec)
    model = str(asked.plan)
    dimensions = _read_model(model, asked.weight_dtype, target)
    figures = figures_of(source, spec, dimensions, target, trace, measured=False)
    usable, notes = within_quota(spec)
    found = plan_topology(
        usable,
        dimensions,
        trace,
        parameters=figures,
        budget=PlanBudget(every_divisor=asked.every_divisor),
    )
    indexes = [read_manifest(folder) for folder in asked.index or ()]
    mixes = MIXES if asked.mix is None else (read_mix(asked.mix),)
    loads = {
        str(mix): divide_load(usable, dimensions, trace, mix.of(indexes), figures) for mix in mixes
    }
    choice = simulated_choice(found, notes, every=True)
    whole = whole_first(choice, usable)
    if whole.pairs[0] != choice.pairs[0]:
        note = f"a compile that measures nothing takes all cores: {describe_choice(whole)}"
        choice = replace(choice, notes=(*choice.notes, note))
    return PlanReport(model, choice, found.report, loads)


def _draw(report: TopologyReport) -> str:
    from dovetail.topology.picture import draw_tree

    if report.plan is None:
        return draw_tree(report.tree, {}, report.cpu)
    choice = report.plan.choice
    decode = choice.decode[choice.pairs[0].decode]
    ranks = {pu: i // decode.threads for i, pu in enumerate(decode.cpus)}
    team = f"{show_count(decode.processes, 'process')} of {show_count(decode.threads, 'thread')}"
    return draw_tree(report.tree, ranks, f"decode plan for {report.plan.model}: {team}")


def _read_model(name: str, weight_dtype: str, target: Target) -> ModelSpec:
    from dovetail.compiler.formats.weight_dtype import resolve_weight_dtype
    from dovetail.compiler.models.spec import read_dimensions
    from dovetail.topology.presets import preset_model

    if Path(name).exists():
        return read_dimensions(name, weight_dtype=weight_dtype, target=target)
    return preset_model(name, weight_dtype=resolve_weight_dtype(weight_dtype, "bf16", target))


def describe_topology(report: TopologyReport) -> Iterator[RenderableType]:
    """Yield a report as a tree and tables."""
    yield _machine_tree(report)
    if report.plan is None:
        yield from (f"note: {note}" for note in report.notes)
    else:
        yield from _describe_plan(report.plan)


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
    below = (item for child in node.children for item in (child, *child.children))
    if all(item.kind in CORE_KINDS for item in below):
        tree.label = f"{tree.label}: {_describe_cores(node)}"
        return
    for number, child in enumerate(node.children):
        _grow(tree.add(f"{child.kind} {number}"), child)


def _describe_cores(node: TreeNode) -> str:
    from dovetail.topology.textfile import show_ids

    threads = len(node.children[0].children) if node.children else 0
    smt = f" of {show_count(threads, 'PU')}" if threads else ""
    return f"{show_count(len(node.children), 'core')}{smt}, PUs {show_ids(_pus(node))}"


def _pus(node: TreeNode) -> Iterable[int]:
    if node.pu is not None:
        yield node.pu
    for child in node.children:
        yield from _pus(child)


def _describe_plan(plan: PlanReport) -> Iterator[RenderableType]:
    from dovetail.cli.inspect_plans import plan_tables

    yield f"\nplan for {plan.model}"
    shown = {
        load: (*divisions[:-1][:SHOWN_DIVISIONS], divisions[-1])
        for load, divisions in plan.divisions.items()
    }
    yield from plan_tables(plan.choice, shown)
    search = plan.search
    yield (
        f"looked at {search.group_trees} of {search.group_trees_total} group patterns, "
        f"{search.trees_scored} trees, {search.configurations} configurations"
    )
