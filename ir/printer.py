"""The one expression printer: expression in, text out, with as few parentheses as the text needs.

A `Spelling` says how C or the high IR's Python writes operators, literals and types; levels come
from the precedence table of `dovetail.ir.expr`. Nodes of one IR only are added through `handlers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.ir import expr as ex

ATOM = ex.POSTFIX + 1
CAST = ex.PREFIX - 0.5  # `-(T)x` needs no parentheses, `((T)x)++` does
_OR_LEVEL = ex.PRECEDENCE["||"]

Rendered = tuple[str, float]
"""Text and the precedence level of its outermost operator."""
Handlers = Mapping[type[ex.Expr], Callable[["ExprPrinter", Any], Rendered]]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one language writes what both IRs share."""

    precedence: Mapping[str, float]
    type_text: Callable[[ex.Type, ExprPrinter], str]
    int_text: Callable[[ex.Int], str]
    float_text: Callable[[ex.Float], str]
    ternary: Callable[[str, str, str], str]  # condition, then, other
    cast: Callable[[str, str], Rendered]  # type, operand
    cast_operand: float  # least level of a cast's operand
    words: Mapping[str, str] = field(default_factory=dict)  # operators that are words
    not_level: float = ex.PREFIX
    chains_comparisons: bool = False  # `a < b < c` means something else there: parenthesise
    unclear: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what compilers warn of


class ExprPrinter:
    """Prints expressions in one spelling. `handlers` prints node types the shared set lacks."""

    def __init__(self, spelling: Spelling, handlers: Handlers) -> None:
        self.spelling = spelling
        self._handlers = {**_SHARED, **handlers}

    def text(self, expr: ex.Expr, least: float = 0) -> str:
        """Return `expr` as text, parenthesised if its level is below `least`."""
        text, level = self._handlers[type(expr)](self, expr)
        return f"({text})" if level < least else text

    def type(self, type_: ex.Type) -> str:
        """Return a type as text, without a declared name."""
        return self.spelling.type_text(type_, self)

    def arguments(self, args: tuple[ex.Expr, ...]) -> str:
        """Return comma-separated arguments."""
        return ", ".join(self.text(a) for a in args)


# ---- shared nodes ----


def _int(printer: ExprPrinter, expr: ex.Int) -> Rendered:
    return printer.spelling.int_text(expr), ex.PREFIX if expr.value < 0 else ATOM


def _float(printer: ExprPrinter, expr: ex.Float) -> Rendered:
    return printer.spelling.float_text(expr), ex.PREFIX if expr.value < 0 else ATOM


def _unary(printer: ExprPrinter, expr: ex.Unary) -> Rendered:
    style = printer.spelling
    level = style.not_level if expr.op == "!" else ex.PREFIX
    operand = printer.text(expr.operand, CAST if level == ex.PREFIX else level)
    op = style.words.get(expr.op, expr.op)
    # `- -x` must not become the token `--`
    gap = " " if op.isalpha() or operand.startswith(op) else ""
    return f"{op}{gap}{operand}", level


def _binary(printer: ExprPrinter, expr: ex.Binary) -> Rendered:
    style = printer.spelling
    level = style.precedence[expr.op]
    tighter = level + 0.01
    no_chain = style.chains_comparisons and expr.op in ex.COMPARISONS
    left = printer.text(expr.left, _least(style, expr, expr.left, tighter if no_chain else level))
    right = printer.text(expr.right, _least(style, expr, expr.right, tighter))
    return f"{left} {style.words.get(expr.op, expr.op)} {right}", level


def _least(style: Spelling, parent: ex.Binary, child: ex.Expr, level: float) -> float:
    """Return the level below which `child` is parenthesised: all of it where readers may err."""
    unclear = style.unclear.get(parent.op, ())
    return ex.PREFIX if isinstance(child, ex.Binary) and child.op in unclear else level


def _ternary(printer: ExprPrinter, expr: ex.Ternary) -> Rendered:
    cond = printer.text(expr.cond, _OR_LEVEL)
    then = printer.text(expr.then, _OR_LEVEL)
    return printer.spelling.ternary(cond, then, printer.text(expr.other, ex.TERNARY)), ex.TERNARY


def _index(printer: ExprPrinter, expr: ex.Index) -> Rendered:
    base = printer.text(expr.base, ex.POSTFIX)
    return f"{base}[{printer.arguments(expr.indices)}]", ex.POSTFIX


def _cast(printer: ExprPrinter, expr: ex.Cast) -> Rendered:
    style = printer.spelling
    return style.cast(printer.type(expr.type), printer.text(expr.operand, style.cast_operand))


_SHARED: Handlers = {
    ex.Int: _int,
    ex.Float: _float,
    ex.Name: lambda printer, expr: (expr.id, ATOM),
    ex.Unary: _unary,
    ex.Binary: _binary,
    ex.Ternary: _ternary,
    ex.Call: lambda printer, expr: (f"{expr.name}({printer.arguments(expr.args)})", ex.POSTFIX),
    ex.Index: _index,
    ex.Cast: _cast,
}

# ---- C ----


def declare(type_: ex.Type, name: str, printer: ExprPrinter) -> str:
    """Return the C declarator `type name`: pointers and arrays wrap the name inside out."""
    text = name
    while not isinstance(type_, ex.NamedType):
        if isinstance(type_, ex.ArrayType):
            text = f"({text})" if text.startswith("*") else text
            text += "[]" if type_.size is None else f"[{printer.text(type_.size)}]"
        else:
            assert isinstance(type_, ex.PointerType)
            marks = ["const"] * type_.const + ["restrict"] * type_.restrict
            gap = " " if marks and text[:1] not in ("", "[") else ""
            text = f"*{' '.join(marks)}{gap}{text}"
        type_ = type_.of
    base = f"const {type_.name}" if type_.const else type_.name
    return f"{base} {text}" if text else base


def c_float(expr: ex.Float) -> str:
    """Return a C literal: as written, else the shortest float literal of the value."""
    if expr.text:
        return expr.text
    if math.isnan(expr.value):
        return "NAN"
    if math.isinf(expr.value):
        return "INFINITY" if expr.value > 0 else "-INFINITY"
    return f"{expr.value!r}f"


_BITS = ("&", "^", "|")
_SUMS = ("+", "-")

C_SPELLING = Spelling(
    precedence=ex.PRECEDENCE,
    type_text=lambda type_, printer: declare(type_, "", printer),
    int_text=lambda expr: expr.text or str(expr.value),
    float_text=c_float,
    ternary=lambda cond, then, other: f"{cond} ? {then} : {other}",
    cast=lambda type_, operand: (f"({type_}){operand}", CAST),
    cast_operand=CAST,
    unclear={
        "||": ("&&",),
        "<<": _SUMS,
        ">>": _SUMS,
        **dict.fromkeys(_BITS, (*_BITS, *_SUMS, *ex.COMPARISONS)),
        **dict.fromkeys(ex.COMPARISONS, _BITS),
        **dict.fromkeys(_SUMS, ("<<", ">>")),
    },
)

# ---- the high IR's Python ----


def _python_type(type_: ex.Type, printer: ExprPrinter) -> str:
    if isinstance(type_, ex.PointerType):
        return f"ptr[{_python_type(type_.of, printer)}]"
    assert isinstance(type_, ex.NamedType), "the high IR has named and pointer types only"
    return type_.name


def _python_float(expr: ex.Float) -> str:
    if math.isinf(expr.value):
        return "inf" if expr.value > 0 else "-inf"
    return repr(expr.value)


# Python's comparisons and `not` sit between `and` and `|`; the rest is as in C.
_NOT_LEVEL = (ex.PRECEDENCE["&&"] + ex.PRECEDENCE["|"]) / 2

PYTHON_SPELLING = Spelling(
    precedence={
        **ex.PRECEDENCE,
        "//": ex.PRECEDENCE["/"],
        **dict.fromkeys(ex.COMPARISONS, _NOT_LEVEL + 0.1),
    },
    type_text=_python_type,
    int_text=lambda expr: str(expr.value),
    float_text=_python_float,
    ternary=lambda cond, then, other: f"{then} if {cond} else {other}",
    cast=lambda type_, operand: (f"cast({type_}, {operand})", ex.POSTFIX),
    cast_operand=0,
    words={"&&": "and", "||": "or", "!": "not"},
    not_level=_NOT_LEVEL,
    chains_comparisons=True,
)
