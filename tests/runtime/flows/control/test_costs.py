"""What the control plane learns of costs."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from dovetail.runtime.flows.control.costs import Guessed, Learned, Needed, StageCosts, StepCost
from dovetail.runtime.retrieval.budget import ScanCost

SEARCH, OTHER, ANSWER, BRIEF = (("rag", name) for name in ("search", "other", "answer", "brief"))


def test_a_sub_stage_is_long_enough_to_pay_for_its_scan_however_quick_reports_are() -> None:
    scan = ScanCost(fixed=0.001, per_vector=1e-6)
    learned = Learned(StageCosts(scan=scan, overhead=0.002, step=StepCost(fixed=0.01)))
    learned.searched(1.0)
    assert learned.budget() == learned.budget(0.9) == pytest.approx(sqrt(2 * 0.003 * 1.0))
    assert learned.budget(4.0) == pytest.approx(sqrt(2 * 0.003 * 4.0)), (
        "who comes now waits so long"
    )
    for _ in range(200):  # reports come at once: the scan's fixed part is left
        learned.scanned(0.05, 0.05, 0.001)
    assert learned.budget() == pytest.approx(sqrt(2 * 0.001 * 1.0), rel=1e-3)


def made(per_sequence: float = 1e-3, prefill: float = 0.0, **options: Any) -> Learned:
    scan = ScanCost(fixed=0.0, per_vector=1e-6, threads=4)
    step = StepCost(fixed=1e-3, per_sequence=per_sequence, prefill=prefill)
    return Learned(StageCosts(scan=scan, overhead=0.0, step=step, reply=2.0, **options))


def gain(
    learned: Learned, left: float, load: int, scanned: float = 0.5, characters: int = 0
) -> float:
    return learned.guess_gain(Guessed(ANSWER, characters, SEARCH, left, scanned), load)


def test_a_guess_pays_by_what_overlaps_and_costs_what_others_lose() -> None:
    assert gain(made(), left=1.0, load=0) == pytest.approx(0.5 * 1.0)
    assert gain(made(), left=9.0, load=0) == pytest.approx(0.5 * 2.0)
    assert gain(made(), left=1.0, load=1) < 0.5
    assert gain(made(per_sequence=0.0), left=1.0, load=99) == 0.5
    long = gain(made(per_sequence=0.0, prefill=1e-3), left=1.0, load=4, characters=100)
    free = 1 - 4 * 0.1 / 2.0  # of the engine's time, prompts left aside
    assert long == pytest.approx(0.5 * (2 - 1 / free) - 0.5 * 4 * 0.1 / free), "others wait for it"


def test_a_guess_that_is_wrong_holds_up_its_own_prompt() -> None:
    learned = made(prefill=1e-3)
    short = gain(learned, left=0.01, load=0, characters=100)
    assert short == pytest.approx(0.5 * 0.01 - 0.5 * (0.1 - 0.01)), "most of it is left by then"
    assert gain(learned, left=0.2, load=0, characters=100) == pytest.approx(0.5 * 0.2)
    for _ in range(200):
        learned.stayed(SEARCH, 0.5, held=True)
    assert gain(learned, left=0.01, load=0, characters=100) > 0


def test_no_guess_pays_where_the_engine_is_busy_with_prompts_for_half_its_time() -> None:
    learned = made(per_sequence=0.0, prefill=1e-3)
    for _ in range(200):
        learned.stayed(SEARCH, 0.5, held=True)
    assert gain(learned, left=1.0, load=9, characters=100) > 0
    assert gain(learned, left=1.0, load=10, characters=100) < 0


def test_an_order_is_followed_by_what_all_searches_of_its_node_showed() -> None:
    learned = made()
    assert learned.order_gain(SEARCH) > 0, "nothing is known"
    for _ in range(50):
        learned.note_needed(SEARCH, Needed(alone=0.5, plain=0.1, ordered=0.3))
    assert learned.order_gain(SEARCH) < 0 < learned.order_gain(OTHER)
    for _ in range(50):
        learned.note_needed(SEARCH, Needed(alone=0.5, plain=0.2, ordered=0.1))
    assert learned.order_gain(SEARCH) > 0


def test_guesses_that_never_hold_are_not_made_where_others_pay_for_them() -> None:
    learned = made()
    for _ in range(50):
        learned.stayed(SEARCH, 0.1, held=False)
        learned.stayed(SEARCH, 0.9, held=True)
    assert gain(learned, left=1.0, scanned=0.1, load=8) < 0
    assert gain(learned, left=1.0, scanned=0.91, load=8) > 0
    assert learned.chance(SEARCH, 0.5) == 0.5, "other parts of a search are counted apart"
    assert learned.chance(OTHER, 0.1) == 0.5, "and other nodes"


def test_replies_are_as_long_as_those_of_their_node_were() -> None:
    learned = made()
    for _ in range(100):
        learned.replied(BRIEF, 0.1)
    assert learned.reply(BRIEF) == pytest.approx(0.1, rel=0.01) and learned.reply(OTHER) == 2.0
    assert learned.steps(BRIEF, 1) < learned.steps(OTHER, 1)


def test_scouts_are_sent_where_the_beginning_of_a_search_says_little() -> None:
    learned = made()
    assert learned.scout_gain(SEARCH, 1) > 0, "nothing is known"
    learned.searched(1.0)
    learned.overhead = 1e-2
    for _ in range(50):
        learned.note_needed(SEARCH, Needed(0.05, 0.02, 0.01))
        learned.note_needed(OTHER, Needed(0.5, 0.1, 0.3))
    assert learned.scout_gain(SEARCH, 1) < 0 < learned.scout_gain(OTHER, 1)


def test_scouts_are_given_up_after_several_that_were_of_no_use_and_tried_again_now_and_then() -> (
    None
):
    learned = made()
    learned.searched(1.0)
    learned.overhead = 1e-2
    useless, sent = Needed(0.05, 0.05, 0.05), []
    for _ in range(2000):  # a workflow of one search: only its scouts leave it a history
        sent.append(learned.scout_gain(SEARCH, 1) > 0)
        learned.note_needed(SEARCH, useless if sent[-1] else None)
    assert all(sent[:10]) and 0 < sum(sent[1000:]) < 0.2 * 1000


def test_no_scout_is_sent_where_turning_replies_into_vectors_holds_them_up_for_longer() -> None:
    learned, beside = made(), made(device=ScanCost(1e-4, 1e-8))
    for each in (learned, beside):
        each.searched(0.1)
        each.embedded(5e-3)
    assert learned.scout_gain(SEARCH, 1) > 0
    assert learned.scout_gain(SEARCH, 32) < 0, "a search of 0.1 s beside 32 replies"
    assert beside.scout_gain(SEARCH, 32) > 0, "the engine has a device"


def test_a_search_is_cut_where_others_wait_for_less() -> None:
    learned = made()
    learned.overhead = 1e-3
    assert learned.split_gain(0.5, 0.03, waiting=8) > 0
    assert learned.split_gain(0.5, 0.03, waiting=0) < 0, "nobody waits for the part"
    assert learned.split_gain(5e-4, 1e-4, waiting=8) < 0, "shorter than what a sub-stage costs"
    assert learned.split_gain(8e-3, 4e-3, waiting=1) == pytest.approx(0.0)


def test_searches_come_as_often_as_they_did_and_less_often_once_none_has_come_for_long() -> None:
    learned = made()
    learned.begun(1.0)
    assert learned.coming(1.0, 1.0) == 0.0, "one says nothing"
    for second in range(2, 200):
        learned.begun(float(second))
    assert learned.coming(3.0, 199.0) == pytest.approx(3.0)
    assert learned.coming(3.0, 209.0) == pytest.approx(0.3)


def test_a_device_counts_by_its_speed_beside_all_threads() -> None:
    assert made(device=ScanCost(1e-4, 1e-8)).device_weight == pytest.approx(0.04)


def test_costs_that_were_measured_as_nothing_divide_nothing_by_zero() -> None:
    zero = ScanCost(fixed=0.0, per_vector=0.0)
    learned = Learned(
        StageCosts(scan=zero, overhead=0.0, step=StepCost(fixed=0.0), device=zero, reply=0.0)
    )
    for _ in range(20_000):
        learned.scanned(1.0, 0.0, 0.0)
    assert learned.steps("any", 3) >= 1 and learned.speed > 0 and learned.device_weight == 0.0
    assert gain(learned, left=0.0, scanned=1.0, load=3) == 0.0
