"""Guesses: when they begin, which, and that only a true one counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from dovetail import workflows
from dovetail.ir.errors import DeviceError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START
from dovetail.runtime.flows.control.costs import StepCost
from dovetail.runtime.flows.control.messages import (
    Cancel,
    Deliver,
    Embed,
    Failed,
    FindClusters,
    Finished,
    Generate,
    Order,
    Progressed,
    Started,
)
from dovetail.runtime.flows.prompts import pack_vector
from tests.runtime.flows.control.by_hand import ALONE, Hand
from tests.runtime.flows.control.integrity import is_idle

NEAR = [(1.0, 1), (2.0, 2)]
TOKENS = count(1)


def started(hand: Hand) -> list[int | None]:
    """Return the jobs of generations that are real ones."""
    return [order.job for order in hand.all(Started) if order.source.node == "answer"]


def guesses(orders: list[Order]) -> list[Generate]:
    return [order for order in orders if isinstance(order, Generate) and order.provisional]


def test_a6_6_a_guess_that_holds_is_committed_and_nothing_is_generated_twice() -> None:
    hand = Hand()
    hand.begin_search(0, 1, 2)
    (guess,) = guesses(hand.scanned(*NEAR))
    assert "document 1" in guess.prompt and not started(hand)
    hand.scanned((3.0, 3))
    hand.scanned((4.0, 4))
    assert started(hand) == [guess.job]
    hand.tell(Finished(guess.job, "yes"))
    assert hand.last(Deliver).state["answer"] == "yes"  # type: ignore[index]
    assert len(hand.all(Generate)) == 1 and hand.front.statistics.accuracy == 1.0


def test_a_document_that_is_removed_meanwhile_is_neither_given_nor_guessed_with() -> None:
    hand = Hand()
    hand.begin_search(0, 1, 2)
    (guess,) = guesses(hand.scanned(*NEAR))
    hand.titles.removed = {1}
    hand.scanned((3.0, 3))
    hand.scanned((4.0, 4))
    real = hand.last(Generate)
    assert real.job != guess.job and "document 1" not in real.prompt
    assert started(hand) == [real.job]


@pytest.mark.parametrize(
    ("settings", "found", "reason"),
    [
        ({"generation_load": 0}, NEAR, "load"),
        ({"costs": replace(ALONE, step=StepCost(fixed=0.0, prefill=1.0))}, NEAR, "loss"),
        ({"fixed_clusters": 3}, [], "whole"),
        ({}, NEAR, None),
    ],
)
def test_a_run_says_why_nothing_was_guessed(
    settings: dict[str, Any], found: list[tuple[float, int]], reason: str | None
) -> None:
    hand = Hand(**settings)
    number = hand.begin_search(0, 1, 2)
    graph = hand.front.front.tickets[number].graph
    hand.scanned(*found)
    left = graph.left.get("speculate_generation")
    assert (left and left.reason) == reason
    assert left is hand.front.statistics.left.get("speculate_generation")


def test_a6_6_a_guess_that_cannot_hold_any_more_is_aborted_once_and_begun_anew() -> None:
    hand = Hand(generation_load=1)
    hand.begin_search(0, 1, 2)
    (guess,) = guesses(hand.scanned(*NEAR))
    hand.tell(Finished(guess.job, "wrong"))
    orders = hand.scanned((0.5, 3))
    (again,) = guesses(orders)
    assert "document 3" in again.prompt
    hand.tell(Progressed(again.job, "ri", 1))
    hand.scanned((9.0, 9))
    hand.tell(Finished(again.job, "right"))
    assert hand.last(Deliver).state["answer"] == "right"  # type: ignore[index]
    figures = hand.front.statistics
    assert (figures.attempted, figures.accepted, figures.rejected) == (2, 1, 1)


def test_a6_6_a_guess_under_way_is_cancelled_when_its_documents_are_displaced() -> None:
    hand = Hand()
    hand.begin_search(0, 1)
    (guess,) = guesses(hand.scanned(*NEAR))
    orders = hand.scanned((0.5, 3))
    assert [order.job for order in orders if isinstance(order, Cancel)] == [guess.job]
    real = hand.last(Generate)
    assert not real.provisional and "document 3" in real.prompt
    assert started(hand) == [real.job]
    hand.tell(Finished(guess.job, "wrong"))  # what comes late is not heard
    assert not hand.all(Deliver)
    hand.tell(Finished(real.job, "right"))
    assert hand.last(Deliver).state["answer"] == "right"  # type: ignore[index]


def test_a6_6_a_guess_may_end_before_the_search_and_counts_when_that_ends() -> None:
    hand = Hand()
    hand.begin_search(0, 1)
    (guess,) = guesses(hand.scanned(*NEAR))
    hand.tell(Finished(guess.job, "early"))
    assert not hand.all(Deliver)
    hand.scanned((3.0, 3))
    assert hand.last(Deliver).state["answer"] == "early"  # type: ignore[index]
    assert is_idle(hand.front) and hand.front.statistics.accepted == 1


def test_no_guess_is_made_before_topk_documents_are_found() -> None:
    hand = Hand()
    hand.begin_search(0, 1, 2)
    assert not guesses(hand.scanned((1.0, 1)))
    assert guesses(hand.scanned((2.0, 2)))


def test_a_guess_that_fails_is_no_failure_of_the_request() -> None:
    hand = Hand()
    hand.begin_search(0, 1)
    (guess,) = guesses(hand.scanned(*NEAR))
    hand.tell(Failed(guess.job, DeviceError("out of memory")))
    hand.scanned((3.0, 3))
    hand.tell(Finished(hand.last(Generate).job, "right"))
    assert hand.last(Deliver).state["answer"] == "right"  # type: ignore[index]


def chosen_after_search() -> RAGraph:
    g = RAGraph("chosen")
    g.add_retrieval("search", query="input", output="docs", topk=2)
    g.add_generation("answer", prompt="{docs}", output="answer")
    g.add_edge(START, "search")
    g.add_edge("search", lambda state: "answer", ["answer", END])
    g.add_edge("answer", END)
    return g


def test_no_function_of_the_user_sees_a_guess() -> None:
    hand = Hand()
    hand.begin_search(0, 1, graph=chosen_after_search())
    assert not guesses(hand.scanned(*NEAR))


@pytest.mark.parametrize(("load", "begun"), [(15, 1), (16, 0)])
def test_a6_7_generations_are_guessed_below_a_load_of_16(load: int, begun: int) -> None:
    g = RAGraph("reply")
    g.add_generation("answer", prompt="{input}", output="answer")
    g.add_edge(START, "answer")
    g.add_edge("answer", END)
    hand = Hand(generation_load=16)
    for _ in range(load):
        hand.submit(g)
    hand.begin_search(0, 1, 2)
    assert len(guesses(hand.scanned(*NEAR))) == begun


@pytest.mark.parametrize(("load", "begun"), [(3, 1), (4, 0)])
def test_without_a_load_given_guesses_end_where_the_engine_does_half_of_what_it_can(
    load: int, begun: int
) -> None:
    g = RAGraph("reply")
    g.add_generation("answer", prompt="{input}", output="answer")
    g.add_edge(START, "answer")
    g.add_edge("answer", END)
    hand = Hand(costs=replace(ALONE, step=StepCost(fixed=4e-3, per_sequence=1e-3)))
    for _ in range(load):
        hand.submit(g)
    hand.begin_search(0, 1, 2)
    assert len(guesses(hand.scanned(*NEAR))) == begun


def test_a6_7_the_search_with_the_nearest_kth_document_is_guessed_first() -> None:
    hand = Hand(generation_load=1)
    hand.begin_search(0, 1, 2)
    near = hand.begin_search(3, 4, 5)
    assert not guesses(hand.scanned((0.1, 1)))  # of the first search alone: one document
    (begun,) = guesses(hand.scanned([(1.1, 998), (1.2, 999)], [(9.0, 2)]))
    assert begun.source.request == near


def follow(hand: Hand) -> Generate:
    """Submit a workflow whose reply is searched with; return the order for the reply."""
    hand.submit(workflows.hyde(topk=2))
    return hand.last(Generate)


def words(hand: Hand, reply: Generate, vector: list[float]) -> list[Order]:
    """Let a reply grow, and its embedding come; return what follows."""
    hand.tell(Progressed(reply.job, "some words", next(TOKENS)))
    embed = hand.last(Embed)
    assert embed.source == reply.source
    return hand.tell(Finished(embed.job, vector))


def test_a_scout_searches_with_what_is_written_and_its_history_shows_the_way() -> None:
    hand = Hand()
    reply = follow(hand)
    words(hand, reply, [0.0, 0.0])
    (probe,) = [o for o in words(hand, reply, [0.0, 0.1]) if isinstance(o, FindClusters)]
    assert probe.source.node == "search"
    hand.probed(0, 1, 2)
    hand.scanned((1.0, 7))
    hand.tell(Finished(reply.job, "some words more"))
    assert not hand.all(Deliver)
    hand.tell(Finished(hand.last(Embed).job, [0.0, 0.2]))
    true = hand.last(FindClusters)
    assert true.known == (7,)


def imagined() -> RAGraph:
    g = RAGraph("imagined")
    g.add_generation("imagine", prompt="{input}", output="passage")
    g.add_retrieval("search", query="passage", output="docs", topk=2, index="idx")
    for source, target in ((START, "imagine"), ("imagine", "search"), ("search", END)):
        g.add_edge(source, target)
    return g


def test_what_was_read_for_an_index_counts_no_more_where_another_takes_its_place() -> None:
    """That one may have another encoder, whose vectors have another length."""
    hand = Hand(costs=replace(ALONE, reply=10.0))
    hand.submit(imagined())
    reply = hand.last(Generate)
    words(hand, reply, [0.0, 0.0])
    hand.tell(Progressed(reply.job, "some words", next(TOKENS)))
    under_way = hand.last(Embed)
    hand.front.leave("idx", hand.now)
    hand.tell(Finished(under_way.job, [0.0, 0.1]))
    words(hand, reply, [0.0, 0.0, 0.1])
    assert not hand.all(FindClusters)
    (probe,) = [o for o in words(hand, reply, [0.0, 0.0, 0.2]) if isinstance(o, FindClusters)]
    assert probe.vector == pack_vector([0.0, 0.0, 0.2])


def test_a_query_is_embedded_anew_where_another_index_takes_the_place_of_its_own() -> None:
    hand = Hand()
    hand.submit(imagined())
    hand.tell(Finished(hand.last(Generate).job, "a passage"))
    old = hand.last(Embed)
    hand.front.leave("idx", hand.now)
    orders = hand.tell()
    new = hand.last(Embed)
    assert new.job != old.job and new.text == old.text == "a passage"
    assert [order.job for order in orders if isinstance(order, Cancel)] == [old.job]
    assert not hand.tell(Finished(old.job, [0.0, 0.1]))
    hand.tell(Finished(new.job, [0.0, 0.2]))
    assert hand.last(FindClusters).vector == pack_vector([0.0, 0.2])
    assert [order.source.node for order in hand.all(Started)] == ["imagine", "search"]
    hand.probed(0)
    hand.scanned(*NEAR)
    assert hand.last(Deliver).error is None


@pytest.mark.parametrize(("load", "sent"), [(31, 1), (32, 0)])
def test_a6_7_searches_are_guessed_below_a_load_of_32(load: int, sent: int) -> None:
    hand = Hand(generation_load=0, costs=replace(ALONE, reply=10.0))
    reply = follow(hand)
    for _ in range(load - 1):
        hand.begin_search(0, 1)
    words(hand, reply, [0.0, 0.0])
    hand.begin_search(0, 1)
    if sent:
        words(hand, reply, [0.0, 0.1])
    else:
        hand.tell(Progressed(reply.job, "some words", next(TOKENS)))
    assert hand.front.statistics.scouts == sent


def test_a6_7_the_reply_whose_meaning_drifts_least_sends_its_scout_first() -> None:
    hand = Hand(retrieval_load=1)
    moving, steady = follow(hand), follow(hand)
    vectors: dict[Any, float] = {moving.source: 0.9, steady.source: 0.1}
    for reply in (moving, steady):
        hand.tell(Progressed(reply.job, "some words", 2))
    for embed in hand.all(Embed):
        hand.tell(Finished(embed.job, [0.0, 0.0]))
    before = len(hand.all(Embed))
    for reply in (moving, steady):
        hand.front.tell(Progressed(reply.job, "some words more", 3), hand.now)
    hand.tell()
    reports = [Finished(e.job, [0.0, vectors[e.source]]) for e in hand.all(Embed)[before:]]
    hand.tell(*reports)
    assert hand.last(FindClusters).source.request == steady.source.request
    assert hand.front.statistics.scouts == 1
