# ruff: noqa: D102 - method names are grammar rules and say it all
"""Parse-tree callbacks: grammar rules in, low-IR nodes with spans out.

Method names are the rules of grammar.lark; children are tokens, nodes, or tuples and helpers below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lark import Token, Transformer

from dovetail.ir import expr as ex
from dovetail.ir.diagnostics import NO_SPAN, Span
from dovetail.ir.low import declarators as decl
from dovetail.ir.low import nodes as low
from dovetail.ir.low.lex import Reporter, join_spans, token_span
from dovetail.ir.low.switch import Label, chain_arms
from dovetail.ir.low.types import ARITHMETIC
from dovetail.ir.node import Node


def span_of(children: Sequence[Any]) -> Span:
    """Return the span from the first to the last child that has one."""
    spans = [s for s in map(_span, children) if s.line]
    return join_spans(spans[0], spans[-1]) if spans else NO_SPAN


def _span(child: Any) -> Span:
    if isinstance(child, Token):
        return token_span(child)
    return getattr(child, "span", NO_SPAN)


def _nodes(children: Sequence[Any]) -> tuple[Any, ...]:
    """Return the children that are no tokens, lists spliced in."""
    out: list[Any] = []
    for child in children:
        if isinstance(child, decl.Items):
            out.extend(child.nodes)
        elif not isinstance(child, Token):
            out.append(child)
    return tuple(out)


def as_block(statement: Any) -> low.Block:
    """Return a statement as a block; an empty statement gives an empty one."""
    if isinstance(statement, low.Block):
        return statement
    return low.Block(body=_nodes([statement]), span=_span(statement))


_FLOAT = re.compile(
    r"((\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+)[fFlL]?|0[xX][0-9a-fA-F.]+[pP][+-]?\d+[fF]?"
)
_INT = re.compile(
    r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)"
    r"([uU](l{0,2}|L{0,2})|(l{1,2}|L{1,2})[uU]?)?"
)


class Builder(Transformer[Token, Any]):
    """Builds nodes; faults that the grammar cannot see go to the reporter."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self.reporter = reporter
        self.typedefs: dict[str, ex.Type] = {}
        self._anonymous = 0

    # ---- top level ----

    def function(self, c: list[Any]) -> decl.Items:
        specifiers, declarator, body = c
        if not declarator.layers or not isinstance(declarator.layers[0], decl.Parameters):
            self.reporter.add(
                "low-syntax", "a block may only follow a function's parameters", declarator.span
            )
            return decl.Items((), span_of(c))
        head, *rest = declarator.layers
        for param in head.params:
            if not param.name:
                self.reporter.add("low-parameter", "this parameter has no name", param.span)
        function = low.Function(
            name=declarator.name,
            returns=self._type(specifiers.type, tuple(rest), declarator.span),
            params=head.params,
            body=body,
            static=specifiers.static,
            inline=specifiers.inline,
            span=declarator.span,
        )
        return decl.Items((*specifiers.structs, function), span_of(c))

    def declaration(self, c: list[Any]) -> decl.Items:
        specifiers, declarators, _ = c
        made: list[Node] = list(specifiers.structs)
        for declarator, init in declarators.nodes:
            if declarator.layers and isinstance(declarator.layers[0], decl.Parameters):
                continue  # a prototype: the definition says the same
            type_ = self._type(specifiers.type, declarator.layers, declarator.span)
            made.append(
                low.Declare(
                    type=type_,
                    name=declarator.name,
                    init=init,
                    static=specifiers.static,
                    span=declarator.span,
                )
            )
        return decl.Items(tuple(made), span_of(c))

    def type_definition(self, c: list[Any]) -> decl.Items:
        _, specifiers, declarator, _ = c
        self.typedefs[declarator.name] = self._type(
            specifiers.type, declarator.layers, declarator.span
        )
        return decl.Items(specifiers.structs, span_of(c))

    # ---- types ----

    def specifiers(self, c: list[Any]) -> decl.Specifiers:
        span = span_of(c)
        words = [str(t) for t in c if isinstance(t, Token) and t.type == "TYPE_NAME"]
        structs = [s for s in c if isinstance(s, decl.Struct)]
        kinds = {t.type for t in c if isinstance(t, Token)}
        const = "CONST" in kinds
        name = structs[0].name if structs else ARITHMETIC.get(" ".join(sorted(words)))
        if name is None and len(words) == 1:
            name = words[0]
        if name is None or (structs and (words or len(structs) > 1)):
            said = " ".join(words) or "nothing"
            self.reporter.add("low-type", f"{said!r} names no type", span, "write one type")
            name = "int"
        return decl.Specifiers(
            ex.NamedType(name=name, const=const, span=span),
            "STATIC" in kinds,
            "INLINE" in kinds,
            tuple(d for s in structs for d in s.structs),
            span,
        )

    def struct_definition(self, c: list[Any]) -> decl.Struct:
        kind, tag = str(c[0]), c[1]
        if tag == "{":
            self._anonymous += 1
            tag = f"anonymous_{self._anonymous}"
        found = _nodes(c)
        fields = tuple(n for n in found if isinstance(n, low.Param))
        inner = tuple(n for n in found if isinstance(n, low.StructDef))
        definition = low.StructDef(kind=kind, name=str(tag), fields=fields, span=span_of(c[:2]))
        return decl.Struct(f"{kind} {tag}", (*inner, definition), span_of(c))

    def field(self, c: list[Any]) -> decl.Items:
        specifiers, *declarators = [n for n in c if not isinstance(n, Token)]
        params = [self._param(specifiers, d, d.span) for d in declarators]
        return decl.Items((*specifiers.structs, *params), span_of(c))

    def type_name(self, c: list[Any]) -> ex.Type:
        layers = c[1].layers if len(c) > 1 else ()
        return self._type(c[0].type, layers, span_of(c))

    def _type(self, base: ex.NamedType, layers: tuple[decl.Layer, ...], span: Span) -> ex.Type:
        type_: ex.Type = base
        if base.name in self.typedefs:
            type_ = self.typedefs[base.name]
            if base.const and isinstance(type_, ex.NamedType | ex.PointerType):
                type_ = replace(type_, const=True)
        for layer in reversed(layers):
            if not isinstance(layer, decl.Parameters):
                type_ = layer(of=type_, span=span)
                continue
            message = "function pointers are outside the kernel subset"
            hint = "call the function by its name"
            self.reporter.add("low-function-pointer", message, span, hint)
        return type_

    # ---- declarators ----

    def function_declarator(self, c: list[Any]) -> decl.Declarator:
        params = c[2].nodes if isinstance(c[2], decl.Items) else ()
        return decl.wrapped(c[0], decl.Parameters(params))

    def parameters(self, c: list[Any]) -> decl.Items:
        params = _nodes(c)
        void = ex.NamedType(name="void")
        if len(params) == 1 and params[0].type == void and not params[0].name:
            params = ()
        return decl.Items(params, span_of(c))

    def parameter(self, c: list[Any]) -> low.Param:
        declarator = c[1] if len(c) > 1 else decl.Declarator("")
        return self._param(c[0], declarator, span_of(c))

    def _param(
        self, specifiers: decl.Specifiers, declarator: decl.Declarator, span: Span
    ) -> low.Param:
        type_ = self._type(specifiers.type, declarator.layers, declarator.span)
        return low.Param(type=type_, name=declarator.name, span=span)

    # ---- statements ----

    def for_statement(self, c: list[Any]) -> low.For:
        cond = c[3] if isinstance(c[3], ex.Expr) else None
        step = c[-2].nodes[0] if c[-2].nodes else None
        init = _nodes(c[2:3])
        return low.For(init=init, cond=cond, step=step, body=as_block(c[-1]), span=span_of(c))

    def switch_statement(self, c: list[Any]) -> low.Block:
        return chain_arms(c[2], _nodes(c[5:]), self.reporter)

    # ---- expressions ----

    def call(self, c: list[Any]) -> ex.Call:
        args = c[2].nodes if isinstance(c[2], decl.Items) else ()
        if not isinstance(c[0], ex.Name):
            self.reporter.add(
                "low-call", "only a named function can be called", _span(c[0]), "name it directly"
            )
            return ex.Call(name="", args=args, span=span_of(c))
        return ex.Call(name=c[0].id, args=args, span=span_of(c))

    def text(self, c: list[Any]) -> ex.Expr:
        kind = "strings" if c[0].type == "STRING" else "characters"
        self.reporter.add(
            "low-string",
            f"{kind} are outside the kernel subset",
            span_of(c),
            "kernels compute numbers" if kind == "strings" else "write the number",
        )
        return ex.Int(value=0, span=span_of(c))

    def number(self, c: list[Any]) -> ex.Expr:
        text, span = str(c[0]), span_of(c)
        with suppress(ValueError, OverflowError):  # too many digits, or two points among them
            if _INT.fullmatch(text):
                value = _int_value(text)
                return ex.Int(value=value, text="" if text == str(value) else text, span=span)
            if _FLOAT.fullmatch(text):
                number = _float_value(text)
                spelled = f"{number!r}f"
                return ex.Float(value=number, text="" if text == spelled else text, span=span)
        self.reporter.add("low-number", f"{text!r} is no number", span)
        return ex.Int(value=0, span=span)


_PLAIN: dict[str, Callable[[list[Any], Span], Any]] = {
    "unit": lambda c, span: low.Unit(items=_nodes(c), span=span),
    "pragma": lambda c, span: low.Pragma(text=str(c[0]), span=span),
    "empty": lambda c, span: decl.Items((), span),
    "bare_declaration": lambda c, span: decl.Items(c[0].structs, span),
    "struct_reference": lambda c, span: decl.Struct(f"{c[0]} {c[1]}", (), span),
    "init_declarator": lambda c, span: (c[0], c[2] if len(c) > 1 else None),
    "init_declarators": lambda c, span: decl.Items(_nodes(c), span),
    "initialiser_list": lambda c, span: low.InitList(items=_nodes(c), span=span),
    "name_declarator": lambda c, span: decl.Declarator(str(c[0]), (), span),
    "group_declarator": lambda c, span: c[1],
    "pointer_declarator": decl.pointer,
    "array_declarator": lambda c, span: decl.wrapped(c[0], decl.array_layer(c)),
    "abstract_pointer": decl.pointer,
    "abstract_arrays": lambda c, span: decl.Declarator("", tuple(c)),
    "abstract_array": lambda c, span: decl.array_layer(c),
    "abstract_group": lambda c, span: decl.wrapped(c[1], *c[3:]),
    "block": lambda c, span: low.Block(body=_nodes(c), span=span),
    "expression_statement": lambda c, span: low.ExprStmt(expr=c[0], span=span),
    "if_statement": lambda c, span: low.If(
        cond=c[2], then=as_block(c[4]), other=as_block(c[6]) if len(c) > 5 else None, span=span
    ),
    "return_statement": lambda c, span: low.Return(value=c[1] if len(c) > 2 else None, span=span),
    "break_statement": lambda c, span: low.Break(span=span),
    "continue_statement": lambda c, span: low.Continue(span=span),
    "do_statement": lambda c, span: low.While(cond=c[4], body=as_block(c[1]), do=True, span=span),
    "while_statement": lambda c, span: low.While(cond=c[2], body=as_block(c[4]), span=span),
    "label": lambda c, span: Label(c[1] if len(c) > 2 else None, span),
    "for_step": lambda c, span: decl.Items(_nodes(c), span),
    "comma": lambda c, span: low.Comma(items=_nodes(c), span=span),
    "assign": lambda c, span: low.Assign(op=str(c[1]), target=c[0], value=c[2], span=span),
    "ternary": lambda c, span: ex.Ternary(cond=c[0], then=c[2], other=c[4], span=span),
    "binary": lambda c, span: ex.Binary(op=str(c[1]), left=c[0], right=c[2], span=span),
    "cast": lambda c, span: ex.Cast(type=c[1], operand=c[3], span=span),
    "unary": lambda c, span: ex.Unary(op=str(c[0]), operand=c[1], span=span),
    "step_before": lambda c, span: low.Step(op=str(c[0]), target=c[1], prefix=True, span=span),
    "step_after": lambda c, span: low.Step(op=str(c[1]), target=c[0], prefix=False, span=span),
    "sizeof": lambda c, span: low.SizeOf(of=c[2] if len(c) > 2 else c[1], span=span),
    "index": lambda c, span: ex.Index(base=c[0], indices=(c[2],), span=span),
    "arguments": lambda c, span: decl.Items(_nodes(c), span),
    "member": lambda c, span: low.Member(base=c[0], field=str(c[2]), arrow=c[1] == "->", span=span),
    "group": lambda c, span: replace(c[1], span=span),
    "name": lambda c, span: ex.Name(id=str(c[0]), span=span),
}
"""Rules that need nothing but their children: what each becomes."""


def _method(make: Callable[[list[Any], Span], Any]) -> Callable[[Builder, list[Any]], Any]:
    return lambda _self, c: make(c, span_of(c))


for _rule, _make in _PLAIN.items():
    setattr(Builder, _rule, _method(_make))


def _int_value(text: str) -> int:
    digits = text.rstrip("uUlL")
    return int(digits, 8 if digits.startswith("0") and digits.isdecimal() else 0)


def _float_value(text: str) -> float:
    if text[:2] in ("0x", "0X"):
        return float.fromhex(text.rstrip("fF"))
    return float(text.rstrip("fFlL"))
