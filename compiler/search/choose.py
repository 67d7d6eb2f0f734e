"""Chooses the schedules of a model on one target: measured, on record, predicted, or by rules.

In: a SearchScope, an effort and a tuning database. Out: schedule tables and the records behind
them. What is on record is not measured again; where the machine is not at hand, its records and a
cost model fitted to those of others serve.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import build_library
from dovetail.compiler.formats.quantising import Advance
from dovetail.compiler.measure.answers import Memory, spell_time
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.measure.jobs import allow
from dovetail.compiler.measure.meter import Meter, StoppableMeasurer, pool_bytes
from dovetail.compiler.measure.recorder import (
    Allowance,
    NoMachine,
    Recorder,
    describe_disturbed,
    describe_failed,
)
from dovetail.compiler.rules.tables import apart_tables, default_tables, plan_teams, unique_tables
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.fit_cost_model import LEAST_SAMPLES, fit_cost_model, read_samples
from dovetail.compiler.search.gate_search import SHARE, GateTask, gate_tables, search_gates
from dovetail.compiler.search.instances import (
    InstanceChoice,
    InstanceTask,
    apply_choices,
    search_instances,
)
from dovetail.compiler.search.parts import (
    SearchScope,
    TuningPart,
    job_name,
    plan_parts,
    spent_seconds,
)
from dovetail.compiler.search.policy import (
    DEFAULT,
    FINAL_ROUNDS,
    LEAST_GAIN,
    PREDICTED,
    STAGES,
    Policy,
    SearchTask,
)
from dovetail.compiler.search.rules import Known, Recall, Rules, case_key, known_candidates
from dovetail.compiler.search.tables import EFFORTS, Effort, search_tables
from dovetail.ir.schedule import ScheduleTable
from dovetail.ir.tuning import OK, TuningRecord, WorkKey, encode_record
from dovetail.runtime.machine.cpu_time import QUIET_CORES, busy_cores

DECIDING_SHARE = 0.3
"""A search spends up to this share of its budget on deciding, of which no trial tells."""

IMPROBABLE = (
    "the search ended early: of the shapes tried so few gained that more were improbable; "
    "--effort full tries all"
)

SEARCHES = 3
"""How many compiles search for the same schedules while most trials are disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """How to choose. effort: `none`, or one of `EFFORTS`. budget: seconds, by default the effort's.

    measurable: the machine is this one and runs the target.
    """

    effort: str
    database: Path
    measurable: bool
    budget: float | None = None
    cache: Path | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Schedule tables and the records behind them, `measured` of which were made now.

    rules: what would serve had nothing been searched.
    """

    tables: tuple[ScheduleTable, ...]
    records: tuple[TuningRecord, ...] = ()
    measured: int = 0
    notes: tuple[str, ...] = ()
    disturbed: int = 0
    rules: tuple[ScheduleTable, ...] = ()

    @classmethod
    def join(cls, found: Sequence[Chosen]) -> Chosen:
        """Return what was chosen for several targets together."""
        return cls(
            tables=tuple(table for chosen in found for table in chosen.tables),
            records=tuple(record for chosen in found for record in chosen.records),
            measured=sum(chosen.measured for chosen in found),
            notes=tuple(dict.fromkeys(note for chosen in found for note in chosen.notes)),
            rules=tuple(table for chosen in found for table in chosen.rules),
        )


class PastChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen by measuring, on what trials, and when; notes: of that search.

    trials: which of the records in the question, in their order there. disturbed: trials that do
    not count. tries: compiles that searched until most of them counted.
    """

    tables: tuple[ScheduleTable, ...]
    trials: tuple[int, ...]
    notes: tuple[str, ...]
    disturbed: int
    tries: int
    when: datetime

    @property
    def settled(self) -> bool:
        """Whether it stays on a quiet machine: most trials counted, or enough was tried."""
        return self.disturbed <= len(self.trials) or self.tries >= SEARCHES

    def repeat(self, known: Mapping[bytes, TuningRecord], warning: str | None) -> Chosen:
        """Return the choice again from the records by line, with a note on where it is from."""
        note = (
            f"the schedules were chosen on {spell_time(self.when)} by an earlier compile from the "
            f"{len(self.trials)} trials on record; nothing was measured"
        )
        records = tuple(known.values())
        notes = (*((warning,) if warning else ()), note, *self.notes)
        return Chosen(self.tables, tuple(records[i] for i in self.trials), 0, notes)


def choose_schedules(scope: SearchScope, request: ChoiceRequest, progress: Advance) -> Chosen:
    """Return the schedules of every operator; `progress` gets products done, and all.

    A measured choice stands until anything that it depends on changes, records of these products
    among it. Where most trials were disturbed, it is made again a few times on a quiet machine.
    """
    plans = (*scope.plans, *scope.others)
    rules = default_tables(scope.spec, scope.target, plans, scope.hardware)
    if request.effort not in EFFORTS:
        return Chosen(rules, rules=rules)
    search = _Search.of(scope, request)
    if not request.measurable:
        return search.run(rules, progress)
    memory = Memory.of(scope.hardware, request.cache)
    known = search.known_lines()
    past = memory.recall(search.question(known), PastChoice)
    if past and (past.settled or busy_cores(scope.hardware.allowed_pus) > QUIET_CORES):
        return replace(past.repeat(known, search.database.warning), rules=rules)
    found = search.run(rules, progress)
    if search.works <= {record.work for record in found.records}:
        known = search.known_lines()
        places = {line: i for i, line in enumerate(known)}
        made = PastChoice(
            tables=found.tables,
            trials=tuple(places[encode_record(record)] for record in found.records),
            notes=tuple(note for note in found.notes if note != search.database.warning),
            disturbed=found.disturbed,
            tries=past.tries + 1 if past else 1,
            when=datetime.now(UTC),
        )
        memory.remember(search.question(known), made)
    return found


def find_products(
    scope: SearchScope,
    recorder: Recorder,
    database: TuningDatabase,
    effort: str,
    seconds: float,
    progress: Advance | None = None,
    *,
    stopped: bool = False,
) -> tuple[tuple[ScheduleTable, ...], PolicyChooser]:
    """Return the tables of a model's products that were searched for, and what chose the policies.

    stopped: no more is searched; the records and the rules serve.
    """
    known = known_candidates(recorder.identity.matching(database))
    choice = (scope.target, EFFORTS[effort], recorder, database, known)
    policies = PolicyChooser(*choice, stopped=stopped)
    found = search_tables(
        scope.spec,
        scope.payload,
        scope.plans,
        scope.hardware,
        recorder,
        target=scope.target,
        effort=effort,
        budget_seconds=seconds,
        choose_policy=policies.choose,
        progress=progress,
    )
    return found, policies


def next_win(trials: Iterable[TuningRecord]) -> float:
    """Return how likely the next shape's search finds what is surely faster than the default.

    That is Laplace's rule of succession over the shapes in `trials`: 1/2 where there are none. A
    shape with schedules that seem faster, which there was no time to compare, says nothing.
    """
    shapes: dict[tuple[Any, ...], list[TuningRecord]] = defaultdict(list)
    for record in trials:
        if record.status == OK:
            shapes[record.target, record.work, record.shape.get("m")].append(record)
    won = lost = 0
    for tried in shapes.values():
        faster = [record for record in tried if 0 < record.ratio[0] < 1 - LEAST_GAIN]
        if any(r.rounds >= FINAL_ROUNDS and 0 < r.ratio[1] < 1 for r in faster):
            won += 1
        elif not faster or any(record.rounds >= STAGES[0][0] for record in tried):
            lost += 1
    return (won + 1) / (won + lost + 2)


def _describe_sources(
    scope: SearchScope, tables: Iterable[ScheduleTable], model: CostModel | None
) -> str:
    rows = Counter(row.source for table in tables if table.n for row in table.rows)
    predicted, rules = rows.pop(PREDICTED, 0), rows.pop(DEFAULT, 0)
    samples = model.samples if model else 0
    return (
        f"{scope.target.name} cannot be measured here: of the schedule rows {rows.total()} are "
        f"from records of that machine, {predicted} by a cost model fitted to {samples} trials of "
        f"other work or machines, {rules} by rules"
    )


@dataclass(slots=True)
class PolicyChooser:
    """Which policy serves a product: a search while there is time to measure, else what is known.

    model: fitted to the records, once it was needed. stopped: that anything else is won was found
    improbable; the rules and the records serve what is left.
    """

    target: Target
    effort: Effort
    recorder: Recorder
    database: TuningDatabase
    known: Known
    model: CostModel | None = None
    stopped: bool = False

    def choose(self, task: SearchTask) -> Policy:
        """Return the policy for a product whose turn it is."""
        self.stopped = self.stopped or next_win(self.recorder.trials) < self.effort.improbable
        if self.recorder.may_run(task.work) and not self.stopped:
            if self.effort.learn:
                self.model = None
            return replace(self.effort.policy, model=self.fitted())
        complete = all(case_key(task.problem(m).case) in self.known for m in task.points)
        return Recall(self.known, Rules() if complete else Rules(self.fitted()))

    def fitted(self) -> CostModel:
        """Return the model that this machine's trusted records give, or all of the target's.

        This machine's are of these kernels only: older ones do other things by the same schedules.
        """
        if self.model is None:
            identity, trusted = self.recorder.identity, self.database.trusted()
            own, here = tuple(identity.matching(trusted)), identity.machine(1).label
            samples = read_samples(own, self.target)
            if len(samples) < LEAST_SAMPLES:
                others = (record for record in trusted if record.hardware.label != here)
                samples = read_samples((*own, *others), self.target)
            self.model = fit_cost_model(samples)
        return self.model


@dataclass(slots=True)
class _Search:
    """A search of all parts one after the other, and what is left to spend on it."""

    scope: SearchScope
    request: ChoiceRequest
    parts: tuple[TuningPart, ...]
    database: TuningDatabase
    seconds: float
    allowance: Allowance = field(default_factory=lambda: Allowance(0.0))
    recorders: list[Recorder] = field(default_factory=list)

    @classmethod
    def of(cls, scope: SearchScope, request: ChoiceRequest) -> _Search:
        """Return the search of a scope, with the records that are known."""
        effort, database = EFFORTS[request.effort], TuningDatabase(request.database)
        budget = effort.seconds if request.budget is None else request.budget
        return cls(scope, request, plan_parts(scope, effort, request.cache), database, budget)

    @property
    def works(self) -> set[WorkKey]:
        """What the records of all items are found by."""
        return {item.work for part in self.parts for item in part.items}

    def known_lines(self) -> dict[bytes, TuningRecord]:
        """Return the records that the search can use by line, in the order of the lines."""
        works, database = self.works, self.database
        records = (r for part in self.parts for r in part.identity.matching(database.records()))
        lines = {encode_record(record): record for record in records if record.work in works}
        return {line: lines[line] for line in sorted(lines)}

    def question(self, known: Iterable[bytes]) -> Any:
        """Return all that a measured choice depends on, the records it is made from among it."""
        scope, request = self.scope, self.request
        digest = hashlib.sha256(b"".join(known)).hexdigest()
        limits = (request.effort, request.budget)
        job = job_name(self.parts, request.effort)
        return (job, scope.spec, scope.payload, scope.plans, scope.others, limits, digest)

    def run(self, rules: tuple[ScheduleTable, ...], progress: Advance) -> Chosen:
        """Search; `rules` serve where nothing was found."""
        scope, database, recorders = self.scope, self.database, self.recorders
        if self.request.measurable:
            spent = spent_seconds(database.trusted(), self.parts)
            self.allowance = allow(self.seconds, spent, DECIDING_SHARE)
        choices: list[InstanceChoice] = []
        at = next(i for i, part in enumerate(self.parts) if isinstance(part.items[0], SearchTask))
        products, behind = self.parts[at], self.parts[at + 1 :]
        for part in self.parts[:at]:
            with self.measuring(part) as recorder:
                tasks = [item for item in part.items if isinstance(item, InstanceTask)]
                choices += search_instances(tasks, recorder, self.seconds)
        kept = SHARE * self.seconds if behind else 0.0
        with self.measuring(products) as recorder:
            effort, seconds = self.request.effort, self.seconds - kept
            found, policies = find_products(scope, recorder, database, effort, seconds, progress)
        own: tuple[ScheduleTable, ...] = ()
        unmeasured: tuple[str, ...] = ()
        for part in behind:
            own, unmeasured = self._search_gates(part, (*found, *rules))
        notes = [database.warning, describe_failed(recorders), describe_disturbed(recorders)]
        notes += unmeasured
        if policies.stopped:
            notes.append(IMPROBABLE)
        if not self.request.measurable:
            notes.append(_describe_sources(scope, found, policies.model))
        return Chosen(
            tables=(*apply_choices(unique_tables((*found, *rules)), choices), *own),
            records=tuple(record for recorder in recorders for record in recorder.trials),
            measured=sum(recorder.measured for recorder in recorders),
            notes=tuple(note for note in notes if note),
            disturbed=sum(recorder.disturbed for recorder in recorders),
            rules=rules,
        )

    def _search_gates(
        self, part: TuningPart, found: Sequence[ScheduleTable]
    ) -> tuple[tuple[ScheduleTable, ...], tuple[str, ...]]:
        """Return the tables of users' gates that are faster than what was found, and notes."""
        scope = self.scope
        with self.measuring(part) as recorder:
            tasks = [item for item in part.items if isinstance(item, GateTask)]
            won, notes = search_gates(tasks, found, recorder, self.seconds, scope.target)
        teams = plan_teams((*scope.plans, *scope.others))
        apart = apart_tables(scope.spec, scope.target, teams, scope.hardware) if won else ()
        return tuple(gate_tables(won, apart, scope.target)), notes

    @contextmanager
    def measuring(self, part: TuningPart) -> Iterator[Recorder]:
        """Yield a recorder over the part's library; what it spends is not there for the next."""
        with ExitStack() as stack:
            measurer = self._open(part, stack)
            recorder = Recorder(measurer, part.identity, self.database, allowance=self.allowance)
            self.recorders.append(recorder)
            start = recorder.now()
            yield recorder
            self.seconds = max(0.0, self.seconds - (recorder.now() - start))
        self.allowance = self.allowance.less(recorder.spent)

    def _open(self, part: TuningPart, stack: ExitStack) -> StoppableMeasurer:
        """Return a measurer; where all may only come from records, the library is not built."""
        works = {item.work for item in part.items}
        if not self.allowance.seconds and works.isdisjoint(self.allowance.untried):
            return NoMachine()
        library = build_library(part.library, self.request.cache)
        pool = pool_bytes(self.scope.hardware)
        return stack.enter_context(Meter(library.path, library.index, pool_bytes=pool))
