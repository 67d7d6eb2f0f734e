"""A target's operation table as low-IR expressions: `{0}`, `{1}` are replaced by argument nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from dovetail.codegen.isa.target import Target
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import Binary, Expr, Index, Int, Name
from dovetail.ir.low import nodes as low
from dovetail.ir.low.parse import parse_low_expr
from dovetail.ir.node import Node

PLACEHOLDER = re.compile(r"\{(\d+)\}")
PREFIX = "dt_argument_"


@dataclass(frozen=True, slots=True)
class Template:
    """One operation: its expression over placeholder names, and how often each is used."""

    expr: Expr
    uses: tuple[int, ...]

    def fill(self, args: tuple[Expr, ...]) -> Expr:
        """Return the expression with `args` in place of the placeholders."""
        values = {f"{PREFIX}{i}": arg for i, arg in enumerate(args)}

        def visit(node: Node) -> Node:
            if isinstance(node, Name):
                return values.get(node.id, node)
            return node.map_children(visit)

        result = visit(self.expr)
        assert isinstance(result, Expr)
        return _plain_index(result)


def _plain_index(expr: Expr) -> Expr:
    """Write `(p + i)[0]`, as tables of scalar targets make it, as `p[i]`."""
    if isinstance(expr, low.Assign):
        return replace(expr, target=_plain_index(expr.target))
    if isinstance(expr, Index) and expr.indices == (Int(value=0),):
        base = expr.base
        if isinstance(base, Binary) and base.op == "+":
            return Index(base=base.left, indices=(base.right,))
    return expr


def find_template(target: Target, key: str) -> Template:
    """Return the operation `key` of `target`; ScheduleError if its table has none."""
    text = target.ops.get(key)
    if text is None:
        raise ScheduleError(f"target {target.name} has no operation `{key}`; bind another dtype")
    return _parse(text)


@cache
def _parse(text: str) -> Template:
    places = [int(number) for number in PLACEHOLDER.findall(text)]
    expr = parse_low_expr(PLACEHOLDER.sub(rf"{PREFIX}\1", text))
    count = max(places, default=-1) + 1
    return Template(expr, tuple(places.count(i) for i in range(count)))
