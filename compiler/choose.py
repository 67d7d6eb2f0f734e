"""Chooses the schedules of a model on one target: by rules, or by a search that measures.

In: a SearchScope, an effort and a tuning database. Out: schedule tables and the records behind
them. What is on record is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.compiler.attention_search import (
    AttentionChoice,
    AttentionTask,
    apply_choices,
    search_attention,
)
from dovetail.compiler.database import TuningDatabase
from dovetail.compiler.jobs import allow, spent_seconds
from dovetail.compiler.measure import Meter, pool_bytes
from dovetail.compiler.parts import SearchScope, TuningPart, plan_parts
from dovetail.compiler.recorder import Allowance, Recorder, describe_disturbed
from dovetail.compiler.schedules import default_tables, unique_tables
from dovetail.compiler.search.tables import EFFORTS, search_tables
from dovetail.ir.schedule import ScheduleTable
from dovetail.ir.tuning import TuningRecord

DECIDING_SHARE = 0.3
"""A search spends up to this share of its budget on deciding, of which no trial tells."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """How to choose. effort: `none`, or one of `EFFORTS`. budget: seconds, by default the effort's.

    measurable: the machine is this one and runs the target. fixed_order: that of SearchTask.
    """

    effort: str
    database: Path
    measurable: bool
    budget: float | None = None
    fixed_order: bool = False
    cache: Path | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Schedule tables and the records behind them, `measured` of which were made now."""

    tables: tuple[ScheduleTable, ...]
    records: tuple[TuningRecord, ...] = ()
    measured: int = 0
    notes: tuple[str, ...] = ()


def choose_schedules(scope: SearchScope, request: ChoiceRequest, progress: Progress) -> Chosen:
    """Return the schedules of every operator; `progress` gets products done, and all."""
    plans = (*scope.plans, *scope.others)
    rules = default_tables(scope.spec, scope.target, plans, scope.hardware).tables
    if not request.measurable:
        return Chosen(rules)
    effort = EFFORTS[request.effort]
    parts = plan_parts(scope, effort, request.cache)
    database = TuningDatabase(request.database)
    budget = effort.seconds if request.budget is None else request.budget
    allowance = allow(budget, spent_seconds(database, parts), DECIDING_SHARE)
    session = _Session(scope, database, allowance, budget)
    attention: list[AttentionChoice | None] = []
    for part in parts[:-1]:
        with session.measuring(part) as recorder:
            tasks = [item for item in part.items if isinstance(item, AttentionTask)]
            attention += [search_attention(task, recorder, session.seconds) for task in tasks]
    with session.measuring(parts[-1]) as recorder:
        found = search_tables(
            scope.spec,
            scope.payload,
            scope.plans,
            scope.hardware,
            recorder,
            target=scope.target,
            effort=request.effort,
            budget_seconds=session.seconds,
            fixed_order=request.fixed_order,
            progress=lambda done, total, _op: progress(done, total),
        )
    tables = unique_tables((*found.tables, *rules))
    return Chosen(
        tables=apply_choices(tables, [choice for choice in attention if choice]),
        records=tuple(record for recorder in session.recorders for record in recorder.trials),
        measured=sum(recorder.measured for recorder in session.recorders),
        notes=tuple(
            note for note in (database.warning, describe_disturbed(session.recorders)) if note
        ),
    )


@dataclass(slots=True)
class _Session:
    """What is left to spend while one part after the other is measured."""

    scope: SearchScope
    database: TuningDatabase
    allowance: Allowance
    seconds: float
    recorders: list[Recorder] = field(default_factory=list)

    @contextmanager
    def measuring(self, part: TuningPart) -> Iterator[Recorder]:
        """Yield a recorder over the part's library; what it spends is not there for the next."""
        library, pool = part.library, pool_bytes(self.scope.hardware)
        with Meter(library.path, library.index, pool_bytes=pool) as meter:
            recorder = Recorder(meter, part.identity, self.database, allowance=self.allowance)
            self.recorders.append(recorder)
            start = recorder.now()
            yield recorder
            self.seconds = max(0.0, self.seconds - (recorder.now() - start))
        self.allowance = self.allowance.less(recorder.spent)
