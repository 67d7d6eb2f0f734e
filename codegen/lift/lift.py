"""One function of a low-IR unit to a high-IR module, on one page.

Scalar loops are vectorised, vector loops of the instruction set are proved elementwise and made
independent of its width; `Unit.notes` says what was assumed and what stayed as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.codegen.catalog import resolve_imports
from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.codegen.isa.signatures import known_constants, known_functions
from dovetail.codegen.lift.layout import Layout
from dovetail.codegen.lift.literal import Literal
from dovetail.codegen.lift.pinned import Pinned
from dovetail.codegen.lift.reductions import reduce_chain
from dovetail.codegen.lift.scalar import Scalars
from dovetail.codegen.lift.statements import Statements
from dovetail.codegen.lift.strips import Strips
from dovetail.codegen.lift.types import REFUSED, Names, Unliftable, element_type, refuse, value_type
from dovetail.codegen.targets import TARGETS
from dovetail.ir import expr as ex
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SpecError, SyntaxDiagnostic
from dovetail.ir.high import nodes as high
from dovetail.ir.high.verify import verify_high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.parse import Pieces
from dovetail.ir.low.preprocess import TUNE
from dovetail.ir.low.types import constant, is_integer, vector
from dovetail.ir.low.verify import verify_low
from dovetail.ir.rewrite import rewrite_node

MATH_MODULE = "math_f32"
MATH_FUNCTIONS = ("vexp", "vsigmoid", "vsilu")


def lift(unit: low.Unit, function: str, *, faults: SyntaxDiagnostic | None = None) -> high.Unit:
    """Return a module with the kernel `function` and the inline helpers it calls.

    Parameters keep their order; integers become i64 and a pointer to a struct of floats becomes
    ptr[f32]. What the C function returns goes to a last parameter, `result`. `faults` are what the
    verifier of C found: such text is only written out as it stands.
    Raises SpecError, with the reason, for C that has no high form.
    """
    functions = {f.name: f for f in unit.items if isinstance(f, low.Function)}
    if function not in functions:
        known = ", ".join(sorted(functions)) or "none"
        raise SpecError(f"there is no function `{function}`; the text has: {known}")
    if faults is not None:
        return _as_it_stands(unit, functions, function, faults.diagnostics[0].message)
    try:
        return _understood(unit, functions, function)
    except SpecError as error:
        return _as_it_stands(unit, functions, function, str(error).removeprefix(REFUSED))


def lift_function(pieces: Pieces, function: str) -> high.Unit:
    """Return a module with one function of a text, as `lift`; only what it needs is parsed.

    Raises SyntaxDiagnostic where that is no C of the subset.
    """
    if function not in pieces.functions:
        known = ", ".join(sorted(pieces.own)) or "none"
        raise SpecError(f"there is no function `{function}`; the text has: {known}")
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


def _as_it_stands(
    unit: low.Unit, functions: dict[str, low.Function], function: str, why: str
) -> high.Unit:
    """Return the kernel written out literally; `why` tells what stood against more."""
    lifter = _Lifter(unit, functions, {})
    structs = {s.name: s for s in unit.items if isinstance(s, low.StructDef)}
    layout = Layout(structs, lifter.constants())
    tables = {d.name: d for d in unit.items if isinstance(d, low.Declare)}
    try:
        made = Literal(functions, layout, tables).kernel(functions[function])
    except SpecError as error:
        second = str(error).removeprefix(REFUSED)
        raise refuse(
            second if second == why else f"{second} (and not by its meaning: {why})"
        ) from None
    signed = rewrite_node(made, [(ex.Int, spell_number), (ex.Float, spell_number)])
    assert isinstance(signed, high.Function)
    note = f"written out as it stands, because {why}"
    whole = high.Unit(functions=(signed,), notes=(note,))
    check_lifted(whole)
    return whole


def _understood(unit: low.Unit, functions: dict[str, low.Function], function: str) -> high.Unit:
    """Return the kernel with loops as vector loops, and helpers as @inline functions."""
    lifter = _Lifter(unit, functions, _intrinsics())
    called = [functions[name] for name in lifter.called(functions[function])]
    helpers = tuple(lifter.inline(helper) for helper in called if not _takes_vectors(helper))
    kernel = lifter.kernel(functions[function])
    calls = {n.name for f in (*helpers, kernel) for n in f.walk() if isinstance(n, ex.Call)}
    imports = (MATH_MODULE,) if calls & set(MATH_FUNCTIONS) else ()
    made = high.Unit(functions=(*helpers, kernel), imports=imports, notes=tuple(lifter.notes))
    check_lifted(made)
    return made


def check_lifted(unit: high.Unit) -> None:
    """Raise SpecError where the C was such that the high IR would refuse what it became."""
    own = {function.name for function in unit.functions}
    imported = [f for f in resolve_imports(unit).functions if f.name not in own]
    try:
        verify_high(unit, Source("lifted", ""), imported=imported)
    except SyntaxDiagnostic as error:
        raise refuse(error.diagnostics[0].message) from None


def _intrinsics() -> Mapping[str, Intrinsic]:
    return {n: row for t in reversed(TARGETS.values()) for n, row in t.intrinsics.items()}


def _takes_vectors(function: low.Function) -> bool:
    """Whether a helper works on vectors; such are followed where they are called."""
    types = [function.returns, *(p.type for p in function.params)]
    return any(vector(type_) is not None for type_ in types)


def _holds_vectors(function: low.Function, intrinsics: Mapping[str, Intrinsic]) -> bool:
    calls = {n.name for n in function.walk() if isinstance(n, ex.Call)}
    return any(intrinsics[name].lanes for name in calls if name in intrinsics)


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
    intrinsics: Mapping[str, Intrinsic]
    notes: list[str] = field(default_factory=list)
    inlines: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)

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
        """Return a helper as an @inline function."""
        returns = function.returns
        void = isinstance(returns, ex.NamedType) and returns.name == "void"
        result = None if void else value_type(returns)
        made = self.translate(function, "inline", result)
        params = tuple(value_type(p.type) for p in function.params)
        self.inlines[function.name] = (params, result or "void")
        return made

    def kernel(self, function: low.Function) -> high.Function:
        """Return the function as a @kernel."""
        if function.returns != ex.NamedType(name="void"):
            raise refuse(f"{function.name} returns a value", "store it through a pointer")
        return self.translate(function, "kernel", None)

    def translate(self, function: low.Function, kind: str, result: str | None) -> high.Function:
        """Return the function in vectors of any width, or else in groups of its own width."""
        tunables = self.tunables(function) if kind == "kernel" else ()
        noted = list(self.notes)
        try:
            params, body = self.attempt(function, tunables, Statements)
        except (Unliftable, SpecError) as reason:
            if not _holds_vectors(function, self.intrinsics):
                raise refuse(str(reason).removeprefix(REFUSED)) from None
            self.notes[:] = noted
            try:
                params, body = self.attempt(function, tunables, Pinned)
            except (Unliftable, SpecError) as second:
                why = str(second).removeprefix(REFUSED)
                first = str(reason).removeprefix(REFUSED)
                raise refuse(f"{why} (and not with symbolic width: {first})") from None
        while kind == "kernel" and body and body[-1] == high.Return():
            body = body[:-1]
        made = high.Function(
            kind=kind,
            name=function.name,
            params=params,
            returns=None if result is None else ex.NamedType(name=result),
            tunables=tunables,
            body=body,
        )
        signed = rewrite_node(made, [(ex.Int, spell_number), (ex.Float, spell_number)])
        assert isinstance(signed, high.Function)
        return signed

    def attempt(
        self, function: low.Function, tunables: tuple[high.Tunable, ...], how: type[Statements]
    ) -> tuple[tuple[high.Param, ...], tuple[high.Stmt, ...]]:
        """Translate parameters and body one way; Unliftable or SpecError if it does not work."""
        tuned = {t.name for t in tunables}
        scalars = Scalars(
            Names(),
            {s.name: s for s in self.unit.items if isinstance(s, low.StructDef)},
            tuned,
            self.inlines,
            self.constants(),
            notes=self.notes,
        )
        types: dict[str, ex.Type] = {}
        for node in function.walk():
            if isinstance(node, low.Declare | low.Param):
                types.setdefault(node.name, node.type)
        strips = Strips(scalars, self.intrinsics, types, self.functions, reduce_chain)
        params = tuple(self.param(p, scalars) for p in function.params)
        own = [
            s for s in function.body.body if not (isinstance(s, low.Declare) and s.name in tuned)
        ]
        try:
            return params, how(scalars, strips, function).function_body(own)
        except (Unliftable, SpecError) as reason:
            why = f" ({strips.reason})" if strips.reason else ""
            raise Unliftable(f"{str(reason).removeprefix(REFUSED)}{why}") from None

    def param(self, param: low.Param, scalars: Scalars) -> high.Param:
        type_ = param.type
        of = type_.of if isinstance(type_, ex.PointerType | ex.ArrayType) else None
        if isinstance(of, ex.NamedType) and of.name.startswith(("struct ", "union ")):
            scalars.struct_params[param.name] = of.name
        high_type = value_type(type_)
        name = scalars.names.declare(param.name, high_type)
        if high_type.startswith("ptr"):
            assert of is not None
            made: ex.Type = ex.PointerType(of=ex.NamedType(name=element_type(of)))
        else:
            made = ex.NamedType(name=high_type)
        return high.Param(name=name, type=made)

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
