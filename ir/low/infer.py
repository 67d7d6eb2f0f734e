"""Types of low-IR expressions: expression and scope in, type out; faults go to the reporter.

A type that is not known, of a fault already reported, is None and fits everything.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dovetail.ir import expr as ex
from dovetail.ir.diagnostics import Span, did_you_mean
from dovetail.ir.low import nodes as low
from dovetail.ir.low import types
from dovetail.ir.low.conversions import INT, VOID, assignable, combine, promote
from dovetail.ir.low.lex import Reporter
from dovetail.ir.low.print import print_low

SIZE = ex.NamedType(name="size_t")


Scope = ChainMap[str, ex.Type]
"""Variables of a block, and of the blocks around it."""


@dataclass(slots=True)
class Inference:
    """Finds types of expressions and reports what C would refuse."""

    reporter: Reporter
    functions: dict[str, types.Signature]
    structs: dict[str, low.StructDef]
    known: Mapping[str, types.Signature]
    known_constants: Mapping[str, int]
    constants: dict[str, int] = field(default_factory=dict)  # values of static const integers

    def report(self, code: str, message: str, span: Span, hint: str | None = None) -> None:
        """Record a fault."""
        self.reporter.add(code, message, span, hint)

    def type_of(self, expr: ex.Expr, scope: Scope) -> ex.Type | None:
        """Return the type of `expr`, reporting faults inside it."""
        return _RULES[type(expr)](self, expr, scope)

    def value_of(self, expr: ex.Expr, scope: Scope) -> ex.Type | None:
        """Return the type of `expr` where a value is wanted: arrays decay, void is refused."""
        found = self.type_of(expr, scope)
        if found == VOID:
            self.report("low-void", "this has no value", expr.span)
            return None
        return types.unqualified(found) if found is not None else None

    def condition(self, expr: ex.Expr, scope: Scope) -> None:
        """Check an expression that is tested against zero."""
        found = self.value_of(expr, scope)
        if (
            found is not None
            and types.scalar(found) is None
            and not isinstance(found, ex.PointerType)
        ):
            hint = "compare lanes with an intrinsic and test the mask"
            self.report("low-condition", f"{print_low(found)} is no condition", expr.span, hint)

    def fits(self, target: ex.Type, value: ex.Expr, scope: Scope, where: str) -> None:
        """Check that `value` may initialise or be assigned to a `target`."""
        if isinstance(value, low.InitList):
            self.initialiser(target, value, scope)
            return
        found = self.value_of(value, scope)
        wanted = types.unqualified(target)
        if found is None or assignable(wanted, found, value):
            return
        message = f"{where} wants {print_low(wanted)}, this is {print_low(found)}"
        both_pointers = isinstance(found, ex.PointerType) and isinstance(target, ex.PointerType)
        self.report("low-type-mismatch", message, value.span, "cast it" if both_pointers else None)

    def initialiser(self, target: ex.Type, value: low.InitList, scope: Scope) -> None:
        """Check `{...}` against the array, struct or scalar it fills."""
        if isinstance(target, ex.ArrayType):
            size = types.constant(target.size, self.constants) if target.size else None
            if size is not None and len(value.items) > size:
                message = f"{len(value.items)} values for an array of {size}"
                self.report("low-initialiser", message, value.items[size].span)
            for item in value.items:
                self.fits(target.of, item, scope, "the array")
            return
        for item in value.items:
            self.value_of(item, scope)

    # ---- lvalues ----

    def target(self, expr: ex.Expr, scope: Scope, verb: str) -> ex.Type | None:
        """Return the type of what is assigned to; it must be a changeable place."""
        found = self.type_of(expr, scope)
        place = isinstance(expr, ex.Name | ex.Index | low.Member) or (
            isinstance(expr, ex.Unary) and expr.op == "*"
        )
        if not place or (isinstance(expr, ex.Name) and expr.id not in scope):
            if place and found is None:
                return None  # the name itself was reported
            self.report("low-not-assignable", f"this cannot be {verb}", expr.span)
            return None
        if getattr(found, "const", False):
            self.report("low-const", f"this is const and cannot be {verb}", expr.span)
        elif isinstance(found, ex.ArrayType):
            self.report("low-not-assignable", f"an array cannot be {verb}", expr.span)
        return found

    def pointee(self, expr: ex.Expr, scope: Scope, verb: str) -> ex.Type | None:
        """Return what a pointer expression points at."""
        found = self.type_of(expr, scope)
        if found is None or isinstance(found, ex.PointerType | ex.ArrayType):
            of = found.of if found is not None else None
            if of is not None and types.unqualified(of) == VOID:
                hint = "cast it to a typed pointer"
                self.report("low-not-pointer", f"void* cannot be {verb}", expr.span, hint)
                return None
            return of
        message = f"{print_low(found)} cannot be {verb}"
        self.report("low-not-pointer", message, expr.span)
        return None

    def fields(self, type_: ex.Type | None, span: Span) -> Mapping[str, ex.Type] | None:
        """Return the fields of a struct, union or NEON vector group."""
        if not isinstance(type_, ex.NamedType):
            return None
        if type_.name in types.VECTOR_GROUPS:
            of, count = types.VECTOR_GROUPS[type_.name]
            return {"val": ex.ArrayType(of=ex.NamedType(name=of), size=ex.Int(value=count))}
        if type_.name.startswith(("struct ", "union ")):
            found = self.structs.get(type_.name.split()[1])
            if found is None:
                hint = "define it, or give it in a prelude"
                self.report("low-incomplete", f"{type_.name} is not defined", span, hint)
                return None
            return {f.name: f.type for f in found.fields}
        self.report("low-not-struct", f"{print_low(type_)} has no fields", span)
        return None


# ---- one rule per node ----


def _int(self: Inference, expr: ex.Int, scope: Scope) -> ex.Type | None:
    suffix = expr.text.lower().lstrip("0123456789abcdefx").strip()
    if "l" in suffix or expr.value >= 2**31:
        return ex.NamedType(name="unsigned long" if "u" in suffix else "long")
    return ex.NamedType(name="unsigned" if "u" in suffix else "int")


def _float(self: Inference, expr: ex.Float, scope: Scope) -> ex.Type | None:
    return ex.NamedType(name="double" if expr.text and expr.text[-1] not in "fF" else "float")


def _name(self: Inference, expr: ex.Name, scope: Scope) -> ex.Type | None:
    found = scope.get(expr.id) or types.CONSTANTS.get(expr.id)
    if found is not None or expr.id in self.known_constants:
        return found or INT
    hint = did_you_mean(expr.id, set(scope))
    self.report("low-unknown-name", f"`{expr.id}` is not declared", expr.span, hint)
    return None


def _unary(self: Inference, expr: ex.Unary, scope: Scope) -> ex.Type | None:
    if expr.op == "*":
        return self.pointee(expr.operand, scope, "dereferenced")
    if expr.op == "&":
        if not isinstance(expr.operand, ex.Name | ex.Index | low.Member | ex.Unary):
            self.report("low-address", "only a variable or element has an address", expr.span)
            return None
        of = self.type_of(expr.operand, scope)
        return ex.PointerType(of=of) if of is not None else None
    if expr.op == "!":
        self.condition(expr.operand, scope)
        return INT
    found = self.value_of(expr.operand, scope)
    if found is None:
        return None
    if expr.op == "~" and not types.is_integer(found):
        self.report("low-operand", f"`~` wants an integer, this is {print_low(found)}", expr.span)
        return None
    if types.scalar(found) is None and types.vector(found) is None:
        message = f"`{expr.op}` wants a number, this is {print_low(found)}"
        self.report("low-operand", message, expr.span)
        return None
    return promote(found)


def _binary(self: Inference, expr: ex.Binary, scope: Scope) -> ex.Type | None:
    if expr.op in ("&&", "||"):
        self.condition(expr.left, scope)
        self.condition(expr.right, scope)
        return INT
    left, right = self.value_of(expr.left, scope), self.value_of(expr.right, scope)
    if left is None or right is None:
        return INT if expr.op in ex.COMPARISONS else None
    result = combine(expr.op, left, right)
    if result is None:
        message = f"`{expr.op}` cannot join {print_low(left)} and {print_low(right)}"
        self.report("low-operand", message, expr.span)
    return result


def _ternary(self: Inference, expr: ex.Ternary, scope: Scope) -> ex.Type | None:
    self.condition(expr.cond, scope)
    then, other = self.value_of(expr.then, scope), self.value_of(expr.other, scope)
    if then is None or other is None:
        return then or other
    if types.scalar(then) and types.scalar(other):
        return combine("+", then, other)
    if assignable(then, other, expr.other):
        return then
    if assignable(other, then, expr.then):
        return other
    message = f"the two values are {print_low(then)} and {print_low(other)}"
    self.report("low-type-mismatch", message, expr.span)
    return None


def _call(self: Inference, expr: ex.Call, scope: Scope) -> ex.Type | None:
    known = (self.functions, types.LIBRARY, self.known)
    signature = next((table[expr.name] for table in known if expr.name in table), None)
    if signature is None:
        near = did_you_mean(expr.name, set().union(*known))
        hint = near or "define it, or check the target's intrinsics"
        message = f"no function or intrinsic `{expr.name}` is known"
        self.report("low-unknown-function", message, expr.span, hint)
        for arg in expr.args:
            self.value_of(arg, scope)
        return None
    wants, has = len(signature.params), len(expr.args)
    if wants != has:
        message = f"`{expr.name}` takes {wants} arguments, here are {has}"
        self.report("low-arity", message, expr.span)
        return signature.returns
    for arg, wanted in zip(expr.args, signature.params, strict=True):
        if wanted is None:
            self.value_of(arg, scope)
        else:
            self.fits(wanted, arg, scope, f"`{expr.name}`")
    return signature.returns


def _index(self: Inference, expr: ex.Index, scope: Scope) -> ex.Type | None:
    found = self.value_of(expr.indices[0], scope)
    if found is not None and not types.is_integer(found):
        message = f"an index is an integer, this is {print_low(found)}"
        self.report("low-index", message, expr.indices[0].span)
    base = self.type_of(expr.base, scope)
    lanes = types.vector(base)
    if lanes is not None and lanes.lane is not None:
        return ex.NamedType(name=lanes.lane)
    return self.pointee(expr.base, scope, "indexed")


def _cast(self: Inference, expr: ex.Cast, scope: Scope) -> ex.Type | None:
    found = self.value_of(expr.operand, scope)
    target = types.unqualified(expr.type)
    if target == VOID or found is None:
        return target
    numbers = types.scalar(target) and types.scalar(found)
    addresses = isinstance(target, ex.PointerType) and (
        isinstance(found, ex.PointerType) or types.is_integer(found)
    )
    to, of = types.vector(target), types.vector(found)
    same_bits = to and of and to.size == of.size
    as_integer = isinstance(found, ex.PointerType) and types.is_integer(target)
    if not (numbers or addresses or same_bits or as_integer or target == found):
        message = f"{print_low(found)} cannot be cast to {print_low(target)}"
        self.report("low-cast", message, expr.span)
    return target


def _member(self: Inference, expr: low.Member, scope: Scope) -> ex.Type | None:
    if expr.arrow:
        base = self.pointee(expr.base, scope, "followed with ->")
    else:
        base = self.type_of(expr.base, scope)
        if isinstance(base, ex.PointerType):
            self.report("low-not-struct", "this is a pointer", expr.base.span, "use ->")
            return None
    found = self.fields(base, expr.base.span) if base is not None else None
    if found is None:
        return None
    if expr.field not in found:
        assert base is not None
        hint = did_you_mean(expr.field, found)
        self.report("low-field", f"{print_low(base)} has no field `{expr.field}`", expr.span, hint)
    return found.get(expr.field)


def _assign(self: Inference, expr: low.Assign, scope: Scope) -> ex.Type | None:
    target = self.target(expr.target, scope, "assigned to")
    if expr.op == "=":
        if target is None:
            self.value_of(expr.value, scope)
        else:
            self.fits(target, expr.value, scope, "the assignment")
        return target
    value = self.value_of(expr.value, scope)
    if target is not None and value is not None:
        result = combine(expr.op[:-1], types.unqualified(target), value)
        if result is None or not assignable(types.unqualified(target), result, expr.value):
            message = f"`{expr.op}` cannot join {print_low(target)} and {print_low(value)}"
            self.report("low-operand", message, expr.span)
    return target


def _step(self: Inference, expr: low.Step, scope: Scope) -> ex.Type | None:
    found = self.target(expr.target, scope, "stepped")
    if found is not None and types.scalar(found) is None and not isinstance(found, ex.PointerType):
        message = f"`{expr.op}` wants a number or a pointer, this is {print_low(found)}"
        self.report("low-operand", message, expr.span)
    return found


def _sizeof(self: Inference, expr: low.SizeOf, scope: Scope) -> ex.Type | None:
    if isinstance(expr.of, ex.Expr):
        self.type_of(expr.of, scope)
    return SIZE


def _init_list(self: Inference, expr: low.InitList, scope: Scope) -> ex.Type | None:
    self.report("low-initialiser", "a list may only initialise an array or struct", expr.span)
    return None


_RULES: dict[type[ex.Expr], Callable[..., ex.Type | None]] = {
    ex.Int: _int,
    ex.Float: _float,
    ex.Name: _name,
    ex.Unary: _unary,
    ex.Binary: _binary,
    ex.Ternary: _ternary,
    ex.Call: _call,
    ex.Index: _index,
    ex.Cast: _cast,
    low.Member: _member,
    low.Assign: _assign,
    low.Step: _step,
    low.Comma: lambda self, expr, scope: [self.type_of(item, scope) for item in expr.items][-1],
    low.SizeOf: _sizeof,
    low.InitList: _init_list,
}
