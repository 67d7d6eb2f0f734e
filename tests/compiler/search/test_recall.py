"""What is on record serves without a trial, and only where it compares with the default."""

from __future__ import annotations

from dataclasses import replace

from dovetail.compiler.measure.recorder import Allowance, NoMachine, Recorder
from dovetail.compiler.search.policy import DEFAULT, MEASURED, PREDICTED, Choice, SearchResult
from dovetail.compiler.search.rules import Recall, known_candidates
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.ir.tuning import RecordSet
from tests.compiler.search.landscape import Landscape, task
from tests.compiler.search.test_fit_cost_model import identity

TASK = task(points=(1, 8, 64))


def searched(policy=Sandwich(), points=TASK.points):  # noqa: B008
    """A search on the made-up machine: what it chose, and its records."""
    records = RecordSet()
    recorder = Recorder(Landscape(), identity(), records)
    return policy.search(replace(TASK, points=points), recorder).choices, records


def recalled(records, one=TASK, **options):
    recorder = Recorder(NoMachine(), identity(), records, allowance=Allowance(0.0))
    known = known_candidates(identity().matching(records.known.values()))
    choices = Recall(known, **options).search(one, recorder).choices
    assert recorder.measured == 0
    return choices


def test_the_choice_of_a_search_is_found_again():
    choices, records = searched()
    found = recalled(records)
    assert {m: c.program for m, c in found.items()} == {m: c.program for m, c in choices.items()}
    assert {c.source for c in found.values()} == {MEASURED}
    assert found[64].by_panels.keys() == choices[64].by_panels.keys()


def test_records_of_several_searches_serve_together():
    narrow, records = searched(Sandwich(breadth=1, growing=1, slack=0.0))
    wide, others = searched()
    records.append(tuple(others.known.values()))
    case = Landscape()

    def cost(choices, m):
        problem = TASK.problem(m)
        return case.seconds(problem.case, problem.candidate(choices[m].program))

    found = recalled(records)
    assert all(cost(found, m) <= min(cost(wide, m), cost(narrow, m)) for m in TASK.points)


class Marked:
    """A policy that can be told apart."""

    def search(self, task, measurer):
        return SearchResult({m: Choice(task.default(m), PREDICTED) for m in task.points}, 0, 0.0)


def test_another_policy_serves_what_was_never_timed():
    _, records = searched(points=(1, 64))
    sources = {m: c.source for m, c in recalled(records, otherwise=Marked()).items()}
    assert sources == {1: MEASURED, 8: PREDICTED, 64: MEASURED}
    assert {c.source for c in recalled(RecordSet()).values()} == {DEFAULT}


def test_without_times_of_the_default_nothing_is_better():
    choices, records = searched()
    default = TASK.problem(64).candidate(TASK.default(64))
    kept = RecordSet()
    kept.append([r for r in records.known.values() if r.schedule != default.schedule])
    assert choices[64].program != TASK.default(64)
    assert recalled(kept)[64].program == TASK.default(64)
