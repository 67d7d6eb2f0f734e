"""Documents in the order that shares most with prompts before: the best one, and only if it may."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import END, START, RAGraph
from dovetail.ir.workflow import Generation
from dovetail.runtime.flows.control.messages import Generate, Rewrote, Started
from dovetail.runtime.flows.control.prefixes import Opening, Prefixes
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.documents import Document
from tests.runtime.flows.control.by_hand import ALONE, Hand

COSTLY = replace(ALONE, step=replace(ALONE.step, prefill=1e-5))
NODE = Generation("answer", "Known:\n{docs}\nAsked: {input}")


def graph(order: str) -> RAGraph:
    made = RAGraph("free")
    made.add_retrieval("search", query="input", output="docs", topk=3, order=order)
    made.add_generation("answer", prompt=str(NODE.prompt))
    for source, target in ((START, "search"), ("search", "answer"), ("answer", END)):
        made.add_edge(source, target)
    return made


def opening(ids: list[int], *free: str) -> Opening | None:
    found = [Document(id=i, text="text " * (i + 1)) for i in ids]
    call = Call(NODE, 0, {"docs": found, "input": "x"}, {})
    return Opening.of(call, free or ("docs",))


few = st.lists(st.integers(0, 5), min_size=2, max_size=4, unique=True)


@settings(max_examples=60)
@given(sent=st.lists(few, max_size=6), asked=few)
def test_the_order_shares_most_of_all_there_are(sent: list[list[int]], asked: list[int]) -> None:
    prefixes, given_ = Prefixes(), opening(asked)
    assert given_ is not None
    for ids in sent:
        before = opening(ids)
        assert before is not None
        prefixes.keep(before)
    best = prefixes.arrange(given_)
    assert sorted(best.ids) == sorted(asked)
    most = max(prefixes.shared(given_.arrange(order)) for order in permutations(asked))
    assert prefixes.shared(best) == most
    prompt = best.prompt()
    assert prompt.plain == given_.prompt() and sorted(prompt) == sorted(prompt.plain)
    if not most:
        assert best.ids == given_.ids


def test_what_was_sent_long_ago_is_forgotten_from_its_end() -> None:
    prefixes = Prefixes(most=4)
    for ids in ([1, 2, 3], [4, 5]):
        found = opening(ids)
        assert found is not None
        prefixes.keep(found)
    one, two = opening([2, 1, 3]), opening([5, 4])
    assert one is not None and two is not None
    assert prefixes.arrange(one).ids == (1, 2, 3) and prefixes.shared(prefixes.arrange(one)) < 40
    assert prefixes.arrange(two).ids == (4, 5)


def test_prompts_may_show_many_documents() -> None:
    prefixes, many, turned = Prefixes(), opening([*range(500)]), opening([*range(499, -1, -1)])
    assert many is not None and turned is not None
    prefixes.keep(many)
    assert prefixes.arrange(turned).ids == many.ids


def answer(hand: Hand, found: list[int], order: str) -> tuple[str, str, list[str]]:
    """Return the prompt that is sent, the one that is told of, and what was done."""
    hand.begin_search(7, graph=graph(order))
    orders = hand.scanned(*((float(at), id_) for at, id_ in enumerate(found)))
    done = [o.rewrite.transformation for o in orders if isinstance(o, Rewrote)]
    (sent,) = (o.prompt for o in orders if isinstance(o, Generate))
    (told,) = (o.prompt for o in orders if isinstance(o, Started) and o.job is not None)
    return sent, told, done


def test_a_prompt_is_arranged_where_its_order_is_free_and_the_timeline_is_told() -> None:
    hand = Hand(costs=COSTLY)
    first, told, done = answer(hand, [1, 2, 3], "any")
    assert first == told and "arrange" not in done
    second, told, done = answer(hand, [3, 1, 2], "any")
    assert second == told == first and "arrange" in done
    third, told, done = answer(hand, [3, 1, 2], "nearest")
    assert third == told != first and "arrange" not in done
    assert opening([1, 2], "others") is None
    off = Hand(costs=COSTLY, transformations=frozenset())
    answer(off, [1, 2, 3], "any")
    assert answer(off, [3, 1, 2], "any")[0] == third
