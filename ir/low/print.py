"""Low-IR nodes in, C text out: `parse_low(print_low(unit))` gives an equal unit.

Local and static arrays are printed aligned to a cache line, which is no part of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.ir.expr import ASSIGN, POSTFIX, PREFIX, ArrayType, Expr, Type
from dovetail.ir.low import nodes as low
from dovetail.ir.node import Node
from dovetail.ir.printer import C_SPELLING, ExprPrinter, Rendered, declare

INDENT = "  "
COMMA_LEVEL = -1


def print_low(node: Node) -> str:
    """Return C text of a unit, item, statement, type or expression; statements end a line."""
    if isinstance(node, Expr):
        return _PRINTER.text(node, COMMA_LEVEL)
    if isinstance(node, Type):
        return _PRINTER.type(node)
    return "".join(f"{line}\n" for line in _lines(node))


# ---- expressions ----


def _member(printer: ExprPrinter, expr: low.Member) -> Rendered:
    dot = "->" if expr.arrow else "."
    return f"{printer.text(expr.base, POSTFIX)}{dot}{expr.field}", POSTFIX


def _assign(printer: ExprPrinter, expr: low.Assign) -> Rendered:
    target = printer.text(expr.target, PREFIX)
    return f"{target} {expr.op} {printer.text(expr.value, ASSIGN)}", ASSIGN


def _step(printer: ExprPrinter, expr: low.Step) -> Rendered:
    if expr.prefix:
        target = printer.text(expr.target, PREFIX)
        gap = " " if target.startswith(expr.op[0]) else ""
        return f"{expr.op}{gap}{target}", PREFIX
    return f"{printer.text(expr.target, POSTFIX)}{expr.op}", POSTFIX


def _sizeof(printer: ExprPrinter, expr: low.SizeOf) -> Rendered:
    of = expr.of
    inner = printer.type(of) if isinstance(of, Type) else printer.text(of, COMMA_LEVEL)
    return f"sizeof({inner})", PREFIX


_PRINTER = ExprPrinter(
    C_SPELLING,
    {
        low.Member: _member,
        low.Assign: _assign,
        low.Step: _step,
        low.Comma: lambda printer, expr: (printer.arguments(expr.items), COMMA_LEVEL),
        low.SizeOf: _sizeof,
        low.InitList: lambda printer, expr: (f"{{{printer.arguments(expr.items)}}}", ASSIGN),
    },
)

# ---- statements ----


def _lines(node: Node) -> list[str]:
    return _LINES[type(node)](node)


def _indented(body: Sequence[Node]) -> list[str]:
    return [line if line.startswith("#") else INDENT + line for n in body for line in _lines(n)]


def _declaration(node: low.Declare) -> str:
    align = "_Alignas(64) " if isinstance(node.type, ArrayType) else ""
    static = "static " if node.static else ""
    init = f" = {_PRINTER.text(node.init, ASSIGN)}" if node.init is not None else ""
    return f"{align}{static}{declare(node.type, node.name, _PRINTER)}{init}"


def _if(node: low.If) -> list[str]:
    lines = [f"if ({_PRINTER.text(node.cond, COMMA_LEVEL)}) {{", *_indented(node.then.body)]
    if node.other is None:
        return [*lines, "}"]
    return [*lines, "} else {", *_indented(node.other.body), "}"]


def _for_init(init: Sequence[low.Stmt]) -> str:
    parts = [
        _declaration(s) if isinstance(s, low.Declare) else print_low(s).rstrip(";\n") for s in init
    ]
    # several declarators share their base type: `int i = 0, j = 1`
    for i in range(1, len(parts)):
        first, node = init[0], init[i]
        assert isinstance(first, low.Declare) and isinstance(node, low.Declare)
        base = declare(_base(first.type), "", _PRINTER)
        parts[i] = parts[i].removeprefix(base).lstrip()
    return ", ".join(parts)


def _base(type_: Type) -> Type:
    of = getattr(type_, "of", None)
    return type_ if of is None else _base(of)


def _for(node: low.For) -> list[str]:
    cond = f" {_PRINTER.text(node.cond, COMMA_LEVEL)}" if node.cond is not None else ""
    step = f" {_PRINTER.text(node.step, COMMA_LEVEL)}" if node.step is not None else ""
    return [f"for ({_for_init(node.init)};{cond};{step}) {{", *_indented(node.body.body), "}"]


def _while(node: low.While) -> list[str]:
    cond = _PRINTER.text(node.cond, COMMA_LEVEL)
    if node.do:
        return ["do {", *_indented(node.body.body), f"}} while ({cond});"]
    return [f"while ({cond}) {{", *_indented(node.body.body), "}"]


def _return(node: low.Return) -> list[str]:
    value = f" {_PRINTER.text(node.value, COMMA_LEVEL)}" if node.value is not None else ""
    return [f"return{value};"]


def _param(node: low.Param) -> str:
    return declare(node.type, node.name, _PRINTER)


def _function(node: low.Function) -> list[str]:
    words = ["static"] * node.static + ["inline"] * node.inline
    params = ", ".join(_param(p) for p in node.params) or "void"
    head = declare(node.returns, f"{node.name}({params})", _PRINTER)
    return [f"{' '.join([*words, head])} {{", *_indented(node.body.body), "}"]


def _struct(node: low.StructDef) -> list[str]:
    fields = [f"{INDENT}{_param(p)};" for p in node.fields]
    return [f"{node.kind} {node.name} {{", *fields, "};"]


_LINES: dict[type[Node], Callable[..., list[str]]] = {
    low.Unit: lambda node: [line for item in node.items for line in _lines(item)],
    low.Function: _function,
    low.StructDef: _struct,
    low.Declare: lambda node: [f"{_declaration(node)};"],
    low.Pragma: lambda node: [f"#pragma {node.text}"],
    low.ExprStmt: lambda node: [f"{_PRINTER.text(node.expr, COMMA_LEVEL)};"],
    low.Block: lambda node: ["{", *_indented(node.body), "}"],
    low.If: _if,
    low.For: _for,
    low.While: _while,
    low.Return: _return,
    low.Break: lambda node: ["break;"],
    low.Continue: lambda node: ["continue;"],
}
