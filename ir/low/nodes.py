"""Low-IR nodes: C-like kernel text, typed. Shared expressions live in `dovetail.ir.expr`."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.expr import Expr, Type
from dovetail.ir.node import Node

# ---- expressions only C has ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Expr):
    """`base.field` or, with `arrow`, `base->field`."""

    base: Expr
    field: str
    arrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign(Expr):
    """`target op value`; `op` is `=`, or a binary operator and `=`: `+=`, `<<=`, `|=` ..."""

    op: str
    target: Expr
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Expr):
    """`++x`, `x++`, `--x`, `x--`."""

    op: str
    target: Expr
    prefix: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comma(Expr):
    """`a, b` where an expression is wanted, as in `for (i = 0, j = 0; ...)`."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOf(Expr):
    """`sizeof(type)` or `sizeof expr`."""

    of: Type | Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class InitList(Expr):
    """`{a, b, c}` as an initialiser."""

    items: tuple[Expr, ...]


# ---- statements ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Stmt(Node):
    """A statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declare(Stmt):
    """One declarator: `type name = init;`. `float a, *b;` parses as two of these."""

    type: Type
    name: str
    init: Expr | None = None
    static: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExprStmt(Stmt):
    """An expression evaluated for its effect."""

    expr: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Stmt):
    """`{ ... }`."""

    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class If(Stmt):
    """`if (cond) then else other`."""

    cond: Expr
    then: Block
    other: Block | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class For(Stmt):
    """`for (init; cond; step) body`; `for (int i = 0, j = 1; ...)` has two items in `init`."""

    init: tuple[Stmt, ...]
    cond: Expr | None
    step: Expr | None
    body: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class While(Stmt):
    """`while (cond) body`, or `do body while (cond);` when `do` is set."""

    cond: Expr
    body: Block
    do: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(Stmt):
    """`return value;`."""

    value: Expr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Stmt):
    """`break;`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue(Stmt):
    """`continue;`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pragma(Stmt):
    """`#pragma text`; `dovetail tune(NAME in 1..6)` names a tunable, the rest passes through."""

    text: str


# ---- top level ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Node):
    """One function parameter."""

    type: Type
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Node):
    """A function with a body. `static`/`inline` as written."""

    name: str
    returns: Type
    params: tuple[Param, ...]
    body: Block
    static: bool = False
    inline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StructDef(Node):
    """`struct name { ... };` or `union name { ... };`."""

    kind: str
    name: str
    fields: tuple[Param, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit(Node):
    """A translation unit: structs, const tables (`Declare`), pragmas, functions, in order."""

    items: tuple[Node, ...]

    def function(self, name: str) -> Function:
        """Return the function called `name`; KeyError if there is none."""
        for item in self.items:
            if isinstance(item, Function) and item.name == name:
                return item
        raise KeyError(name)
