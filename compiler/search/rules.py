"""Policies that measure nothing: `default` goes by the rules or a fitted cost model, or by records.

In: a task; candidates on record of each case, and a `Measurer` that has their times. Out: a program
at each M: the fastest on record, else what is predicted or a rule's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dovetail.compiler.measure.meter import Candidate, GemmCase, Measurer
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.policy import (
    DEFAULT,
    PREDICTED,
    Bench,
    Choice,
    Policy,
    SearchResult,
    SearchTask,
)
from dovetail.compiler.search.space import WHOLE, Program
from dovetail.ir.tuning import TuningRecord

PREDICTED_GAIN = 0.3
"""What a program must be predicted faster by than the rules' own to take its place: on records of
products that the model had not seen, smaller predicted gains were as often losses (measured)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What `--effort none` and machines that are not at hand get.

    model: fitted to records of a like machine it chooses the micro-kernel; analytic, the rules do.
    """

    model: CostModel = field(default_factory=CostModel)

    def search(self, task: SearchTask, measurer: Measurer | None = None) -> SearchResult:
        """Return a program at each M, without a trial."""
        return SearchResult({m: self._choose(task, m) for m in task.points}, 0, 0.0)

    def _choose(self, task: SearchTask, m: int) -> Choice:
        rule = task.default(m)
        if self.model.correction is None:
            return Choice(rule, DEFAULT)
        programs = [task.program(m, t, WHOLE, rule.scheme) for t in task.problem(m).tiles()]
        (best,) = self.model.best(task, m, dict.fromkeys(programs), 1)
        expected, seconds = self.model.predict(task, m, (rule, best))
        if seconds > (1 - PREDICTED_GAIN) * expected:
            return Choice(rule, PREDICTED, expected)
        return Choice(best, PREDICTED, seconds)


Known = Mapping[tuple[object, ...], tuple[Candidate, ...]]


def case_key(case: GemmCase) -> tuple[object, ...]:
    """Return what the candidates of a case are found by, wherever its threads run."""
    return (*case.work, case.m)


def known_candidates(records: Iterable[TuningRecord]) -> Known:
    """Return the candidates that were tried for each product at each M."""
    found: dict[tuple[object, ...], dict[Candidate, None]] = {}
    for record in records:
        key = (*record.work, record.shape.get("m"))
        found.setdefault(key, {})[Candidate(record.kernel, record.schedule)] = None
    return {key: tuple(candidates) for key, candidates in found.items()}


@dataclass(frozen=True, slots=True)
class Recall:
    """Nothing is measured: `otherwise` chooses where no record compares with the default."""

    known: Known
    otherwise: Policy = field(default_factory=Rules)

    def search(self, task: SearchTask, measurer: Measurer) -> SearchResult:
        """Return the fastest program on record at each M."""
        benches = {m: Bench(task, measurer, m) for m in task.points}
        for bench in benches.values():
            bench.time(self.programs(bench))
        choices = {m: bench.choice() for m, bench in benches.items()}
        unknown = tuple(m for m, choice in choices.items() if choice.source == DEFAULT)
        if unknown:
            other = self.otherwise.search(replace(task, points=unknown), measurer)
            choices |= other.choices
        return SearchResult(choices, sum(bench.trials for bench in benches.values()), 0.0)

    def programs(self, bench: Bench) -> list[Program]:
        """Return the programs on record."""
        candidates = self.known.get(case_key(bench.problem.case), ())
        found = [bench.problem.program(candidate) for candidate in candidates]
        return [program for program in found if program]
