"""Templates and choices."""

from __future__ import annotations

import asyncio
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import WorkflowError
from dovetail.ir.workflow import END, Branch, Edge, Place, placeholders, render

TEXTS = st.text(alphabet=string.ascii_letters + " \n{}!:.'\"", max_size=20)


def test_lists_become_lines_with_a_dash() -> None:
    state = {"docs": ["one", "two"], "none": [], "n": 3}
    assert render("D:\n{docs}\n{n} {{x}}", state) == "D:\n- one\n- two\n3 {x}"
    assert render("{none}", state) == "- nothing"


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["a", "b_1", "ü"])), max_size=6), TEXTS)
def test_templates_are_taken_apart_and_filled_in(parts: list[tuple[str, str]], rest: str) -> None:
    def brace(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    template = "".join(f"{brace(text)}{{{name}}}" for text, name in parts) + brace(rest)
    values = {"a": "{a}", "b_1": "", "ü": "x{{"}
    assert placeholders(template) == tuple(dict.fromkeys(name for _, name in parts))
    assert render(template, values) == "".join(t + values[n] for t, n in parts) + rest


@given(TEXTS)
def test_any_text_is_a_template_or_refused(text: str) -> None:
    try:
        names = placeholders(text)
    except WorkflowError as error:
        assert "write {{ for a brace" in str(error)
    else:
        assert isinstance(render(text, dict.fromkeys(names, "")), str)


def test_a_value_with_braces_is_no_template() -> None:
    assert render("{a}", {"a": "{b}"}) == "{b}"


@pytest.mark.parametrize(
    ("chosen", "places"), [(1, (1,)), ("a", ("a",)), (END, (END,)), ([1, 2, 1], (1, 2)), ([], ())]
)
def test_a_choice_gives_places_once_each(chosen: object, places: tuple[object, ...]) -> None:
    async def wait(state: object) -> object:
        return chosen

    assert Edge(0, choose=lambda state: chosen).next({}) == places  # type: ignore[return-value, arg-type]
    edge = Edge(0, choose=wait)  # type: ignore[arg-type]

    async def next_in_a_loop() -> tuple[Place, ...]:
        return edge.next({})

    assert edge.next({}) == asyncio.run(next_in_a_loop()) == places


def test_a_branch_looks_at_one_value() -> None:
    branch = Branch("more", 1)
    assert branch({"more": "yes"}) == 1 and branch({"more": ""}) is END and branch({}) is END
