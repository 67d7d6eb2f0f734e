"""What every known intrinsic writes, by its name: the tables of all instruction sets."""

from __future__ import annotations

from functools import cache

from dovetail.codegen.lift.lanes import Rule
from dovetail.codegen.lift.lanes_x86 import x86_rule
from dovetail.codegen.lift.neon_ops import neon_rule


@cache
def find_rule(name: str) -> Rule | None:
    """Return what an intrinsic writes, None for a function that is none."""
    return x86_rule(name) or neon_rule(name)
