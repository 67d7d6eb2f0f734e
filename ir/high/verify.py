"""Verify high-IR modules: names, types, tunables, calls, control flow; all faults at once.

`verify_high(unit, source)` checks one module; `load_modules(source, resolver)` parses and verifies
a module and all it imports, and merges their functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx  # type: ignore[import-untyped]

from dovetail.ir.diagnostics import Diagnostic, Source, Span
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import Call, Name
from dovetail.ir.high.check_body import BodyChecker
from dovetail.ir.high.check_expr import ExprChecker, Scope
from dovetail.ir.high.nodes import For, Function, Param, Return, Tunable, Unit
from dovetail.ir.high.ops import CONSTANTS, ELEMENTS, OPS, SCALARS, VECTORS
from dovetail.ir.high.parse import parse_high
from dovetail.ir.high.parse_expr import Reporter
from dovetail.ir.high.print import print_high
from dovetail.ir.high.scopes import all_statements, defined_names, find_constants, find_homes
from dovetail.ir.schedule import SCHEDULE_VALUES

THREAD_VALUES = ("tid", "nth")
SPECIAL: dict[str, dict[str, tuple[str, ...]]] = {
    "kernel": {"sched": SCHEDULE_VALUES, "thread": THREAD_VALUES},
    "inline": {"const": (), "dtype": (), "tile": ()},
}
"""Special parameter types of each kind of function, and the names they may have (none = any)."""
VALUE_TYPES = {
    "sched": "i64",
    "thread": "i64",
    "const": "int",
    "dtype": "text",
    "tile": "tile[f32]",
}
COMPILE_TIME = ("const", "dtype")

MOST_CALLS = 32
"""Levels of calls among @inline functions; Python's own stack bounds what can be walked."""

Resolver = Callable[[str], Source]
"""Gives the source of a module by name; KeyError if there is none."""


def verify_high(unit: Unit, source: Source, *, imported: Sequence[Function] = ()) -> None:
    """Check `unit`; `imported` are functions of other modules it may call.

    Raises SyntaxDiagnostic with every fault found, in text order.
    """
    reporter = Reporter(source)
    _UnitChecker(unit, reporter, imported).check()
    reporter.finish()


def load_modules(source: Source, resolver: Resolver) -> Unit:
    """Return the module in `source` with the functions of all modules it imports, all verified.

    Imported kernels are left out. Raises SyntaxDiagnostic, also for imports that are unknown or
    circular.
    """
    return _load(source, resolver, ())


def _load(source: Source, resolver: Resolver, active: tuple[str, ...]) -> Unit:
    unit = parse_high(source)
    functions: dict[str, Function] = {}
    for name in unit.imports:
        other = _load(_resolve(name, source, resolver, active), resolver, (*active, name))
        functions |= {f.name: f for f in other.functions if f.kind == "inline"}
    imported = tuple(functions.values())
    verify_high(unit, source, imported=imported)
    return replace(unit, functions=(*imported, *unit.functions))


def _resolve(name: str, source: Source, resolver: Resolver, active: tuple[str, ...]) -> Source:
    try:
        if name not in active:
            return resolver(name)
        message = f"`{name}` imports itself: {' -> '.join((*active, name))}"
    except KeyError:
        message = f"there is no kernel module `{name}`"
    span = _import_span(name, source)
    raise SyntaxDiagnostic([Diagnostic("high-unknown-import", message, span, source)])


def _import_span(name: str, source: Source) -> Span:
    for number, line in enumerate(source.text.split("\n"), 1):
        found = re.match(rf"import\b.*\b({name})\b", line)
        if found:
            return Span(number, found.start(1) + 1, number, found.end(1) + 1)
    return Span(1, 1, 1, 2)


def called(function: Function) -> set[str]:
    """Return the names of all functions and builtins that `function` calls."""
    return {node.name for stmt in function.body for node in stmt.walk() if isinstance(node, Call)}


@dataclass(slots=True)
class _UnitChecker:
    unit: Unit
    faults: Reporter
    imported: Sequence[Function]
    inlines: dict[str, Function] = field(init=False)
    calls: nx.DiGraph = field(init=False)  # who calls which @inline function
    tunables: dict[str, Tunable] = field(init=False)  # of all kernels: callees see their caller's
    vector_loops: set[str] = field(init=False)  # whom to call is to run a vrange loop
    results: dict[str, str] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        functions = (*self.imported, *self.unit.functions)
        self.inlines = {f.name: f for f in functions if f.kind == "inline"}
        self.tunables = {t.name: t for f in self.unit.functions for t in f.tunables}
        self.calls = nx.DiGraph()
        self.calls.add_nodes_from(f.name for f in functions)
        for function in functions:
            for name in called(function) & self.inlines.keys():
                self.calls.add_edge(function.name, name)
        looping = {
            name
            for name, function in self.inlines.items()
            for stmt in all_statements(function.body)
            if isinstance(stmt, For) and stmt.kind == "vrange"
        }
        callers = self.calls.reverse(copy=False)
        self.vector_loops = {n for layer in nx.bfs_layers(callers, looping) for n in layer}

    def check(self) -> None:
        self.check_names()
        self.check_recursion()
        for function in self.unit.functions:
            self.check_function(function, self.faults)
        for function in self.unit.functions:
            if function.kind == "kernel":
                self.check_borrowed(function)

    # ---- the module ----

    def check_names(self) -> None:
        seen = {function.name for function in self.imported}
        for function in self.unit.functions:
            if function.name in seen:
                message = f"there are two functions `{function.name}`"
                self.faults.add("high-duplicate", message, function.span, "rename one")
            if function.name in OPS or function.name == "cast":
                message = f"`{function.name}` is a builtin"
                self.faults.add("high-duplicate", message, function.span, "rename the function")
            seen.add(function.name)

    def check_recursion(self) -> None:
        circles = nx.strongly_connected_components(self.calls)
        among = {name for circle in circles if len(circle) > 1 for name in circle}
        for function in self.unit.functions:
            if function.name in among or self.calls.has_edge(function.name, function.name):
                message = f"`{function.name}` calls itself, directly or through others"
                self.faults.add("high-recursion", message, function.span, "write a loop")

    def check_borrowed(self, kernel: Function) -> None:
        """Check that a kernel has every tunable that the functions it calls use."""
        own = {t.name for t in kernel.tunables}
        shared = self.tunables.keys() - own
        for name in sorted(nx.descendants(self.calls, kernel.name)) if shared else ():
            function = self.inlines[name]
            names = {n.id for stmt in function.body for n in stmt.walk() if isinstance(n, Name)}
            used = names - {p.name for p in function.params}
            for missing in sorted(used & shared - defined_names(function.body)):
                message = f"`{kernel.name}` calls `{name}`, which uses the tunable `{missing}`"
                hint = f"declare `{missing}` in `{kernel.name}`, or pass it as a parameter"
                self.faults.add("high-missing-tunable", message, kernel.span, hint)

    # ---- one function ----

    def result_of(self, name: str) -> str:
        """Return the result type of an @inline function, `void` if it has none."""
        function = self.inlines[name]
        if function.returns is not None:
            return print_high(function.returns)
        if name in self.active:
            return "?"
        if len(self.active) > MOST_CALLS:
            message = f"calls are nested more than {MOST_CALLS} levels deep here"
            hint = "put some of the functions together"
            self.faults.add("high-nesting", message, self.inlines[name].span, hint)
            return "?"
        if name not in self.results:
            self.results[name] = self.check_function(function, Reporter(self.faults.source))
        return self.results[name]

    def check_function(self, function: Function, faults: Reporter) -> str:
        """Check one function and return the type of its result."""
        self.active.append(function.name)
        self.check_head(function, faults)
        checker = self.body_checker(function, faults)
        checker.body(function.body)
        self.active.pop()
        last = function.body[-1] if function.body else None
        if function.returns and function.kind == "inline" and not isinstance(last, Return):
            message = (
                f"`{function.name}` promises {print_high(function.returns)} but returns nothing"
            )
            faults.add("high-missing-return", message, function.span, "end it with `return ...`")
        self.check_parameter_types(function, checker)
        return checker.returned

    def body_checker(self, function: Function, faults: Reporter) -> BodyChecker:
        tunables: Iterable[Tunable] = function.tunables
        if function.kind == "inline":  # a local may have the name of some kernel's tunable
            own = defined_names(function.body)
            tunables = (t for name, t in self.tunables.items() if name not in own)
        types = {t.name: "text" if isinstance(t.default, str) else "int" for t in tunables}
        fixed = {name: "a tunable" for name in types} | {n: "a constant" for n in CONSTANTS}
        known = {*types, *CONSTANTS}
        for param in function.params:
            written = print_high(param.type)
            types[param.name] = VALUE_TYPES.get(written, written)
            fixed.pop(param.name, None)
            known.discard(param.name)
            if written in (*COMPILE_TIME, "tile"):
                fixed[param.name] = f"a {written} parameter"
            if written in COMPILE_TIME:
                known.add(param.name)
        constants = find_constants(function.body, known, find_homes(function.body))
        scope = Scope(dict(types), constants, set(types))
        exprs = ExprChecker(faults, self.inlines, self.result_of, self.vector_loops, scope)
        return BodyChecker(function, exprs, fixed)

    def check_head(self, function: Function, faults: Reporter) -> None:
        _check_unique([*function.params, *function.tunables], faults)
        for param in function.params:
            _check_special(function, param, faults)
        if function.tunables and function.kind == "inline":
            hint = "take it as a `const` or `dtype` parameter"
            span = function.tunables[0].span
            faults.add("high-tunable", "only kernels have tunables", span, hint)
        for tunable in function.tunables:
            _check_tunable(tunable, faults)
        if function.kind == "kernel" and function.returns is not None:
            hint = "store results through pointers"
            span = function.returns.span
            faults.add("high-kernel-return", "a kernel returns no value", span, hint)

    def check_parameter_types(self, function: Function, checker: BodyChecker) -> None:
        special = SPECIAL[function.kind]
        values = SCALARS if function.kind == "kernel" else (*SCALARS, *VECTORS)
        for param in function.params:
            written = print_high(param.type)
            if written not in (*special, *VALUE_TYPES):
                checker.exprs.check_type(written, param.type.span, values)
        if function.returns is not None and function.kind == "inline":
            returns = print_high(function.returns)
            checker.exprs.check_type(returns, function.returns.span, (*SCALARS, *VECTORS))


def _check_unique(items: Iterable[Param | Tunable], faults: Reporter) -> None:
    seen: set[str] = set()
    for item in items:
        if item.name in seen:
            faults.add("high-duplicate", f"`{item.name}` is declared twice", item.span)
        if item.name in CONSTANTS or item.name in ELEMENTS:
            faults.add("high-duplicate", f"`{item.name}` is a word of the language", item.span)
        seen.add(item.name)


def _check_special(function: Function, param: Param, faults: Reporter) -> None:
    written = print_high(param.type)
    allowed = SPECIAL[function.kind]
    if written in VALUE_TYPES and written not in allowed:
        other = "kernels" if written in SPECIAL["kernel"] else "@inline functions"
        message = f"only {other} have `{written}` parameters"
        faults.add("high-special-parameter", message, param.span)
    names = allowed.get(written)
    if names and param.name not in names:
        message = f"`{param.name}` is no {written} value"
        hint = f"known: {', '.join(names)}"
        faults.add("high-special-parameter", message, param.span, hint)


def _check_tunable(tunable: Tunable, faults: Reporter) -> None:
    if len({type(choice) for choice in tunable.choices}) > 1:
        message = f"the choices of `{tunable.name}` mix numbers and names"
        faults.add("high-tunable", message, tunable.span)
    if len(set(tunable.choices)) != len(tunable.choices):
        faults.add("high-tunable", f"`{tunable.name}` has a choice twice", tunable.span)
    if tunable.default not in tunable.choices:
        message = f"the default {tunable.default!r} of `{tunable.name}` is none of its choices"
        faults.add("high-tunable-default", message, tunable.span)
