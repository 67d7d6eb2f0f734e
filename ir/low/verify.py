"""Checks a low-IR unit as a C compiler would: every fault in one SyntaxDiagnostic, none twice.

Names, types, arity, lvalues, constness, loops, returns, struct fields, tunables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.ir.diagnostics import Source
from dovetail.ir.expr import ArrayType, NamedType, Type
from dovetail.ir.low import nodes as low
from dovetail.ir.low.conversions import VOID
from dovetail.ir.low.infer import Inference, Scope
from dovetail.ir.low.lex import Reporter
from dovetail.ir.low.preprocess import TUNE
from dovetail.ir.low.types import Signature, constant, is_integer, sized, unqualified
from dovetail.ir.node import Node


def verify_low(
    unit: low.Unit,
    source: Source,
    *,
    functions: Mapping[str, Signature],
    constants: Mapping[str, int],
) -> None:
    """Raise SyntaxDiagnostic with every fault of `unit`, which was parsed from `source`.

    `functions` and `constants` are the intrinsics, helpers and header constants of the target.
    """
    infer = Inference(Reporter(source), {}, {}, functions, constants)
    _register(unit, infer)
    scope = Scope()
    for item in unit.items:
        if isinstance(item, low.Function):
            _check_function(item, infer, scope)
        elif isinstance(item, low.Stmt):
            _Body(infer, None, 0).check(item, scope)
    _check_tunables(unit, infer)
    infer.reporter.finish()


def _register(unit: low.Unit, infer: Inference) -> None:
    """Note functions and structs: functions may call others that come later."""

    def once(seen: Mapping[str, Any], item: Any, kind: str) -> None:
        if item.name in seen:
            infer.report("low-duplicate", f"{kind} `{item.name}` is defined twice", item.span)

    for item in unit.items:
        if isinstance(item, low.Function):
            once(infer.functions, item, "function")
            types = tuple(unqualified(p.type) for p in item.params)
            infer.functions[item.name] = Signature(types, unqualified(item.returns))
        elif isinstance(item, low.StructDef):
            once(infer.structs, item, item.kind)
            infer.structs[item.name] = item
            fields: dict[str, low.Param] = {}
            for field in item.fields:
                once(fields, field, "field")
                fields[field.name] = field


def _check_function(function: low.Function, infer: Inference, outer: Scope) -> None:
    scope = outer.new_child()
    body = _Body(infer, function, 0)
    for param in function.params:
        if param.name in scope.maps[0]:
            message = f"parameter `{param.name}` is declared twice"
            infer.report("low-duplicate", message, param.span)
        body.complete(param.type, param.name, param)
        array = isinstance(param.type, ArrayType)
        scope[param.name] = unqualified(param.type) if array else param.type
    body.block(function.body, scope)
    if unqualified(function.returns) != VOID and not _always_returns(function.body):
        message = f"`{function.name}` may end without returning a value"
        infer.report("low-missing-return", message, function.span)


def _check_tunables(unit: low.Unit, infer: Inference) -> None:
    declared = {n.name for n in unit.walk() if isinstance(n, low.Declare)}
    for node in unit.walk():
        found = TUNE.fullmatch(node.text) if isinstance(node, low.Pragma) else None
        if found and found[1] not in declared:
            message = f"tune names `{found[1]}`, which is no constant here"
            hint = f"add #define {found[1]} {found[2]}"
            infer.report("low-tune", message, node.span, hint)


@dataclass(slots=True)
class _Body:
    """Checks the statements of one function, or of the file outside functions."""

    infer: Inference
    function: low.Function | None
    loops: int

    def check(self, statement: Node, scope: Scope) -> None:
        _CHECKS[type(statement)](self, statement, scope)

    def block(self, block: low.Block, scope: Scope) -> None:
        """Check a block; names of a function's outermost block share its parameters' scope."""
        for statement in block.body:
            self.check(statement, scope)

    def nested(self, block: low.Block, scope: Scope) -> None:
        self.block(block, scope.new_child())

    def loop(self, block: low.Block, scope: Scope) -> None:
        self.loops += 1
        self.nested(block, scope)
        self.loops -= 1

    def complete(self, type_: Type, name: str, node: Node) -> None:
        """Check that a variable of this type can exist."""
        if unqualified(type_) == VOID:
            self.infer.report("low-void", f"`{name}` cannot be void", node.span)
        elif isinstance(type_, ArrayType):
            self._array(type_, name, node)
        elif isinstance(type_, NamedType) and type_.name.startswith(("struct ", "union ")):
            self.infer.fields(type_, node.span)

    def _array(self, type_: ArrayType, name: str, node: Node) -> None:
        if type_.size is None:
            return
        size = constant(type_.size, self.infer.constants)
        if size is not None and size <= 0:
            span = type_.size.span
            self.infer.report("low-array-size", f"`{name}` has {size} elements", span)
        elif size is None and self.function is None:
            message = f"the size of `{name}` is no constant"
            self.infer.report("low-array-size", message, type_.size.span)

    def declare(self, node: low.Declare, scope: Scope) -> None:
        if node.name in scope.maps[0]:
            self.infer.report("low-duplicate", f"`{node.name}` is declared twice", node.span)
        if isinstance(node.type, ArrayType) and node.type.size is not None:
            self.infer.value_of(node.type.size, scope)
        self.complete(node.type, node.name, node)
        if isinstance(node.type, ArrayType) and node.type.size is None and node.init is None:
            self.infer.report("low-array-size", f"`{node.name}` needs a size", node.span)
        if node.init is not None:
            self.infer.fits(node.type, node.init, scope, f"`{node.name}`")
        scope[node.name] = sized(node.type, node.init)
        constant_integer = is_integer(node.type) and getattr(node.type, "const", False)
        value = constant(node.init, self.infer.constants) if node.init is not None else None
        if constant_integer and value is not None:
            self.infer.constants[node.name] = value
        else:
            self.infer.constants.pop(node.name, None)

    def returns(self, node: low.Return, scope: Scope) -> None:
        assert self.function is not None
        wanted = unqualified(self.function.returns)
        name = self.function.name
        if node.value is None:
            if wanted != VOID:
                self.infer.report("low-return", f"`{name}` must return a value", node.span)
        elif wanted == VOID:
            self.infer.report("low-return", f"`{name}` returns nothing", node.value.span)
        else:
            self.infer.fits(wanted, node.value, scope, "the result")


def _if(body: _Body, node: low.If, scope: Scope) -> None:
    body.infer.condition(node.cond, scope)
    body.nested(node.then, scope)
    if node.other is not None:
        body.nested(node.other, scope)


def _for(body: _Body, node: low.For, scope: Scope) -> None:
    inner = scope.new_child()
    for init in node.init:
        body.check(init, inner)
    if node.cond is not None:
        body.infer.condition(node.cond, inner)
    if node.step is not None:
        body.infer.type_of(node.step, inner)
    body.loop(node.body, inner)


def _while(body: _Body, node: low.While, scope: Scope) -> None:
    body.infer.condition(node.cond, scope)
    body.loop(node.body, scope)


def _expression(body: _Body, node: low.ExprStmt, scope: Scope) -> None:
    body.infer.type_of(node.expr, scope)


def _leave(body: _Body, node: low.Break | low.Continue, scope: Scope) -> None:
    if not body.loops:
        word = "break" if isinstance(node, low.Break) else "continue"
        body.infer.report("low-outside-loop", f"`{word}` stands outside any loop", node.span)


_CHECKS: dict[type[Node], Callable[[_Body, Any, Scope], None]] = {
    low.Declare: _Body.declare,
    low.ExprStmt: _expression,
    low.Block: _Body.nested,
    low.If: _if,
    low.For: _for,
    low.While: _while,
    low.Return: _Body.returns,
    low.Break: _leave,
    low.Continue: _leave,
    low.Pragma: lambda body, node, scope: None,
    low.StructDef: lambda body, node, scope: None,
}


def _always_returns(block: low.Block) -> bool:
    for node in block.body:
        if isinstance(node, low.Return):
            return True
        if isinstance(node, low.Block) and _always_returns(node):
            return True
        if isinstance(node, low.If) and node.other is not None:
            if _always_returns(node.then) and _always_returns(node.other):
                return True
        if isinstance(node, low.While | low.For) and _endless(node):
            return True
    return False


def _endless(node: low.While | low.For) -> bool:
    never = node.cond is None or constant(node.cond, {}) not in (0, None)
    return never and not any(isinstance(n, low.Break) for n in node.body.walk())
