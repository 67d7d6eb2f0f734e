"""Rebuild statements with names replaced and expressions folded, for every lowering step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.codegen.lower.fold import fold, fold_dtype, fold_type
from dovetail.ir.expr import Expr, Index, Name
from dovetail.ir.high.nodes import Assign, ExprStmt, For, If, Local, Regs, Return, Stmt, While

Env = Mapping[str, Expr]
Body = tuple[Stmt, ...]


def new_name(name: str, env: Env) -> str:
    """Return what the variable `name` is called under `env`."""
    found = env.get(name)
    return found.id if isinstance(found, Name) else name


def rebuild(stmt: Stmt, env: Env, inner: Callable[[Body], Body]) -> Stmt:
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


def _assign(stmt: Assign, env: Env, inner: Callable[[Body], Body]) -> Stmt:
    type_ = fold_type(stmt.type, env) if stmt.type else None
    target, value = _target(stmt.target, env), fold(stmt.value, env)
    return Assign(target=target, value=value, op=stmt.op, type=type_, span=stmt.span)


def _regs(stmt: Regs, env: Env, inner: Callable[[Body], Body]) -> Stmt:
    shape = tuple(fold(item, env) for item in stmt.shape)
    elem = fold_dtype(stmt.elem, env)
    return Regs(name=new_name(stmt.name, env), shape=shape, elem=elem, span=stmt.span)


def _local(stmt: Local, env: Env, inner: Callable[[Body], Body]) -> Stmt:
    elem = fold_dtype(stmt.elem, env)
    size = fold(stmt.size, env)
    return Local(name=new_name(stmt.name, env), size=size, elem=elem, span=stmt.span)


def _for(stmt: For, env: Env, inner: Callable[[Body], Body]) -> Stmt:
    start, stop, step = (fold(item, env) for item in (stmt.start, stmt.stop, stmt.step))
    return For(
        kind=stmt.kind,
        var=new_name(stmt.var, env),
        start=start,
        stop=stop,
        step=step,
        body=inner(stmt.body),
        span=stmt.span,
    )


def _if(stmt: If, env: Env, inner: Callable[[Body], Body]) -> Stmt:
    cond = fold(stmt.cond, env)
    return If(cond=cond, then=inner(stmt.then), other=inner(stmt.other), span=stmt.span)


def _while(stmt: While, env: Env, inner: Callable[[Body], Body]) -> Stmt:
    return While(cond=fold(stmt.cond, env), body=inner(stmt.body), span=stmt.span)


def _return(stmt: Return, env: Env, inner: Callable[[Body], Body]) -> Stmt:
    return Return(value=fold(stmt.value, env) if stmt.value else None, span=stmt.span)


_REBUILD: dict[type[Stmt], Callable[[Any, Env, Callable[[Body], Body]], Stmt]] = {
    Assign: _assign,
    Regs: _regs,
    Local: _local,
    For: _for,
    If: _if,
    While: _while,
    Return: _return,
    ExprStmt: lambda stmt, env, inner: ExprStmt(expr=fold(stmt.expr, env), span=stmt.span),
}
