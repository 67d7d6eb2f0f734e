"""The short measured search: a handful of candidate schedules per matrix product and M.

In: a model, plans, machine, a `Measurer` and a budget in seconds. Out: a ScheduleFile whose
measured rows beat the default ones. Choosing is pure; only the `Measurer` touches the clock, and
keeps the records of all trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.compiler.measure import Candidate, GemmCase, Measurement, Measurer
from dovetail.compiler.schedules import (
    RULE_TILES,
    SPREAD_PREFETCH,
    START_PREFETCH,
    GemmOp,
    default_gemm_rows,
    default_row,
    gemm_ops,
    gemm_requests,
    gemm_table,
    merge_rows,
    other_tables,
    phase_plans,
    reduce_kernel,
    tile_schedule,
)
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import SpecError
from dovetail.ir.model import ModelSpec
from dovetail.ir.schedule import Row, ScheduleFile, ScheduleTable
from dovetail.ir.tuning import OK
from dovetail.topology.hardware import HardwareSpec

POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""M that are measured; an M between two points is served by the winner at the larger one."""
BULK = 128
"""From this M on only the winners so far are tried again: every run is long, winners are few."""
ROUNDS, BULK_ROUNDS = 7, 3
CANDIDATE_GAIN = 0.03
"""A challenger must beat the default schedule by this share, twice: less is noise."""
CONFIRM_ROUNDS = 9
EFFORTS = ("fast",)

Progress = Callable[[int, int, str], None]


# ---- choosing (pure) ----


def prefetch_choices(rows: int, m: int) -> tuple[int, ...]:
    """Return the prefetch values worth trying; a lone row tile cannot share out the next group."""
    return (0, START_PREFETCH, 1024, 4096) if m <= rows else (1024, 4096, SPREAD_PREFETCH)


def candidates_at(
    op: GemmOp, target: Target, m: int, *, threads: int, l3_bytes: int
) -> tuple[Candidate, ...]:
    """Return the default schedule for `m` rows first, then every tile with each prefetch value."""
    default = default_row(op, target, m, threads, l3_bytes)
    found = [Candidate(default.kernel, default.schedule)]
    for tile in RULE_TILES[op.kind, target.isa]:
        for prefetch in prefetch_choices(tile.rows, m):
            schedule = tile_schedule(
                op, tile, m, threads=threads, l3_bytes=l3_bytes, prefetch=prefetch
            )
            found.append(Candidate(op.kernel(target, tile), schedule))
    return tuple(dict.fromkeys(found))


def reused(candidates: Sequence[Candidate], ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the default and those candidates whose like were the best two at smaller M."""
    return tuple(dict.fromkeys((candidates[0], *ranked[:2])))


def ranking(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return the correct ones, best first by lower quartile: other processes disturb it least.

    The first one given, the default, keeps its place unless beaten by CANDIDATE_GAIN.
    """
    fine = [m for m in measurements if m.status == OK]
    default = measurements[0].candidate if measurements else None

    def cost(found: Measurement) -> float:
        return found.low * (1 - CANDIDATE_GAIN if found.candidate == default else 1)

    return tuple(sorted(fine, key=cost))


def rows_from(
    op: GemmOp, winners: Mapping[int, Measurement], defaults: Sequence[Row]
) -> tuple[Row, ...]:
    """Return a total cover: each winner serves (previous point, its point], defaults the rest."""
    if not winners:
        return tuple(defaults)
    rows: list[Row] = []
    low = 1
    for point in sorted(winners):
        best = winners[point]
        rows.append(
            Row(
                m_lo=low,
                kernel=best.candidate.kernel,
                schedule=best.candidate.schedule,
                reduce_kernel=reduce_kernel(op.kind, op.dtype, best.candidate.schedule),
                source="measured",
                seconds=best.seconds,
            )
        )
        low = point + 1
    beyond = [row for row in defaults if row.m_lo >= low]
    at = [row for row in defaults if row.m_lo < low]
    if max(winners) < POINTS[-1]:
        rows.append(msgspec.structs.replace(at[-1], m_lo=low))
        rows += [row for row in beyond if row.m_lo > low]
    return merge_rows(rows)


# ---- measuring ----


@dataclass(frozen=True, slots=True)
class SearchSetting:
    """What all searches of one run share."""

    target: Target
    hardware: HardwareSpec
    measurer: Measurer

    @property
    def l3_bytes(self) -> int:
        """Bytes of the last-level cache."""
        return self.hardware.cache_bytes(3)


def search_op(
    setting: SearchSetting, op: GemmOp, phase: PhasePlan, points: Sequence[int], seconds: float
) -> dict[int, Measurement]:
    """Return the winner at each point that fits into `seconds`."""
    end = setting.measurer.now() + seconds
    winners: dict[int, Measurement] = {}
    best: tuple[Candidate, ...] = ()
    for left, m in zip(range(len(points), 0, -1), points, strict=True):
        share = (end - setting.measurer.now()) / left
        if share <= 0:
            break
        candidates = candidates_at(
            op, setting.target, m, threads=phase.threads, l3_bytes=setting.l3_bytes
        )
        if m >= BULK and best:
            candidates = reused(candidates, best)
        case = _case(op, m, phase)
        found, confirmed = _contest(setting.measurer, case, candidates, share)
        best = tuple(measurement.candidate for measurement in ranking(found))
        ranked = ranking(confirmed or found)
        if ranked:
            winners[m] = ranked[0]
    return winners


def _contest(
    measurer: Measurer, case: GemmCase, candidates: Sequence[Candidate], seconds: float
) -> tuple[tuple[Measurement, ...], tuple[Measurement, ...]]:
    """Time all candidates, then a challenger that came out first once more against the default."""
    rounds = BULK_ROUNDS if case.m >= BULK else ROUNDS
    found = measurer.measure(case, candidates, rounds=rounds, seconds=seconds)
    ranked = ranking(found)
    if case.m >= BULK or not ranked or ranked[0].candidate == candidates[0]:
        return found, ()
    pair = (candidates[0], ranked[0].candidate)
    return found, measurer.measure(case, pair, rounds=CONFIRM_ROUNDS, seconds=seconds)


def _case(op: GemmOp, m: int, phase: PhasePlan) -> GemmCase:
    return GemmCase(
        kind=op.kind,
        n=op.n,
        k=op.k,
        m=m,
        dtype=op.dtype,
        threads=phase.threads,
        cpus=phase.cpus,
    )


def tuning_library(spec: ModelSpec, target: Target, cache: Path | None = None) -> BuiltLibrary:
    """Return the library that the search measures with: every micro-kernel of the weights' dtype.

    It depends on target and dtype only, so that the build cache has it for the next model.
    """
    kernels = gemm_requests((spec.weight_dtype,), target)
    return build_library(LibrarySpec(target, kernels, name="tuning", tvm_ffi=False), cache)


def phase_points(op: GemmOp, phase: str, max_tokens: int, max_sequences: int) -> tuple[int, ...]:
    """Return the M measured for `op`: decode steps and the head see a row per sequence at most."""
    most = max_sequences if phase == "decode" or op.op == "head" else max_tokens
    return tuple(m for m in POINTS if m < 2 * most)


def search_tables(
    spec: ModelSpec,
    plan: ServicePlan,
    hardware: HardwareSpec,
    measurer: Measurer,
    *,
    target: Target,
    effort: str = "fast",
    budget_seconds: float = 20.0,
    max_tokens: int = 512,
    max_sequences: int = 32,
    progress: Progress | None = None,
) -> ScheduleFile:
    """Return schedule tables for `spec`, timed by a `measurer` of its `tuning_library`.

    `budget_seconds` bounds the search on the measurer's clock; `max_tokens` and `max_sequences` are
    the largest step of the workload. `progress` gets (products done, all, the next one's name).
    Raises SpecError for an unknown `effort`.
    """
    if effort not in EFFORTS:
        raise SpecError(f"unknown effort {effort!r}; choose one of {', '.join(EFFORTS)}")
    work = [(p, phase, op) for p, phase in phase_plans(plan) for op in gemm_ops(spec)]
    tables: list[ScheduleTable] = []
    known: dict[tuple[GemmOp, int, tuple[int, ...]], dict[int, Measurement]] = {}
    end = measurer.now() + budget_seconds
    setting = SearchSetting(target, hardware, measurer)
    for i, (name, phase, op) in enumerate(work):
        if progress:
            progress(i, len(work), f"{op.op} {op.n}x{op.k}")
        points = phase_points(op, name, max_tokens, max_sequences)
        like = (replace(op, op=""), phase.threads, points)
        if like not in known:
            share = (end - measurer.now()) / (len(work) - i)
            known[like] = search_op(setting, op, phase, points, share)
        defaults = default_gemm_rows(op, target, phase.threads, setting.l3_bytes)
        rows = rows_from(op, known[like], defaults)
        tables.append(gemm_table(op, target, name, phase.threads, rows))
    for name, phase in phase_plans(plan):
        tables += other_tables(spec, target, name, phase.threads)
    return ScheduleFile(tables=tuple(tables))
