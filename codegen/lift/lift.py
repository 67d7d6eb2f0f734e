"""One function of a low-IR unit to a high-IR module, on one page.

Scalar loops are vectorised, vector loops of the instruction set are proved elementwise and made
independent of its width; `Unit.notes` says what was assumed and what stayed as it was.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from dovetail.codegen.catalog import load_kernel_module, resolve_imports
from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.codegen.isa.signatures import known_constants, known_functions
from dovetail.codegen.lift.emit import type_of
from dovetail.codegen.lift.layout import Layout
from dovetail.codegen.lift.literal import write_out
from dovetail.codegen.lift.pinned import Pinned
from dovetail.codegen.lift.scalar import Scalars
from dovetail.codegen.lift.statements import Statements
from dovetail.codegen.lift.strips import Strips
from dovetail.codegen.lift.types import (
    TAGGED,
    VECTOR_CALLS,
    VOID,
    Names,
    reason_of,
    refuse,
    spellings,
    value_type,
)
from dovetail.codegen.lift.widen import widen
from dovetail.codegen.targets import TARGETS
from dovetail.ir import expr as ex
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SpecError, SyntaxDiagnostic
from dovetail.ir.high import nodes as high
from dovetail.ir.high.ops import OPS
from dovetail.ir.high.verify import verify_high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.parse import Pieces
from dovetail.ir.low.preprocess import TUNE
from dovetail.ir.low.types import constant, is_integer, vector
from dovetail.ir.low.verify import verify_low
from dovetail.ir.node import rewrite_node

MATH_MODULES = dict.fromkeys(VECTOR_CALLS.values(), "math_h") | dict.fromkeys(OPS)
MATH_MODULES |= dict.fromkeys(("vexp", "vsigmoid", "vsilu"), "math_f32")
"""Function of vectors to the module that has it; None for a builtin."""


def lift(unit: low.Unit, function: str, *, faults: SyntaxDiagnostic | None = None) -> high.Unit:
    """Return a module with the kernel `function` and the inline helpers it calls.

    Parameters keep their order; integers become i64 and a pointer to a struct of floats becomes
    ptr[f32]. What the C function returns goes to a last parameter, `result`. `faults` are what the
    verifier of C found: such text is only written out as it stands.
    Raises SpecError, with the reason, for C that has no high form.
    """
    functions = {f.name: f for f in unit.items if isinstance(f, low.Function)}
    check_known(function, functions, functions)
    lifter = _Lifter(unit, functions)
    if faults is not None:
        return lifter.as_it_stands(functions[function], faults.diagnostics[0].message)
    try:
        return lifter.understood(functions[function])
    except SpecError as error:
        return lifter.as_it_stands(functions[function], reason_of(error))


def lift_function(pieces: Pieces, function: str) -> high.Unit:
    """Return a module with one function of a text, as `lift`; only what it needs is parsed.

    Raises SyntaxDiagnostic where that is no C of the subset.
    """
    check_known(function, pieces.functions, pieces.own)
    unit = pieces.unit([function])
    targets = list(TARGETS.values())
    source = pieces.functions[function][0]
    try:
        verify_low(
            unit, source, functions=known_functions(targets), constants=known_constants(targets)
        )
    except SyntaxDiagnostic as faults:
        return lift(unit, function, faults=faults)
    return lift(unit, function)


def check_known(function: str, functions: Container[str], shown: Iterable[str]) -> None:
    """Raise SpecError where a text has no such function, with those that it has."""
    if function not in functions:
        known = ", ".join(sorted(shown)) or "none"
        raise SpecError(f"there is no function `{function}`; the text has: {known}")


def finish(unit: high.Unit) -> high.Unit:
    """Return what was made as the parser reads it.

    Raises SpecError where the C was such that the high IR would refuse what it became.
    """
    made = rewrite_node(unit, [(ex.Int, spell_number), (ex.Float, spell_number)])
    assert isinstance(made, high.Unit)
    imported = resolve_imports(replace(made, functions=())).functions
    try:
        verify_high(made, Source("lifted", ""), imported=imported)
    except SyntaxDiagnostic as error:
        raise refuse(error.diagnostics[0].message) from None
    return made


@cache
def _imported_names() -> frozenset[str]:
    """Return the names that a module which was lifted may import."""
    modules = {module for module in MATH_MODULES.values() if module is not None}
    return frozenset(f.name for module in modules for f in load_kernel_module(module).functions)


@cache
def _intrinsics() -> Mapping[str, Intrinsic]:
    return {n: row for t in reversed(TARGETS.values()) for n, row in t.intrinsics.items()}


def _takes_vectors(function: low.Function) -> bool:
    """Whether a helper works on vectors; such are followed where they are called."""
    types = [function.returns, *(p.type for p in function.params)]
    return any(vector(type_) is not None for type_ in types)


def _holds_vectors(function: low.Function) -> bool:
    rows = (_intrinsics().get(n.name) for n in function.walk() if isinstance(n, ex.Call))
    return any(row.lanes for row in rows if row is not None)


def spell_number(node: ex.Int | ex.Float) -> ex.Expr | None:
    """Return a number as the parser reads it: the sign apart, infinity by name."""
    if not node.value < 0 and node.value != math.inf:
        return None
    size = abs(node.value)
    plain: ex.Expr = ex.Int(value=int(size)) if isinstance(node, ex.Int) else ex.Float(value=size)
    plain = ex.Name(id="inf") if size == math.inf else plain
    return ex.Unary(op="-", operand=plain) if node.value < 0 else plain


@dataclass(slots=True)
class _Lifter:
    unit: low.Unit
    functions: dict[str, low.Function]
    notes: list[str] = field(default_factory=list)
    inlines: dict[str, tuple[str, tuple[str, ...], str]] = field(default_factory=dict)

    def as_it_stands(self, function: low.Function, why: str) -> high.Unit:
        """Return the kernel written out literally; `why` tells what stood against more."""
        tables = {d.name: d for d in self.unit.items if isinstance(d, low.Declare)}
        try:
            made = write_out(function, self.functions, self.layout(), tables)
        except SpecError as error:
            second = reason_of(error)
            also = "" if second == why else f" (and not by its meaning: {why})"
            raise refuse(f"{second}{also}") from None
        note = f"written out as it stands, because {why}"
        return finish(high.Unit(functions=(made,), notes=(note,)))

    def understood(self, function: low.Function) -> high.Unit:
        """Return the kernel with loops as vector loops, and helpers as @inline functions."""
        called = [self.functions[name] for name in self.called(function)]
        helpers = [self.inline(helper) for helper in called if not _takes_vectors(helper)]
        functions = (*helpers, self.kernel(function))
        calls = {n.name for f in functions for n in f.walk() if isinstance(n, ex.Call)}
        imports = tuple(sorted({m for m in map(MATH_MODULES.get, calls) if m is not None}))
        return finish(high.Unit(functions=functions, imports=imports, notes=tuple(self.notes)))

    def called(self, function: low.Function) -> list[str]:
        """Return the helpers a function calls, each before its users; recursion is refused."""
        order: list[str] = []

        def visit(current: low.Function, path: tuple[str, ...]) -> None:
            for node in current.walk():
                if isinstance(node, ex.Call) and node.name in self.functions:
                    if node.name in path:
                        raise refuse(f"the recursion of {node.name}")
                    visit(self.functions[node.name], (*path, node.name))
                    if node.name not in order:
                        order.append(node.name)

        visit(function, (function.name,))
        return order

    def inline(self, function: low.Function) -> high.Function:
        """Return a helper as an @inline function, by a name that no import has."""
        result = None if function.returns == VOID else value_type(function.returns)
        taken = _imported_names() | (self.functions.keys() - {function.name})
        name = next(made for made in spellings(function.name) if made not in taken)
        made = self.translate(function, "inline", result)
        params = tuple(value_type(p.type) for p in function.params)
        self.inlines[function.name] = (name, params, result or "void")
        return replace(made, name=name)

    def kernel(self, function: low.Function) -> high.Function:
        """Return the function as a @kernel."""
        if function.returns != VOID:
            raise refuse(f"{function.name} returns a value", "store it through a pointer")
        return self.translate(function, "kernel", None)

    def translate(self, function: low.Function, kind: str, result: str | None) -> high.Function:
        """Return the function in vectors of any width, or else in groups of its own width."""
        tunables = self.tunables(function) if kind == "kernel" else ()
        noted, how = list(self.notes), Statements
        try:
            params, body = self.attempt(function, tunables, how)
        except SpecError as reason:
            if not _holds_vectors(function):
                raise
            self.notes[:], how = noted, Pinned
            try:
                params, body = self.attempt(function, tunables, how)
            except SpecError as second:
                first = reason_of(reason)
                why = f"{reason_of(second)} (and not with symbolic width: {first})"
                raise refuse(why) from None
        while kind == "kernel" and body and body[-1] == high.Return():
            body = body[:-1]
        made = high.Function(
            kind=kind,
            name=function.name,
            params=params,
            returns=None if result is None else type_of(result),
            tunables=tunables,
            body=body,
        )
        return widen(made) if how is Pinned else made

    def attempt(
        self, function: low.Function, tunables: tuple[high.Tunable, ...], how: type[Statements]
    ) -> tuple[tuple[high.Param, ...], tuple[high.Stmt, ...]]:
        """Translate parameters and body one way; SpecError if it does not work."""
        tuned = {t.name for t in tunables}
        scalars = Scalars(Names(), self.layout(), tuned, self.inlines, notes=self.notes)
        types: dict[str, ex.Type] = {}
        for node in function.walk():
            if isinstance(node, low.Declare | low.Param):
                types.setdefault(node.name, node.type)
        strips = Strips(scalars, _intrinsics(), types, self.functions)
        params = tuple(self.param(p, scalars) for p in function.params)
        own = [
            s for s in function.body.body if not (isinstance(s, low.Declare) and s.name in tuned)
        ]
        try:
            return params, how(scalars, strips, function).function_body(own)
        except SpecError as reason:
            why = f" ({strips.reason})" if strips.reason else ""
            raise refuse(f"{reason_of(reason)}{why}") from None

    def param(self, param: low.Param, scalars: Scalars) -> high.Param:
        type_ = param.type
        of = type_.of if isinstance(type_, ex.PointerType | ex.ArrayType) else None
        if isinstance(of, ex.NamedType) and of.name.startswith(TAGGED):
            scalars.structs[param.name] = of
        kind = value_type(type_)
        return high.Param(name=scalars.names.declare(param.name, kind), type=type_of(kind))

    def layout(self) -> Layout:
        """Return the structs and the constants of the file."""
        structs = {s.name: s for s in self.unit.items if isinstance(s, low.StructDef)}
        return Layout(structs, self.constants())

    def constants(self) -> dict[str, int]:
        """Return the integer constants of the file."""
        found: dict[str, int] = {}
        for item in self.unit.items:
            if isinstance(item, low.Declare) and is_integer(item.type) and item.init is not None:
                value = constant(item.init, found)
                if value is not None:
                    found[item.name] = value
        return found

    def tunables(self, function: low.Function) -> tuple[high.Tunable, ...]:
        """Return the parameters that `#pragma dovetail tune(NAME in a..b)` declares."""
        values = self.constants()
        for node in function.walk():
            if isinstance(node, low.Declare) and node.init is not None:
                value = constant(node.init, values)
                if value is not None:
                    values.setdefault(node.name, value)
        found: dict[str, high.Tunable] = {}
        for node in self.unit.walk():
            tune = TUNE.fullmatch(node.text) if isinstance(node, low.Pragma) else None
            if tune is None:
                continue
            name, first, last = tune[1], int(tune[2]), int(tune[3])
            if name not in values:
                raise refuse(f"tune names {name}, which is no constant")
            if not first <= values[name] <= last:
                raise refuse(f"{name} is {values[name]}, outside {first}..{last}")
            choices = tuple(range(first, last + 1))
            found[name] = high.Tunable(name=name, choices=choices, default=values[name])
        return tuple(found.values())
