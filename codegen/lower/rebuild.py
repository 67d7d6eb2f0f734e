"""Rebuild statements with names replaced and expressions folded, for every lowering step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dovetail.codegen.lower.fold import fold, fold_dtype, fold_type
from dovetail.ir.expr import Expr, Index, Name
from dovetail.ir.high.nodes import Assign, For, Local, Regs, Stmt
from dovetail.ir.high.scopes import Body, map_bodies

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
    new = stmt.map_children(lambda node: fold(node, env) if isinstance(node, Expr) else node)
    if isinstance(new, Regs | Local):
        return replace(new, name=new_name(new.name, env), elem=fold_dtype(new.elem, env))
    if isinstance(new, For):
        new = replace(new, var=new_name(new.var, env))
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
