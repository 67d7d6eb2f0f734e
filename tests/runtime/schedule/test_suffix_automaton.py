"""The automaton against all places where the end of a text stands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.schedule.suffix_automaton import SuffixAutomaton

PARTS = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12)


def find_slowly(text: list[int]) -> tuple[int, int]:
    for length in range(len(text) - 1, 0, -1):
        for behind in range(length, len(text)):
            if text[behind - length : behind] == text[-length:]:
                return length, behind
    return 0, 0


@given(PARTS)
def test_the_longest_end_that_stands_earlier_is_found_where_it_stands_first(
    parts: list[list[int]],
) -> None:
    automaton, text = SuffixAutomaton(), list[int]()
    for part in parts:
        automaton.extend(part)
        text += part
        assert automaton.find() == find_slowly(text)
    assert automaton.tokens == text
    assert len(automaton._edges) <= max(1, 2 * len(text)), "more states than there can be"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 20), st.data())
def test_what_follows_a_place_goes_on_behind_the_end(
    text: list[int], most: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert automaton.read(place, most) == (text[place:] * 21)[:most]
