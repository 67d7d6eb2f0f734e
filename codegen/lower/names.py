"""Fresh names: one allocator per lowered kernel keeps inlined and unrolled variables apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from dovetail.codegen.lower.fold import fold, fold_dtype, fold_type
from dovetail.ir.expr import Expr, Index, Name
from dovetail.ir.high.nodes import Assign, For, If, Local, Regs, Stmt
from dovetail.ir.high.ops import REAL_FUNCTIONS, REAL_PAIRS
from dovetail.ir.high.scopes import Body, map_bodies

C_WORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if
    inline int long register restrict return short signed sizeof static struct switch typedef
    union unsigned void volatile while asm typeof main NULL INFINITY NAN y0 y1 yn j0 j1 jn gamma
    signgam index time
    and asm bool catch class constexpr delete explicit export false friend mutable namespace new
    noexcept not nullptr operator or private protected public template this throw true try
    typeid typename using virtual wchar_t xor gridDim blockDim blockIdx threadIdx warpSize
    """.split()
) | {f"{name}{f}" for name in (*REAL_FUNCTIONS, *REAL_PAIRS, "fabs") for f in ("", "f")}
"""Names that generated C variables never carry: keywords of C and C++, and what
the headers in use declare."""


class Names:
    """Hands out names that nothing else in the kernel uses."""

    def __init__(self, used: Iterable[str]) -> None:
        self._used = {*used, *C_WORDS}
        self._next: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """Return `base` if it is free, else `base_1`, `base_2` ..."""
        name, number = base, self._next.get(base, 0)
        while name in self._used:
            number += 1
            name = f"{base}_{number}"
        self._next[base] = number
        self._used.add(name)
        return name


Env = Mapping[str, Expr]
Inner = Callable[[Body], Body]


def new_name(name: str, env: Env) -> str:
    """Return what the variable `name` is called under `env`."""
    found = env.get(name)
    return found.id if isinstance(found, Name) else name


def rebuild(stmt: Stmt, env: Env, inner: Inner) -> Stmt:
    """Return `stmt` with its expressions folded under `env`; `inner` rebuilds bodies inside it."""
    if isinstance(stmt, Assign):  # whose target is no value, and whose type no expression
        type_ = fold_type(stmt.type, env) if stmt.type else None
        target, value = _target(stmt.target, env), fold(stmt.value, env)
        return Assign(target=target, value=value, op=stmt.op, type=type_, span=stmt.span)
    if isinstance(stmt, If):
        cond, then, other = fold(stmt.cond, env), inner(stmt.then), inner(stmt.other)
        return If(cond=cond, then=then, other=other, span=stmt.span)
    if isinstance(stmt, For):
        start, stop, step = (fold(bound, env) for bound in (stmt.start, stmt.stop, stmt.step))
        var, body = new_name(stmt.var, env), inner(stmt.body)
        return For(
            kind=stmt.kind, var=var, start=start, stop=stop, step=step, body=body, span=stmt.span
        )
    new = stmt.map_children(lambda node: fold(node, env) if isinstance(node, Expr) else node)
    if isinstance(new, (Regs, Local)):
        return replace(new, name=new_name(new.name, env), elem=fold_dtype(new.elem, env))
    return map_bodies(new, inner)


def rebuild_body(body: Body, env: Env) -> Body:
    """Return `body` with `env` applied everywhere."""
    return tuple(rebuild(stmt, env, lambda inner: rebuild_body(inner, env)) for stmt in body)


def _target(target: Name | Index, env: Env) -> Name | Index:
    if isinstance(target, Name):
        return Name(id=new_name(target.id, env), span=target.span)
    folded = fold(target, env)
    assert isinstance(folded, Index)
    return folded
