"""Samples that count: a window of the last ones, which fades where no more of them come."""

from __future__ import annotations

from dovetail.runtime.recent import Recent


def test_the_last_ones_count_and_few_are_no_answer() -> None:
    recent: Recent[int] = Recent(4, 2)
    recent.add(1)
    assert not recent.known
    for sample in range(2, 7):
        recent.add(sample)
    assert recent.known and list(recent.samples) == [3, 4, 5, 6]


def test_one_is_forgotten_where_none_came_and_at_last_all_that_are_too_few() -> None:
    recent: Recent[int] = Recent(4, 2)
    assert not recent.review()  # there is nothing to forget
    for sample in range(3):
        recent.add(sample)
    assert not recent.review()  # some came
    assert recent.review() and list(recent.samples) == [1, 2] and recent.known
    recent.add(3)
    assert not recent.review()
    assert recent.review() and recent.review() and not recent.samples
    recent.add(4)
    assert not recent.known


def test_too_few_for_an_answer_stay_and_add_up() -> None:
    recent: Recent[int] = Recent(4, 3)
    for sample in range(2):
        recent.add(sample)
        assert not recent.review() and not recent.review()
    recent.add(2)
    assert list(recent.samples) == [0, 1, 2]
    assert not recent.review()
    assert recent.review() and not recent.samples
