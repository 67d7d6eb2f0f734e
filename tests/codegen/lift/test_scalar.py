"""Plain C through lift and lower: the numbers of the text compiled by gcc."""

import numpy as np
import pytest

from dovetail.codegen.catalog import resolve_imports
from dovetail.codegen.lift import lift
from dovetail.codegen.lift.types import VECTOR_CALLS
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SpecError
from dovetail.ir.high import nodes as high
from dovetail.ir.high.print import print_high
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.types import LIBRARY
from tests.codegen.interpret import interpret
from tests.codegen.lift.native import EACH, both, kernel_of, lifted, parsed
from tests.shares import in_turns, share

SIZES = [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 100]


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def loops(function):
    def walk(body):
        for stmt in body:
            if isinstance(stmt, high.For):
                yield stmt.kind
            yield from (
                k for child in ("body", "then", "other") for k in walk(getattr(stmt, child, ()))
            )

    return list(walk(function.body))


def arguments(function, n):
    out = np.zeros(n + 8, np.float32)
    match function:
        case "norm":
            return [out, draw(n), draw(n, seed=1), n]
        case "probabilities":
            return [draw(n) * 4, n]
        case "product":
            return [np.zeros(5, np.float32), draw(n), draw(5, n, seed=1), n, 5]
        case "whole_numbers":
            return [out, draw(n), n]
        case "gated" | "gated_by_call" | "curves":
            return [out, draw(n) * 5, draw(n, seed=1), n]
        case "extremes":
            return [np.zeros(4, np.float32), draw(n), n]
        case "clipped_range":
            return [out, draw(n), -0.5, 0.75, n]
        case "running_sum" | "copy_until_negative" | "positive_then_all":
            return [out, np.abs(draw(n)), n]
        case "scaled_rows":
            scale = np.random.default_rng(2).standard_normal(3)
            return [np.zeros((3, n), np.float32), draw(3, n), scale, 3, n]


VECTORISED = {
    "norm": ["vrange", "vrange"],
    "probabilities": ["vrange", "vrange", "vrange"],
    "product": ["range", "vrange"],
    "gated": ["vrange"],
    "clipped_range": ["vrange"],
    "running_sum": ["range"],
    "copy_until_negative": [],
    "scaled_rows": ["range", "range"],
    "positive_then_all": ["vrange"],
    "extremes": ["vrange"],
    "curves": ["vrange"],
    "whole_numbers": ["vrange"],
}


@pytest.mark.parametrize("function", VECTORISED)
def test_loops_become_vector_loops_where_they_can(function):
    assert loops(kernel_of("plain.c", function)) == VECTORISED[function]


@pytest.mark.parametrize(("function", "target"), share(in_turns(list(VECTORISED), EACH), 3))
def test_lifted_kernels_give_the_numbers_of_the_original(function, target):
    for n in SIZES:
        for want, got in both("plain.c", function, "generic", target, arguments(function, n)):
            scale = np.maximum(np.abs(want), np.abs(want).max() * 0.1)
            assert np.all(np.abs(got - want) <= 4e-6 * scale + 1e-30), (function, n)


@pytest.mark.parametrize("name", VECTOR_CALLS)
def test_functions_of_math_h_have_vector_forms(name):
    args = ", ".join(["x[i]"] * len(LIBRARY[name].params))
    loop = f"for (long i = 0; i < n; i++) y[i] = {name}({args});"
    text = f"void f(float *y, float *x, long n) {{ {loop} }}"
    assert loops(lift(parse_low(Source("k.c", text)), "f").function("f")) == ["vrange"]


@pytest.mark.parametrize(
    ("helper", "function", "imports"),
    [
        ("vodd", "sin", ("math_h",)),
        ("vcos_near", "cos", ("math_h",)),
        ("vlog", "log", ("math_h",)),
        ("vlog", "sqrt", ()),
        ("vadd", "sqrt", ()),
    ],
)
def test_helpers_may_be_named_as_functions_of_vectors(helper, function, imports):
    helpers = (
        f"float {helper}(float x) {{ return x * 2; }} float {helper}_2(float x) {{ return 3; }}"
    )
    loop = f"for (int i = 0; i < n; i++) y[i] = {function}f(x[i]);"
    kernel = (
        f"void f(float *x, float *y, int n) {{ {loop} y[0] = {helper}(x[0]) + {helper}_2(0); }}"
    )
    unit = lift(parse_low(Source("k.c", helpers + kernel)), "f")
    assert unit.imports == imports
    assert loops(unit.function("f")) == ["vrange"]
    lowered = lower(resolve_imports(unit), "f", {}, TARGETS["generic"], name="f")
    x, y = np.full(2, 0.5, np.float32), np.zeros(2, np.float32)
    interpret(lowered, "f", [x, y, 2], TARGETS["generic"])
    np.testing.assert_allclose(y, [4, getattr(np, function)(0.5)], rtol=1e-6)


def test_a_kernel_named_as_what_it_would_import_is_written_out():
    loop = "for (int i = 0; i < n; i++) y[i] = logf(x[i]);"
    unit = lift(
        parse_low(Source("k.c", f"void vlog(float *x, float *y, int n) {{ {loop} }}")), "vlog"
    )
    assert unit.notes[0].endswith("because there are two functions `vlog`")


def test_notes_say_what_is_assumed_and_what_stays():
    (alias,) = lifted("plain.c", "norm").notes
    assert (
        alias
        == "arrays of different names are taken to be the same or not to overlap: in_2, out, scale"
    )
    notes = lifted("plain.c", "running_sum").notes
    assert any("`out` is written and read at different places" in n for n in notes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("float f(float x) { return x; }", "returns a value"),
        ("void f(float *x, unsigned n) { x[0] = n; }", "wraps around"),
        ("void f(float *x) { float t[2] = {1, 2}; x[0] = t[1]; }", "the table `t`"),
        ("struct s { int a; }; void f(struct s *p, float *x) { x[0] = p->a; }", "more than floats"),
    ],
)
def test_what_is_not_understood_is_written_out_and_the_reason_told(text, reason):
    assert reason in lift(parse_low(Source("k.c", text)), "f").notes[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("void g(float *x); void f(float *x) { g(x); }", "a call of g"),
        ("void f(float *x) { f(x); }", "the recursion of f"),
    ],
)
def test_what_has_no_high_form_is_refused_with_the_reason(text, reason):
    with pytest.raises(SpecError, match=reason):
        lift(parse_low(Source("k.c", text)), "f")


def test_an_unknown_function_is_named_with_those_there_are():
    with pytest.raises(SpecError, match=r"`nrm`.*norm"):
        lift(parsed("plain.c"), "nrm")


def test_the_text_reads_like_a_hand_written_kernel():
    text = print_high(lift(parsed("plain.c"), "product"))
    assert text[text.index("@kernel") :].splitlines() == [
        "@kernel",
        "def product(out: ptr[f32], x: ptr[f32], w: ptr[f32], n: i64, d: i64):",
        "    for i in range(d):",
        "        sum: f32 = 0.0",
        "        sum_v = vzero()",
        "        for j in vrange(n):",
        "            sum_v = vfma(vload(w + i * n + j), vload(x + j), sum_v)",
        "        sum += vreduce_add(sum_v)",
        "        out[i] = sum",
    ]


def test_loops_that_stay_scalar_keep_the_names_of_their_variables():
    loop = "for (int i = 0; i < n; i++) y[i] += i;"
    unit = lift(parse_low(Source("k.c", f"void f(float *y, int n) {{ {loop} {loop} }}")), "f")
    assert [stmt.var for stmt in unit.function("f").body] == ["i", "i"]
