"""Rebuild statements with names replaced and expressions folded, for every lowering step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dovetail.codegen.lower.fold import fold, fold_dtype, fold_type
from dovetail.ir.expr import Expr, Index, Name
from dovetail.ir.high.nodes import Assign, ExprStmt, For, If, Local, Regs, Return, Stmt, While
from dovetail.ir.high.scopes import Body, map_bodies

Env = Mapping[str, Expr]
Inner = Callable[[Body], Body]


def new_name(name: str, env: Env) -> str:
    """Return what the variable `name` is called under `env`."""
    found = env.get(name)
    return found.id if isinstance(found, Name) else name


def rebuild(stmt: Stmt, env: Env, inner: Inner) -> Stmt:
    """Return `stmt` with its expressions folded under `env`; `inner` rebuilds bodies inside it."""
    handler = _REBUILD.get(type(stmt))
    return handler(stmt, env, inner) if handler else stmt


def rebuild_body(body: Body, env: Env) -> Body:
    """Return `body` with `env` applied everywhere."""
    return tuple(rebuild(stmt, env, lambda inner: rebuild_body(inner, env)) for stmt in body)


def _target(target: Name | Index, env: Env) -> Name | Index:
    if isinstance(target, Name):
        return Name(id=new_name(target.id, env), span=target.span)
    folded = fold(target, env)
    assert isinstance(folded, Index)
    return folded


def _assign(stmt: Assign, env: Env, inner: Inner) -> Stmt:
    type_ = fold_type(stmt.type, env) if stmt.type else None
    target, value = _target(stmt.target, env), fold(stmt.value, env)
    return Assign(target=target, value=value, op=stmt.op, type=type_, span=stmt.span)


def _regs(stmt: Regs, env: Env, inner: Inner) -> Stmt:
    shape = tuple(fold(item, env) for item in stmt.shape)
    name, elem = new_name(stmt.name, env), fold_dtype(stmt.elem, env)
    return replace(stmt, name=name, shape=shape, elem=elem)


def _local(stmt: Local, env: Env, inner: Inner) -> Stmt:
    name, elem = new_name(stmt.name, env), fold_dtype(stmt.elem, env)
    return replace(stmt, name=name, size=fold(stmt.size, env), elem=elem)


def _for(stmt: For, env: Env, inner: Inner) -> Stmt:
    start, stop, step = (fold(item, env) for item in (stmt.start, stmt.stop, stmt.step))
    loop = replace(stmt, var=new_name(stmt.var, env), start=start, stop=stop, step=step)
    return map_bodies(loop, inner)


_REBUILD: dict[type[Stmt], Callable[[Any, Env, Inner], Stmt]] = {
    Assign: _assign,
    Regs: _regs,
    Local: _local,
    For: _for,
    If: lambda stmt, env, inner: map_bodies(replace(stmt, cond=fold(stmt.cond, env)), inner),
    While: lambda stmt, env, inner: map_bodies(replace(stmt, cond=fold(stmt.cond, env)), inner),
    Return: lambda stmt, env, inner: (
        replace(stmt, value=fold(stmt.value, env)) if stmt.value else stmt
    ),
    ExprStmt: lambda stmt, env, inner: ExprStmt(expr=fold(stmt.expr, env), span=stmt.span),
}
