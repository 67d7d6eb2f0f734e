"""A `switch` as a chain of conditions: arms that fall through repeat what they fall into.

In: the value and what stands in the braces. Out: an `If`, or a fault where a jump is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

from dovetail.ir import expr as ex
from dovetail.ir.diagnostics import NO_SPAN, Span
from dovetail.ir.low import nodes as low
from dovetail.ir.low.lex import Reporter
from dovetail.ir.node import Node

_ENDS = (low.Break, low.Return, low.Continue)
MOST_STATEMENTS = 10_000
"""Statements of all arms, those that are repeated counted each time."""


@dataclass(frozen=True, slots=True)
class Label:
    """`case value:`, or `default:` without a value."""

    value: ex.Expr | None
    span: Span = NO_SPAN


@dataclass(slots=True)
class _Arm:
    labels: list[ex.Expr | None] = field(default_factory=list)
    body: list[low.Stmt] = field(default_factory=list)


def chain_arms(value: ex.Expr, items: Sequence[Label | low.Stmt], reporter: Reporter) -> low.Block:
    """Return the block that does what the switch does; faults go to the reporter."""
    if any(isinstance(n, ex.Call | low.Assign | low.Step) for n in value.walk()):
        hint = "keep it in a variable"
        reporter.add("low-switch", "the value of a switch is computed once", value.span, hint)
    arms: list[_Arm] = []
    for item in items:
        if isinstance(item, Label):
            if not arms or arms[-1].body:
                arms.append(_Arm())
            arms[-1].labels.append(item.value)
        elif arms:
            arms[-1].body.append(item)
        else:
            reporter.add("low-switch", "this stands before the first case", item.span)
    for declared in (n for arm in arms[:-1] for n in arm.body if isinstance(n, low.Declare)):
        message = f"the arms after this one would see `{declared.name}`"
        hint = "put the arm in braces, or declare it before the switch"
        reporter.add("low-switch", message, declared.span, hint)
    bodies = [
        (arm.labels, low.Block(body=tuple(_until_end(arms[i:])))) for i, arm in enumerate(arms)
    ]
    made = sum(isinstance(n, low.Stmt) for _, body in bodies for n in body.walk())
    if made > MOST_STATEMENTS:
        message = f"the arms of this switch would become {made} statements"
        hint = "an arm that falls through repeats what follows: use functions"
        reporter.add("low-nesting", message, value.span, hint)
        return low.Block(body=())
    for jump in (jump for _, body in bodies for jump in _left(body)):
        hint = "use if and else"
        reporter.add("low-switch", "a break amid an arm of a switch", jump.span, hint)
    chain = next((body for labels, body in bodies if None in labels), None)
    for labels, body in reversed(bodies):
        if None not in labels:
            tests = [ex.Binary(op="==", left=value, right=label) for label in labels if label]
            cond = reduce(lambda a, b: ex.Binary(op="||", left=a, right=b), tests)
            chain = low.Block(body=(low.If(cond=cond, then=body, other=chain),))
    return chain or low.Block(body=())


def _until_end(arms: Sequence[_Arm]) -> Iterator[low.Stmt]:
    """Yield what runs from the first arm on, up to its end."""
    for item in (item for arm in arms for item in arm.body):
        inner = item.body if isinstance(item, low.Block) and item.body else (item,)
        if not isinstance(inner[-1], low.Break):
            yield item
        elif inner[-1] is not item:
            yield low.Block(body=inner[:-1], span=item.span)
        if isinstance(inner[-1], _ENDS):
            return


def _left(node: Node) -> Iterator[low.Break]:
    """Yield the jumps out of the switch that are left in an arm."""
    if isinstance(node, low.Break):
        yield node
    if not isinstance(node, low.For | low.While):
        for child in node.children():
            yield from _left(child)
