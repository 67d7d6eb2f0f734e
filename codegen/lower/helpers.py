"""Helpers of every target that lowered kernels may call: C text parsed once, and who needs what."""

from __future__ import annotations

from functools import lru_cache

from dovetail.codegen.isa.ops import SCALAR_SPELLING
from dovetail.codegen.isa.target import Target, called_names
from dovetail.ir.diagnostics import Source
from dovetail.ir.low.nodes import Function
from dovetail.ir.low.parse import parse_low

TYPES = ("i32", "u32", "i64", "u64", "f32", "f64")
_PAIR = """
static inline {c} dt_{op}_{t}({c} a, {c} b) {{
  return a {sign} b ? a : b;
}}
"""
_ABS = """
static inline {c} dt_abs_{t}({c} a) {{
  return a < 0 ? -a : a;
}}
"""


@lru_cache(maxsize=1)
def scalar_helpers() -> dict[str, Function]:
    """Return `dt_min_*`, `dt_max_*` and `dt_abs_*` by name."""
    text = ""
    for type_ in TYPES:
        c = SCALAR_SPELLING[type_]
        for op, sign in (("min", "<"), ("max", ">")):
            text += _PAIR.format(c=c, t=type_, op=op, sign=sign)
        if type_ in ("i32", "i64"):
            text += _ABS.format(c=c, t=type_)
    unit = parse_low(Source("scalar helpers", text))
    return {item.name: item for item in unit.items if isinstance(item, Function)}


def collect_helpers(function: Function, target: Target) -> tuple[Function, ...]:
    """Return the helpers that `function` calls, directly or not, each before its users."""
    names = called_names(function)
    shared = tuple(helper for name, helper in scalar_helpers().items() if name in names)
    return (*shared, *target.prelude_functions(names))
