"""High-IR nodes: Python-like kernel text, ISA-neutral. Expressions live in `dovetail.ir.expr`."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.ir.expr import Expr, Index, Name, Type
from dovetail.ir.node import Node

# ---- expressions only the high IR has ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Expr):
    """`"bf16"`: a compile-time string, for comparing tunables (`W == "bf16"`) or as a dtype."""

    value: str


# ---- statements ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Stmt(Node):
    """A statement. `reads`: what `scopes.read_names` found once, as passes ask many times."""

    reads: frozenset[str] | None = field(default=None, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign(Stmt):
    """`target = value`, or with `type`, `target: type = value`. `op` is `=`, `+=`, `*=` ..."""

    target: Name | Index
    value: Expr
    op: str = "="
    type: Type | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regs(Stmt):
    """`name = regs((a, b), f32)`: a zeroed tile of vector registers, indexed at compile time."""

    name: str
    shape: tuple[Expr, ...]
    elem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(Stmt):
    """`name = local(size, f32)`: a 64-byte aligned stack array, contents undefined."""

    name: str
    size: Expr
    elem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExprStmt(Stmt):
    """A call evaluated for its effect: `vstore(...)`, `prefetch(...)`, an inline function."""

    expr: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class If(Stmt):
    """`if cond: ... else: ...`; `elif` is an `If` in `other`. A constant `cond` picks one."""

    cond: Expr
    then: tuple[Stmt, ...]
    other: tuple[Stmt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class For(Stmt):
    """`for var in KIND(start, stop, step)`.

    `range`: an ordinary loop. `unroll`: all bounds are compile-time, the body is repeated.
    `vrange(start, stop)`: steps by VL; in the last, partial step `vload`/`vstore` touch only the
    lanes left (loads give 0 in the others) and `vtail(v, fill)` replaces the lanes past the end.
    """

    kind: str
    var: str
    start: Expr
    stop: Expr
    step: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class While(Stmt):
    """`while cond: ...`."""

    cond: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(Stmt):
    """`return value`."""

    value: Expr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Stmt):
    """`break`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue(Stmt):
    """`continue`."""


# ---- top level ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Node):
    """A parameter: `name: type`. Special: `sched`, `thread` (i64), `const`, `dtype`, `tile`."""

    name: str
    type: Type


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable(Node):
    """`NAME: param = choice(...)`: a value bound while lowering. Dtypes are strings."""

    name: str
    choices: tuple[int | str, ...]
    default: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Node):
    """`@kernel` (exported) or `@inline` (expanded at each call) function."""

    kind: str
    name: str
    params: tuple[Param, ...]
    returns: Type | None
    tunables: tuple[Tunable, ...]
    body: tuple[Stmt, ...]
    doc: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit(Node):
    """A module: functions in order, names of imported modules, and notes left by `lift`."""

    functions: tuple[Function, ...]
    imports: tuple[str, ...] = ()
    doc: str = ""
    notes: tuple[str, ...] = ()

    def function(self, name: str) -> Function:
        """Return the function called `name`; KeyError if there is none."""
        for item in self.functions:
            if item.name == name:
                return item
        raise KeyError(name)
