"""Schedule tables of all operators by rules: what serves where nothing was measured.

In: a model, a target, plans and a machine. Out: a table for each operator, phase and team.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dovetail.codegen.catalog import embed_kernels, model_kernels
from dovetail.codegen.isa.target import Target
from dovetail.compiler.rules.schedules import (
    GemmOp,
    apart_gemms,
    default_gemm_rows,
    gemm_ops,
    make_schedule,
)
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.encoder import EncoderSpec, Spec
from dovetail.ir.model import ModelSpec
from dovetail.ir.schedule import Row, ScheduleTable
from dovetail.runtime.native.step import PART_TOKENS
from dovetail.topology.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class Team:
    """What tables are made for: threads of each of `processes` that share a model, in a phase.

    plan: of the first process. phase: `any` where both phases have the same threads.
    """

    processes: int
    phase: str
    plan: PhasePlan


def plan_teams(plans: Iterable[ServicePlan]) -> tuple[Team, ...]:
    """Return the teams that need tables of their own, so that each plan finds its tables."""
    found: dict[tuple[int, int], dict[str, PhasePlan]] = {}
    for plan in plans:
        for name, phase in (("prefill", plan.prefill), ("decode", plan.decode)):
            first = PhasePlan(threads=phase.threads, cpus=phase.cpus[: phase.threads])
            key = plan.processes_of(name), phase.threads
            found.setdefault(key, {}).setdefault(name, first)
    return tuple(
        Team(processes, "any" if len(phases) > 1 else next(iter(phases)), [*phases.values()][-1])
        for (processes, _), phases in found.items()
    )


OP_NAMES = {"embed_packed": "embed"}
REDUCE = {"decode_attention": "decode_attention_merge"}
"""Kernels whose second phase, after a barrier, is another kernel."""
OWN_SCHEDULES = {"decode_attention": make_schedule(block_k=PART_TOKENS)}
"""Kernels that are no matrix products and yet have a schedule."""


def other_tables(spec: Spec, target: Target, phase: str, threads: int) -> Iterator[ScheduleTable]:
    """Yield the one-row tables of all operators that are no matrix product."""
    for op, name in (names := _other_kernels(spec, target)).items():
        if op in REDUCE.values():
            continue
        reduce = names.get(REDUCE.get(op, ""))
        schedule = OWN_SCHEDULES.get(op, make_schedule())
        row = Row(m_lo=1, kernel=name, schedule=schedule, reduce_kernel=reduce)
        yield ScheduleTable(
            target=target.name,
            op=op,
            n=0,
            k=0,
            dtype="f32",
            phase=phase,
            threads=threads,
            rows=(row,),
        )


def _other_kernels(spec: Spec, target: Target) -> dict[str, str]:
    """Return the kernel of each operator, those of embeddings by the table that they read."""
    found = {OP_NAMES.get(r.kernel, r.kernel): r.name for r in model_kernels(spec, target)}
    tables = {} if isinstance(spec, EncoderSpec) else embed_kernels(spec, target)
    return found | {op: request.name for op, request in tables.items()}


def gemm_table(
    op: GemmOp, target: Target, phase: str, threads: int, rows: Sequence[Row]
) -> ScheduleTable:
    """Return the table of one matrix product."""
    return ScheduleTable(
        target=target.name,
        op=op.op,
        n=op.n,
        k=op.k,
        dtype=op.dtype,
        phase=phase,
        threads=threads,
        rows=tuple(rows),
    )


def unique_tables(tables: Iterable[ScheduleTable]) -> tuple[ScheduleTable, ...]:
    """Return the first table of each key: teams of as many threads share some."""
    found: dict[tuple[object, ...], ScheduleTable] = {}
    for table in tables:
        key = (table.target, table.op, table.n, table.k, table.dtype, table.phase, table.threads)
        found.setdefault(key, table)
    return tuple(found.values())


def default_tables(
    spec: Spec,
    target: Target,
    plans: Iterable[ServicePlan],
    hardware: HardwareSpec,
) -> tuple[ScheduleTable, ...]:
    """Return schedule tables of every operator of `spec`, for all teams of `plans`."""
    teams = plan_teams(plans)
    tables: list[ScheduleTable] = []
    for team in teams:
        tables += _products(gemm_ops(spec, team.processes), target, team, hardware)
        tables += other_tables(spec, target, team.phase, team.plan.threads)
    if isinstance(spec, ModelSpec) and spec.adapters:
        tables += apart_tables(spec, target, teams, hardware)
    return unique_tables(tables)


def apart_tables(
    spec: Spec, target: Target, teams: Iterable[Team], hardware: HardwareSpec
) -> tuple[ScheduleTable, ...]:
    """Return the tables of products that give gates and ups apart, for adapters or own gates."""
    return unique_tables(
        table
        for team in teams
        for table in _products(apart_gemms(spec, team.processes), target, team, hardware)
    )


def _products(
    ops: Iterable[GemmOp], target: Target, team: Team, hardware: HardwareSpec
) -> Iterator[ScheduleTable]:
    threads = team.plan.threads
    for op in ops:
        rows = default_gemm_rows(op, target, threads, hardware)
        yield gemm_table(op, target, team.phase, threads, rows)
