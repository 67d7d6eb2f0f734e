"""The shared expression printer: minimal parentheses, in C and in Python, proved by evaluating."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.expr import (
    ArrayType,
    Binary,
    Call,
    Cast,
    Expr,
    Float,
    Index,
    Int,
    Name,
    NamedType,
    PointerType,
    Ternary,
    Unary,
)
from dovetail.ir.printer import C_SPELLING, PYTHON_SPELLING, ExprPrinter, declare

C = ExprPrinter(C_SPELLING, {})
PY = ExprPrinter(PYTHON_SPELLING, {})
F32 = NamedType(name="f32")
a, b, c = Name(id="a"), Name(id="b"), Name(id="c")


def binary(op: str, left: Expr, right: Expr) -> Binary:
    return Binary(op=op, left=left, right=right)


def choose(cond: Expr, then: Expr, other: Expr) -> Ternary:
    return Ternary(cond=cond, then=then, other=other)


@pytest.mark.parametrize(
    ("expr", "c_text", "python_text"),
    [
        (binary("+", a, binary("*", b, c)), "a + b * c", "a + b * c"),
        (binary("*", binary("+", a, b), c), "(a + b) * c", "(a + b) * c"),
        (binary("-", a, binary("-", b, c)), "a - (b - c)", "a - (b - c)"),
        (binary("-", binary("-", a, b), c), "a - b - c", "a - b - c"),
        (binary("&", a, binary("==", b, c)), "a & (b == c)", "a & (b == c)"),
        (binary("==", binary("&", a, b), c), "(a & b) == c", "a & b == c"),
        (binary("<", binary("<", a, b), c), "a < b < c", "(a < b) < c"),
        (Unary(op="!", operand=binary("==", a, b)), "!(a == b)", "not a == b"),
        (binary("==", Unary(op="!", operand=a), b), "!a == b", "(not a) == b"),
        (binary("&&", Unary(op="!", operand=a), b), "!a && b", "not a and b"),
        (Unary(op="-", operand=Unary(op="-", operand=a)), "- -a", "- -a"),
        (binary("-", a, Int(value=-1)), "a - -1", "a - -1"),
        (Index(base=a, indices=(binary("+", b, c),)), "a[b + c]", "a[b + c]"),
        (Cast(type=F32, operand=binary("+", a, b)), "(f32)(a + b)", "cast(f32, a + b)"),
        (choose(a, b, choose(b, c, a)), "a ? b : b ? c : a", "b if a else c if b else a"),
        (choose(choose(a, b, c), b, c), "(a ? b : c) ? b : c", "b if (b if a else c) else c"),
        (Call(name="f", args=(a, binary("||", b, c))), "f(a, b || c)", "f(a, b or c)"),
        (Float(value=0.5), "0.5f", "0.5"),
        (Float(value=float("inf")), "INFINITY", "inf"),
    ],
)
def test_parentheses_are_minimal_and_sufficient(expr, c_text, python_text):
    assert (C.text(expr), PY.text(expr)) == (c_text, python_text)


def test_declarators_wrap_from_the_inside_out():
    f32 = NamedType(name="float", const=True)
    rows = PointerType(of=ArrayType(of=f32, size=Int(value=16)))
    table = ArrayType(of=PointerType(of=f32, const=True), size=Int(value=2))
    assert declare(rows, "p", C) == "const float (*p)[16]"
    assert declare(table, "t", C) == "const float *const t[2]"
    assert declare(PointerType(of=f32, restrict=True), "x", C) == "const float *restrict x"


_LEAVES = st.integers(0, 9).map(lambda v: Int(value=v))
_OPERATORS = [
    "*",
    "+",
    "-",
    "<<",
    ">>",
    "<",
    "<=",
    ">",
    ">=",
    "==",
    "!=",
    "&",
    "^",
    "|",
    "&&",
    "||",
]


def _grow(children):
    return st.one_of(
        st.builds(binary, st.sampled_from(_OPERATORS), children, children),
        st.builds(
            lambda op, x: Unary(op=op, operand=x), st.sampled_from(["-", "!", "~"]), children
        ),
        st.builds(choose, children, children, children),
    )


def _evaluate(expr: Expr) -> int:
    if isinstance(expr, Int):
        return expr.value
    if isinstance(expr, Unary):
        return {"-": int.__neg__, "~": int.__invert__, "!": lambda v: int(not v)}[expr.op](
            _evaluate(expr.operand)
        )
    if isinstance(expr, Ternary):
        return _evaluate(expr.then if _evaluate(expr.cond) else expr.other)
    assert isinstance(expr, Binary)
    left, right = _evaluate(expr.left), _evaluate(expr.right)
    if expr.op in ("&&", "||"):
        return right if (expr.op == "&&") == bool(left) else left
    return int(eval(f"({left}) {expr.op} ({right})"))


@settings(max_examples=300, deadline=None)
@given(st.recursive(_LEAVES, _grow, max_leaves=8))
def test_printed_python_means_the_tree(expr):
    text = PY.text(expr)
    shifts = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.LShift | ast.RShift)]
    if shifts:  # negative or huge counts have no value to compare
        return
    assert eval(text) == _evaluate(expr)
