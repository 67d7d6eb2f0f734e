"""Diagnostics point at the text: line, caret under the place, hint."""

from dovetail.ir.diagnostics import NO_SPAN, Diagnostic, Source, Span
from dovetail.ir.errors import DovetailError, SyntaxDiagnostic

SOURCE = Source("k.c", "int a;\n\tint bad = x;\nlast")


def test_the_caret_stands_under_the_place_even_behind_tabs():
    found = Diagnostic("low-x", "wrong", Span(2, 12, 2, 13), SOURCE, "do better")
    assert found.render().splitlines() == [
        "k.c:2:12: error[low-x]: wrong",
        "  \tint bad = x;",
        "  \t          ^",
        "  hint: do better",
    ]


def test_a_text_is_split_into_lines_once():
    assert SOURCE.line(2) is SOURCE.line(2)
    assert [SOURCE.line(number) for number in (0, 3, 4)] == ["", "last", ""]


def test_lines_end_where_parsers_end_them():
    source = Source("k.c", "/* \f \u2028 */\n\f\r\nint a;")
    assert [source.line(number) for number in (1, 2, 3)] == ["/* \f \u2028 */", "\f", "int a;"]


def test_a_span_over_several_lines_is_marked_to_the_end_of_the_first():
    found = Diagnostic("low-x", "wrong", Span(1, 5, 2, 3), SOURCE)
    assert found.render().splitlines()[2] == "      ^^"


def test_nodes_without_a_place_have_no_caret():
    assert Diagnostic("low-x", "wrong", NO_SPAN, SOURCE).render() == "k.c:0:0: error[low-x]: wrong"


def test_the_error_carries_and_shows_all():
    rows = [Diagnostic("low-x", f"fault {i}", Span(i, 1, i, 2), SOURCE) for i in (1, 3)]
    error = SyntaxDiagnostic(rows)
    assert isinstance(error, DovetailError)
    assert error.diagnostics == tuple(rows)
    assert str(error) == "\n".join(row.render() for row in rows)
