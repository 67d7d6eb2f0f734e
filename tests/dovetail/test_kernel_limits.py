"""`kernel check` on texts made to be slow: work grows with their length, and ends in sentences."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest

from dovetail.cli.kernel import check_kernels
from dovetail.errors import SyntaxDiagnostic
from dovetail.ir.diagnostics import Source
from tests.calls import count_calls


def body(line: str) -> Callable[[int], str]:
    return lambda n: "void k(float *x) {\n" + line * n + "}\n"


def chain(n: int) -> str:
    """Functions of the high language, each of which calls the one before."""
    head = "@inline\ndef k0(x: ptr[f32]):\n    x[0] = 1.0\n\n"
    calls = (f"@inline\ndef k{i + 1}(x: ptr[f32]):\n    k{i}(x)\n\n" for i in range(n))
    return head + "".join(calls)


TEXTS: dict[str, Callable[[int], str]] = {
    "statements.c": body("x[0] = 1.0f;\n"),
    "syntax faults.c": body("foo bar;\n"),
    "unknown names.c": body("a = 1.0f;\n"),
    "what C has beyond.c": body("goto a;\n"),
    "characters.c": lambda n: "$\n" * n,
    "pragmas.c": lambda n: "#pragma dovetail tune(A in 1..6)\n" * n,
    "open typedefs.c": lambda n: "typedef struct {\n" * n,
    "conditions.c": lambda n: "#if 1\n" * n + "int a;\n" * n + "#endif\n" * n,
    "macro calls.c": lambda n: "#define F(x) x\nint a = " + "F(" * 4 * n + "1" + ")" * 4 * n + ";",
    "calls.dk": chain,
}


@pytest.mark.parametrize("name", TEXTS)
def test_work_grows_with_the_length_of_a_text(name: str) -> None:
    def check(n: int) -> None:
        with contextlib.suppress(SyntaxDiagnostic):
            check_kernels(Source(name, TEXTS[name](n)), None, None)

    check(2)  # tables are made once
    few, many = (count_calls(lambda n=n: check(n)) for n in (100, 800))
    assert many < 12 * few, (few, many)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "doubling.c",
            "#define A0 1+1\n"
            + "".join(f"#define A{i + 1} A{i}+A{i}\n" for i in range(60))
            + "int a = A60;\n",
            "tokens",
        ),
        ("nested.c", "#define F(x) x\nint a = " + "F(" * 9000 + "1" + ")" * 9000 + ";", "nested"),
        (
            "deep.dk",
            "".join(f"@inline\ndef k{i}(x: ptr[f32]):\n    k{i + 1}(x)\n\n" for i in range(300))
            + "@inline\ndef k300(x: ptr[f32]):\n    x[0] = 1.0\n",
            "nested",
        ),
        ("sum.c", body("x[0] = x[1]" + " + x[2]" * 200 + ";\n")(1), "each operand of a sum"),
        (
            "sum.dk",
            "@kernel\ndef k(x: ptr[f32]):\n    x[0] = x[1]" + " + x[2]" * 200 + "\n",
            "each operand of a sum",
        ),
    ],
)
def test_what_no_stack_or_memory_could_hold_is_a_fault(name: str, text: str, words: str) -> None:
    with pytest.raises(SyntaxDiagnostic, match=words):
        check_kernels(Source(name, text), None, None)


def test_the_first_hundred_faults_are_shown() -> None:
    with pytest.raises(SyntaxDiagnostic) as error:
        check_kernels(Source("many.c", body("foo bar;\n")(300)), None, None)
    assert len(error.value.diagnostics) == 100


def test_functions_that_call_each_other_in_a_circle_are_told() -> None:
    text = "@inline\ndef f(x: ptr[f32]):\n    g(x)\n\n@inline\ndef g(x: ptr[f32]):\n    f(x)\n"
    with pytest.raises(SyntaxDiagnostic) as error:
        check_kernels(Source("circle.dk", text), None, None)
    assert [d.code for d in error.value.diagnostics] == ["high-recursion"] * 2


def test_the_collector_of_circles_rests_meanwhile() -> None:
    """It went through all nodes again and again as they grew in number."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        check_kernels(Source("long.c", body("x[0] = 1.0f;\n")(3000)), None, None)
    finally:
        gc.callbacks.remove(note)
    assert len(seen) <= 1 and gc.isenabled()
