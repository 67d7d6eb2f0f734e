"""The policy of work that is not measured now: the best of what is on record, else a prediction.

In: the candidates on record of each case, and a `Measurer` that has their times. Out: the fastest
at each M; another policy serves the M of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dovetail.compiler.measure import Candidate, GemmCase, Measurer
from dovetail.compiler.search.policy import DEFAULT, Bench, Policy, SearchResult, SearchTask
from dovetail.compiler.search.rules import Rules
from dovetail.compiler.search.space import Program
from dovetail.ir.tuning import TuningRecord

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
        """Return the programs on record that the task allows."""
        candidates = self.known.get(case_key(bench.problem.case), ())
        found = [bench.problem.program(candidate) for candidate in candidates]
        return [program for program in found if program and bench.task.allows(program)]
