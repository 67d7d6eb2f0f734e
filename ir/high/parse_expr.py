"""Expressions and types of the high IR: Python `ast` expressions in, `dovetail.ir.expr` nodes out.

Faults are collected in a `Reporter` and never raised here, so that one run shows all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.ir import expr as ex
from dovetail.ir.diagnostics import Diagnostic, Source, Span
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.high.nodes import Text

BINARY_OPS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.And: "&&",
    ast.Or: "||",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
UNARY_OPS: dict[type[ast.AST], str] = {
    ast.USub: "-",
    ast.UAdd: "+",
    ast.Not: "!",
    ast.Invert: "~",
}
HINTS: dict[type[ast.AST], str] = {
    ast.Pow: "write the product out, or use exp and log",
    ast.MatMult: "write the loops, or call a GEMM kernel",
    ast.ListComp: "use a loop",
    ast.Lambda: "write an @inline function",
    ast.Attribute: "names of imported modules are visible without a prefix",
    ast.Tuple: "tuples stand only in regs((a, b), f32) and in tile indices",
    ast.NamedExpr: "assign on a line of its own",
    ast.JoinedStr: "strings are compile-time names such as dtypes",
}


@dataclass(slots=True)
class Reporter:
    """Collects the diagnostics of one source, each said once; `ast` positions become spans."""

    source: Source
    found: dict[tuple[str, str, Span], Diagnostic] = field(default_factory=dict)

    def span(self, node: ast.AST) -> Span:
        """Return the span of `node`, columns counted in characters."""
        at: Any = node
        return Span(
            at.lineno,
            self._column(at.lineno, at.col_offset),
            at.end_lineno,
            self._column(at.end_lineno, at.end_col_offset),
        )

    def add(self, code: str, message: str, at: ast.AST | Span, hint: str | None = None) -> None:
        """Record one fault at a node or span."""
        span = at if isinstance(at, Span) else self.span(at)
        made = Diagnostic(code, message, span, self.source, hint)
        self.found.setdefault((code, message, span), made)

    def finish(self) -> None:
        """Raise SyntaxDiagnostic with everything recorded, in text order, if there is anything."""
        if self.found:
            found = self.found.values()
            raise SyntaxDiagnostic(sorted(found, key=lambda d: (d.span.line, d.span.column)))

    def _column(self, line: int, offset: int) -> int:
        text = self.source.line(line)
        if text.isascii():
            return offset + 1
        return len(text.encode()[:offset].decode(errors="replace")) + 1


class ExprParser:
    """Turns `ast` expressions into IR ones; `reporter` receives what is outside the language."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._handlers: dict[type[ast.AST], Callable[[Any, Span], ex.Expr]] = {
            ast.Constant: self._constant,
            ast.Name: lambda node, span: ex.Name(id=node.id, span=span),
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.BoolOp: self._bool,
            ast.Compare: self._compare,
            ast.IfExp: self._ternary,
            ast.Call: self._call,
            ast.Subscript: self._index,
        }

    def expr(self, node: ast.AST) -> ex.Expr:
        """Return the expression of `node`; a placeholder 0 where it is outside the language."""
        span = self.reporter.span(node)
        handler = self._handlers.get(type(node))
        return handler(node, span) if handler else self._unsupported(node, node, span)

    def type(self, node: ast.AST) -> ex.Type:
        """Return the type written as `f32`, `vec[f32]` or `ptr[T]`."""
        span = self.reporter.span(node)
        match node:
            case ast.Name(name):
                return ex.NamedType(name=name, span=span)
            case ast.Subscript(ast.Name("ptr"), of):
                return ex.PointerType(of=self.type(of), span=span)
            case ast.Subscript(ast.Name("vec"), ast.Name(name)):
                return ex.NamedType(name=f"vec[{name}]", span=span)
        self.reporter.add(
            "high-bad-type",
            f"`{ast.unparse(node)}` is not a type",
            node,
            "types are f32 f64 i32 i64 u16 u32 u64, vec[f32], vec[i32] and ptr[T]",
        )
        return ex.NamedType(name="f32", span=span)

    def _unsupported(self, node: ast.AST, what: ast.AST, span: Span) -> ex.Expr:
        kind = type(what).__name__
        self.reporter.add(
            "high-unsupported-expression",
            f"`{ast.unparse(node)}`: {kind} is not part of the kernel language",
            node,
            HINTS.get(type(what)),
        )
        return ex.Int(value=0, span=span)

    def _constant(self, node: ast.Constant, span: Span) -> ex.Expr:
        match node.value:
            case int(value):
                return ex.Int(value=int(value), span=span)  # `True`, too
            case float(value):
                return ex.Float(value=value, span=span)
            case str(value) if value.isidentifier():
                return Text(value=value, span=span)
        return self._unsupported(node, node, span)

    def _unary(self, node: ast.UnaryOp, span: Span) -> ex.Expr:
        return ex.Unary(op=UNARY_OPS[type(node.op)], operand=self.expr(node.operand), span=span)

    def _binary(self, node: ast.BinOp, span: Span) -> ex.Expr:
        op = BINARY_OPS.get(type(node.op))
        if op is None:
            return self._unsupported(node, node.op, span)
        return ex.Binary(op=op, left=self.expr(node.left), right=self.expr(node.right), span=span)

    def _bool(self, node: ast.BoolOp, span: Span) -> ex.Expr:
        result, *rest = (self.expr(value) for value in node.values)
        for item in rest:
            result = ex.Binary(op=BINARY_OPS[type(node.op)], left=result, right=item, span=span)
        return result

    def _compare(self, node: ast.Compare, span: Span) -> ex.Expr:
        op = BINARY_OPS.get(type(node.ops[0]))
        if op is None:
            return self._unsupported(node, node.ops[0], span)
        if len(node.ops) > 1:
            self.reporter.add(
                "high-chained-comparison",
                "comparisons cannot be chained",
                node,
                "write `a < b and b < c`",
            )
        left, right = self.expr(node.left), self.expr(node.comparators[0])
        return ex.Binary(op=op, left=left, right=right, span=span)

    def _ternary(self, node: ast.IfExp, span: Span) -> ex.Expr:
        cond, then, other = self.expr(node.test), self.expr(node.body), self.expr(node.orelse)
        return ex.Ternary(cond=cond, then=then, other=other, span=span)

    def _call(self, node: ast.Call, span: Span) -> ex.Expr:
        if not isinstance(node.func, ast.Name):
            return self._unsupported(node, node.func, span)
        if node.keywords:
            self.reporter.add(
                "high-keyword-argument",
                "calls take positional arguments only",
                node.keywords[0],
                "give the arguments in the order of the definition",
            )
        name = node.func.id
        if name == "cast" and len(node.args) == 2:
            return ex.Cast(type=self.type(node.args[0]), operand=self.expr(node.args[1]), span=span)
        if name in ("regs", "local", "choice", "range", "unroll", "vrange"):
            self.reporter.add(
                "high-misplaced-form",
                f"`{name}(...)` cannot stand here",
                node,
                "regs and local stand alone on the right of an assignment; loops name range, "
                "unroll or vrange",
            )
            return ex.Int(value=0, span=span)
        return ex.Call(name=name, args=tuple(self.expr(arg) for arg in node.args), span=span)

    def _index(self, node: ast.Subscript, span: Span) -> ex.Expr:
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        indices = tuple(self.expr(item) for item in items)
        return ex.Index(base=self.expr(node.value), indices=indices, span=span)
