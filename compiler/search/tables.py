"""Schedule tables of a whole model by search: one budget, many products.

In: a model's payload, plans, machine, a `Measurer` and an effort. Out: tables whose rows say where
they come from. Choosing is pure; only the `Measurer` touches the clock, and keeps the records of
all trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec
from dovetail.compiler.formats.quantising import Advance
from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.rules.payload import Payload
from dovetail.compiler.rules.schedules import GemmOp, gemm_formats, gemm_kinds, gemm_requests
from dovetail.compiler.rules.tables import gemm_table, other_tables, plan_teams, unique_tables
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.panels import choose_panels, keep_panels
from dovetail.compiler.search.policy import DEFAULT, Choice, Policy, SearchTask
from dovetail.compiler.search.rows import find_alone, make_rows, measure_losses
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.encoder import Spec
from dovetail.ir.schedule import Row, ScheduleTable
from dovetail.topology.hardware import HardwareSpec

POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
DENSE_POINTS = (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *POINTS[12:])
"""M that are searched; the M between two of them are served by the larger one."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search, in how many seconds by default.

    attention: choose the attention kernels by measuring, too. loss_points: M per product whose
    exact optimum is sought. loss_share: of the seconds, kept for that. learn: let the cost model
    learn from one product for the next, which takes seconds. plan_slack: search for all plans that
    are simulated to take at most so many times what the best one takes.
    """

    seconds: float
    points: tuple[int, ...]
    policy: Sandwich
    rounds: int
    loss_points: int
    loss_share: float
    learn: bool
    attention: bool
    plan_slack: float
    improbable: float


EFFORTS: dict[str, Effort] = {
    "fast": Effort(
        seconds=36.0,
        points=POINTS,
        policy=Sandwich(breadth=10, growing=2, slack=0.15),
        rounds=3,
        loss_points=1,
        loss_share=0.1,
        learn=False,
        attention=False,
        plan_slack=1.3,
        improbable=0.05,
    ),
    "full": Effort(
        seconds=720.0,
        points=DENSE_POINTS,
        policy=Sandwich(breadth=32, growing=6, slack=0.3),
        rounds=5,
        loss_points=6,
        loss_share=0.2,
        learn=True,
        attention=True,
        plan_slack=2.0,
        improbable=0.0,
    ),
}
"""`none` is not among them: it searches nothing."""


def tuning_library(spec: Spec, target: Target) -> LibrarySpec:
    """Return the library that the search measures with: every micro-kernel of the weights' formats.

    It depends on target, dtype and kinds of products only, so the build cache has it for the next.
    """
    kernels = gemm_requests(gemm_formats(spec), target, gemm_kinds(spec))
    return LibrarySpec(target, kernels, name="tuning", tvm_ffi=False)


def search_points(largest: int, points: Sequence[int]) -> tuple[int, ...]:
    """Return the points up to the first that serves M = `largest`."""
    return tuple(m for i, m in enumerate(points) if i == 0 or points[i - 1] < largest)


def search_tables(
    spec: Spec,
    payload: Payload,
    plans: Sequence[ServicePlan],
    hardware: HardwareSpec,
    measurer: Measurer,
    *,
    target: Target,
    effort: str = "fast",
    budget_seconds: float | None = None,
    choose_policy: Callable[[SearchTask], Policy] | None = None,
    progress: Advance | None = None,
) -> tuple[ScheduleTable, ...]:
    """Return schedule tables for `spec`, timed by a `measurer` of its `tuning_library`.

    `budget_seconds` bounds the search on the measurer's clock, by default the effort's own.
    `choose_policy` is asked before each product; by default the effort's policy serves all.
    `progress` gets products done, and all.
    """
    seconds = EFFORTS[effort].seconds if budget_seconds is None else budget_seconds
    choose = choose_policy or (lambda _: EFFORTS[effort].policy)
    search = ModelSearch(EFFORTS[effort], choose, measurer, measurer.now() + seconds)
    work = search_tasks(payload, plans, hardware, target, EFFORTS[effort])
    search.plan(task for _, task in work)
    tables: list[ScheduleTable] = []
    for i, (name, task) in enumerate(work):
        if progress:
            progress(i, len(work))
        tables.append(gemm_table(task.op, target, name, task.phase.threads, search.rows(task)))
    for team in plan_teams(plans):
        tables += other_tables(spec, target, team.phase, team.plan.threads)
    return unique_tables(tables)


def search_tasks(
    payload: Payload,
    plans: Sequence[ServicePlan],
    hardware: HardwareSpec,
    target: Target,
    effort: Effort,
) -> list[tuple[str, SearchTask]]:
    """Return (phase, search) of every product; in decode steps a sequence has one row.

    Their seconds are infinite: whoever runs them shares out the budget.
    """
    return [
        (
            team.phase,
            SearchTask(
                op=use.gemm,
                target=target,
                phase=team.plan,
                hardware=hardware,
                points=search_points(min(most, max(use.sizes)), effort.points),
                rounds=effort.rounds,
                sizes={m: share for m, share in use.sizes.items() if m <= most},
            ),
        )
        for team in plan_teams(plans)
        for use in payload.of(team.processes)
        for most in (payload.largest("head") if team.phase == "decode" else max(use.sizes),)
    ]


@dataclass(slots=True)
class ModelSearch:
    """Searches product after product; equal ones once.

    end: of the budget, on the measurer's clock.
    """

    effort: Effort
    choose_policy: Callable[[SearchTask], Policy]
    measurer: Measurer
    end: float
    known: dict[Key, tuple[Row, ...]] = field(default_factory=dict)
    waiting: dict[Key, float] = field(default_factory=dict)

    def plan(self, tasks: Iterable[SearchTask]) -> None:
        """Weigh what is to come: larger products get more of the budget, but not in proportion."""
        model = CostModel()
        for task in tasks:
            seconds = (model.seconds(task, m, task.default(m)) for m in task.points)
            self.waiting[task_key(task)] = sum(math.sqrt(s) for s in seconds)

    def rows(self, task: SearchTask) -> tuple[Row, ...]:
        """Return the schedule rows of a planned product."""
        key = task_key(task)
        if key not in self.known:
            left = max(0.0, self.end - self.measurer.now())
            share = self.waiting[key] / sum(self.waiting.values())
            self.known[key] = self._search(replace(task, seconds=left * share))
            del self.waiting[key]
        return self.known[key]

    def _search(self, task: SearchTask) -> tuple[Row, ...]:
        for_losses = task.seconds * self.effort.loss_share
        policy = self.choose_policy(task)
        found = policy.search(replace(task, seconds=task.seconds - for_losses), self.measurer)
        defaults = (task.default(m).tile.panels for m in task.points)
        kept = choose_panels(found.choices, task.sizes, defaults)
        choices = keep_panels(found.choices, kept)
        points = heaviest_points(choices, task.sizes, self.effort.loss_points)
        end = self.measurer.now() + for_losses
        alone = find_alone(task, self.measurer, choices, for_losses / 2)
        left = max(0.0, end - self.measurer.now())
        losses = measure_losses(task, self.measurer, choices, points, left)
        return make_rows(task, choices, losses, alone)


Key = tuple[GemmOp, PhasePlan, tuple[int, ...]]


def task_key(task: SearchTask) -> Key:
    """Return what tells searches apart, whichever product of a model they are for."""
    return replace(task.op, op=""), task.phase, task.points


def heaviest_points(
    choices: Mapping[int, Choice], sizes: Mapping[int, float], count: int
) -> tuple[int, ...]:
    """Return the `count` measured points with the largest share of the workload's rows."""
    rows = dict.fromkeys((m for m, c in choices.items() if c.source != DEFAULT), 0.0)
    for m, share in sizes.items():
        if serving := [point for point in sorted(rows) if point >= m]:
            rows[serving[0]] += m * share
    return tuple(sorted(sorted(rows, key=rows.__getitem__)[-count:]))
