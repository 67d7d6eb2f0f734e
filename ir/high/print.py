"""Print high-IR trees as kernel text: `print_high(node) -> str`.

`parse_high` of a printed unit gives an equal tree; a single statement, function or expression
prints too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.ir.expr import Expr, Int, Type
from dovetail.ir.high import nodes as high
from dovetail.ir.node import Node
from dovetail.ir.printer import ATOM, PYTHON_SPELLING, ExprPrinter, Rendered

SHORTEST_RANGE = 4
"""Fewer consecutive choices than this are printed one by one."""


def print_high(node: Node) -> str:
    """Return the text of a unit, function, statement, type or expression."""
    if isinstance(node, high.Unit):
        return _unit(node)
    if isinstance(node, high.Function):
        return "\n".join(_function(node)) + "\n"
    if isinstance(node, high.Stmt):
        return "\n".join(_statement(node)) + "\n"
    if isinstance(node, Type):
        return PRINTER.type(node)
    assert isinstance(node, Expr), f"cannot print {type(node).__name__}"
    return PRINTER.text(node)


def _text(printer: ExprPrinter, expr: high.Text) -> Rendered:
    return f'"{expr.value}"', ATOM


PRINTER = ExprPrinter(PYTHON_SPELLING, {high.Text: _text})

# ---- module and functions ----


def _unit(unit: high.Unit) -> str:
    head = [*_doc(unit.doc), *(f"# note: {note}" for note in unit.notes)]
    imports = [f"import {name}" for name in unit.imports]
    parts = [part for part in (head, imports) if part]
    text = "\n\n".join("\n".join(part) for part in parts)
    for function in unit.functions:
        text += ("\n\n\n" if text else "") + "\n".join(_function(function))
    return text + "\n"


def _function(function: high.Function) -> list[str]:
    params = ", ".join(_param(p) for p in function.params)
    returns = f" -> {PRINTER.type(function.returns)}" if function.returns else ""
    body = [*_doc(function.doc), *(_tunable(t) for t in function.tunables)]
    body += _block(function.body)
    head = f"def {function.name}({params}){returns}:"
    return [f"@{function.kind}", head, *_indent(body or ["pass"])]


def _param(param: high.Param) -> str:
    return f"{param.name}: {PRINTER.type(param.type)}"


def _tunable(tunable: high.Tunable) -> str:
    items = ", ".join(_choices(tunable.choices))
    return f"{tunable.name}: param = choice({items}, default={_choice(tunable.default)})"


def _choice(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _choices(choices: Sequence[int | str]) -> list[str]:
    first, last = choices[0], choices[-1]
    if isinstance(first, int) and isinstance(last, int) and len(choices) >= SHORTEST_RANGE:
        if tuple(choices) == tuple(range(first, last + 1)):
            return [f"range({first}, {last + 1})"]
    return [_choice(c) for c in choices]


def _doc(doc: str) -> list[str]:
    if not doc:
        return []
    first, *rest = doc.replace("\\", "\\\\").replace('"', '\\"').split("\n")
    if not rest:
        return [f'"""{first}"""']
    return [f'"""{first}', *rest, '"""']


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


# ---- statements ----


def _block(body: Sequence[high.Stmt]) -> list[str]:
    return [line for stmt in body for line in _statement(stmt)]


def _suite(head: str, body: Sequence[high.Stmt]) -> list[str]:
    return [f"{head}:", *_indent(_block(body) or ["pass"])]


def _statement(stmt: high.Stmt) -> list[str]:
    return _STATEMENTS[type(stmt)](stmt)


def _assign(stmt: high.Assign) -> list[str]:
    annotation = f": {PRINTER.type(stmt.type)}" if stmt.type else ""
    return [f"{PRINTER.text(stmt.target)}{annotation} {stmt.op} {PRINTER.text(stmt.value)}"]


def _regs(stmt: high.Regs) -> list[str]:
    trailing = "," if len(stmt.shape) == 1 else ""
    return [f"{stmt.name} = regs(({PRINTER.arguments(stmt.shape)}{trailing}), {stmt.elem})"]


def _if(stmt: high.If, word: str = "if") -> list[str]:
    lines = _suite(f"{word} {PRINTER.text(stmt.cond)}", stmt.then)
    if len(stmt.other) == 1 and isinstance(stmt.other[0], high.If):
        return lines + _if(stmt.other[0], "elif")
    return lines + (_suite("else", stmt.other) if stmt.other else [])


def _for(stmt: high.For) -> list[str]:
    bounds = [PRINTER.text(stmt.start), PRINTER.text(stmt.stop)]
    if stmt.step != Int(value=1):
        bounds.append(PRINTER.text(stmt.step))
    elif stmt.start == Int(value=0):
        del bounds[0]
    return _suite(f"for {stmt.var} in {stmt.kind}({', '.join(bounds)})", stmt.body)


_STATEMENTS: dict[type[high.Stmt], Callable[[Any], list[str]]] = {
    high.Assign: _assign,
    high.Regs: _regs,
    high.Local: lambda stmt: [f"{stmt.name} = local({PRINTER.text(stmt.size)}, {stmt.elem})"],
    high.If: _if,
    high.For: _for,
    high.While: lambda stmt: _suite(f"while {PRINTER.text(stmt.cond)}", stmt.body),
    high.Return: lambda stmt: [f"return {PRINTER.text(stmt.value)}" if stmt.value else "return"],
    high.ExprStmt: lambda stmt: [PRINTER.text(stmt.expr)],
    high.Break: lambda stmt: ["break"],
    high.Continue: lambda stmt: ["continue"],
}
