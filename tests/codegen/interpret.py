"""Runs low IR in Python: intrinsics by their numpy meaning, accesses checked against buffers.

In: a unit, a function name, numpy arrays and numbers, a target. Out: the function's value; arrays
are written in place. So the text for an instruction set is checked on machines that lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.codegen.isa.target import Target
from dovetail.ir.diagnostics import NO_SPAN, Span
from dovetail.ir.expr import NamedType, PointerType, Type
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import LIBRARY as SIGNATURES
from dovetail.ir.low.types import unqualified
from tests.codegen.interp.functions import Body, CompiledFunction, reserve
from tests.codegen.interp.library import LIBRARY
from tests.codegen.interp.meanings import meaning_of
from tests.codegen.interp.memory import NULL, Memory, Pointer
from tests.codegen.interp.values import InterpretError, Layouts, convert, storer

REMEMBERED = 16
"""Programs that are kept, with their units and targets: so an `id` means one of them."""

Callee = tuple[tuple[Type | None, ...], Type, Any]


def interpret(unit: low.Unit, function: str, args: Sequence[Any], target: Target) -> Any:
    """Run `function` of `unit` and return its value (None for void).

    A pointer argument is a C-contiguous numpy array (whose bytes are the buffer), a `Pointer` into
    one, or None for null; a vector is an array of its lanes; the rest are numbers. Functions the
    unit lacks are looked up in the target's prelude, its intrinsics and libm. Raises
    InterpretError, which names the span, where the text leaves a buffer or does what C leaves
    undefined.
    """
    program = _program(unit, target)
    params, _, run = program.callee(function, NO_SPAN)
    if len(params) != len(args):
        raise InterpretError(f"{function} takes {len(params)} arguments, not {len(args)}", NO_SPAN)
    names = [p.name for p in program.functions[function].function.params]
    with np.errstate(all="ignore"):
        values = [
            argument(value, type_, name)
            for value, type_, name in zip(args, params, names, strict=True)
        ]
        return run(*values)


_PROGRAMS: dict[tuple[int, int], Program] = {}


def _program(unit: low.Unit, target: Target) -> Program:
    """Return a program; the last ones are remembered, as a kernel is run by thread after thread."""
    key = id(unit), id(target)
    if key not in _PROGRAMS:
        while len(_PROGRAMS) >= REMEMBERED:
            del _PROGRAMS[next(iter(_PROGRAMS))]
        _PROGRAMS[key] = Program(unit, target)
    return _PROGRAMS[key]


def argument(value: Any, type_: Type | None, name: str) -> Any:
    """Return a caller's argument as a value of the interpreter."""
    assert type_ is not None, "functions of a unit have typed parameters"
    if isinstance(type_, PointerType):
        if value is None or isinstance(value, Pointer):
            return NULL if value is None else value
        return Pointer(Memory.of(name, value))
    change = convert(NamedType(name="long"), type_)
    return value if change is None or isinstance(value, np.ndarray) else change(value)


class Program:
    """A unit on a target: its functions and tables, and all it may call."""

    def __init__(self, unit: low.Unit, target: Target) -> None:
        structs = {i.name: i for i in unit.items if isinstance(i, low.StructDef)}
        self.unit, self.target = unit, target
        self.layouts = Layouts(structs, target.constants)
        self.functions = {
            f.name: CompiledFunction(f, self)
            for f in (*target.prelude.values(), *unit.items)
            if isinstance(f, low.Function)
        }
        self._tables: dict[str, tuple[Type, Pointer]] = {}
        for item in unit.items:
            if isinstance(item, low.Declare):
                self._tables[item.name] = self._make_table(item)

    def variable(self, name: str) -> None:
        """Return nothing: variables live in functions."""

    def table(self, name: str) -> tuple[Type, Pointer] | None:
        """Return a static table of the unit."""
        return self._tables.get(name)

    def constant(self, name: str) -> int | None:
        """Return an integer constant of the target's headers."""
        return self.target.constants.get(name)

    def callee(self, name: str, span: Span) -> Callee:
        """Return parameter types, result type and function of a name; InterpretError if unknown."""
        if name in self.functions:
            found = self.functions[name]
            params = tuple(unqualified(p.type) for p in found.function.params)
            return params, unqualified(found.function.returns), found
        if name in self.target.intrinsics:
            return signature(self.target.intrinsics[name])
        if name in LIBRARY:
            known = SIGNATURES[name]
            assert known.returns is not None, "functions of the C library have a result"
            return known.params, known.returns, LIBRARY[name]
        raise InterpretError(f"no function or intrinsic `{name}` is known", span)

    def _make_table(self, item: low.Declare) -> tuple[Type, Pointer]:
        """Return the memory of a static table, filled by running its declaration."""
        holder = low.Function(name=item.name, returns=item.type, params=(), body=low.Block(body=()))
        body = Body(holder, self)
        execute = body.declare(item)
        local = body.variable(item.name)
        assert local is not None
        frame = [None] * (local.slot + 1)
        execute(frame)
        if local.in_memory:
            return local.type, frame[local.slot]  # type: ignore[return-value]
        pointer = reserve(self.layouts, local.type, item.name)
        storer(unqualified(local.type))(pointer, frame[local.slot])
        return local.type, pointer


@cache
def spelled(text: str) -> Type:
    """Return the type of an intrinsic's C spelling, without `const`: `float*`, `__m256`, `imm`."""
    base = text.removeprefix("const ").rstrip("* ")
    type_: Type = NamedType(name="int" if base == "imm" else base)
    for _ in range(text.count("*")):
        type_ = PointerType(of=type_)
    return type_


def signature(intrinsic: Intrinsic) -> Callee:
    """Return what a call of an intrinsic needs."""
    params = tuple(spelled(p) for p in intrinsic.params)
    return params, spelled(intrinsic.returns), meaning_of(intrinsic)
