"""Signatures of intrinsics and prelude helpers for the low-IR verifier.

In: targets. Out: name to `Signature`, so that a misspelt or misused intrinsic is a diagnostic.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.codegen.isa.target import Target
from dovetail.ir.diagnostics import Source
from dovetail.ir.expr import NamedType, Type
from dovetail.ir.low.nodes import Function
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.types import Signature, unqualified

IMMEDIATE = NamedType(name="int")


def known_functions(targets: Iterable[Target]) -> dict[str, Signature]:
    """Return what C text for any of `targets` may call besides its own functions and libm."""
    found: dict[str, Signature] = {}
    for target in targets:
        found.update({name: _signature(row) for name, row in target.intrinsics.items()})
        for name, helper in target.prelude.items():
            params = tuple(unqualified(p.type) for p in helper.params)
            found[name] = Signature(params, unqualified(helper.returns))
    return found


def known_constants(targets: Iterable[Target]) -> dict[str, int]:
    """Return the constants that the headers of `targets` define."""
    return {name: value for target in targets for name, value in target.constants.items()}


@cache
def _signature(row: Intrinsic) -> Signature:
    return Signature(tuple(map(_type, row.params)), _type(row.returns))


@cache
def _type(spelling: str) -> Type:
    if spelling == "imm":
        return IMMEDIATE
    unit = parse_low(Source("signature", f"{spelling} f(void) {{}}"))
    function = unit.items[0]
    assert isinstance(function, Function)
    return unqualified(function.returns)
