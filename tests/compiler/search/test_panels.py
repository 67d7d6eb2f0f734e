"""Few panel counts serve a weight: those that the workload's M need most."""

from __future__ import annotations

from dovetail.compiler.rules.schedules import MicroKernel
from dovetail.compiler.search.panels import choose_panels, keep_panels
from dovetail.compiler.search.policy import DEFAULT, MEASURED, Choice
from dovetail.compiler.search.space import WHOLE, Program, Scheme


def choice(**seconds: float) -> Choice:
    """The programs of panel counts p1, p2, ... that took so long."""
    by_panels = {
        int(name[1:]): (Program(MicroKernel(4, int(name[1:])), WHOLE, Scheme(), 0), time)
        for name, time in seconds.items()
    }
    program, time = min(by_panels.values(), key=lambda pair: pair[1])
    return Choice(program, MEASURED, time, by_panels)


CHOICES = {
    1: choice(p1=2.0, p2=1.5, p4=1.0),
    8: choice(p1=2.0, p2=1.0, p4=1.1),
    64: choice(p1=9.0, p2=6.0, p4=9.0),
}


def test_the_workload_decides():
    assert choose_panels(CHOICES, {1: 1.0}, (), 1) == {4}
    assert choose_panels(CHOICES, {64: 1.0}, (), 1) == {2}
    assert choose_panels(CHOICES, {3: 0.9, 20: 0.1}, (), 1) == {2}  # M 3 is served at 8, 20 at 64


def test_another_kernel_must_be_worth_it():
    assert choose_panels(CHOICES, {1: 0.5, 64: 0.5}, ()) == {2, 4}
    assert choose_panels(CHOICES, {64: 1.0}, ()) == {2}


def test_the_kernels_of_the_default_schedules_are_kept_anyway():
    assert choose_panels(CHOICES, {64: 1.0}, (1, 4)) == {1, 2, 4}
    assert choose_panels(CHOICES, {1: 1.0}, (4,)) == {4}


def test_choices_move_to_kept_kernels():
    kept = keep_panels(CHOICES, frozenset({2}))
    assert {c.program.tile.panels for c in kept.values()} == {2}
    assert kept[1].seconds == 1.5
    rules = Choice(CHOICES[1].program, DEFAULT)
    assert keep_panels({1: rules}, frozenset({2})) == {1: rules}
    assert choose_panels({1: rules}, {1: 1.0}, ()) == frozenset()
