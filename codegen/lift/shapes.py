"""The shape of vector loops: which variable counts, how far, and how far it goes in one step.

In: statements. Out: a `Strip` for a loop that takes a fixed step while enough is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.codegen.lift.loops import advance, assigned_names, beginning
from dovetail.codegen.lift.types import Unliftable
from dovetail.ir.expr import Binary, Expr, Name, Type
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import constant, is_integer


@dataclass(frozen=True, slots=True)
class Strip:
    """`while (left >= count) body`: one loop of a chain, in units of the counter."""

    counter: str
    limit: Expr | None  # index form: the counter runs up to this; None: it counts down to 0
    count: int
    body: tuple[low.Stmt, ...]
    from_zero: bool  # index form: the loop itself starts the index at 0
    beyond: bool  # runs while anything is left, so the last step may reach past the end
    owned: bool  # the loop declares its counter

    def leaves(self) -> set[str]:
        """Return the variables that the loop leaves changed."""
        inside = {n.name for s in self.body for n in s.walk() if isinstance(n, low.Declare)}
        changed = assigned_names(self.body) - inside
        return changed if self.owned else changed | {self.counter}


def find_strip(stmt: low.Stmt, types: dict[str, Type]) -> Strip | None:
    """Return the loop as a strip, None if it is none."""
    begun = beginning(stmt) if isinstance(stmt, low.For) else None
    if isinstance(stmt, low.For) and stmt.cond is not None and stmt.step is not None:
        cond, body, step = stmt.cond, list(stmt.body.body), stmt.step
        if stmt.init and (begun is None or constant(begun[1], {}) != 0):
            return None
    elif isinstance(stmt, low.While) and not stmt.do and stmt.body.body:
        *body, last = stmt.body.body
        if not isinstance(last, low.ExprStmt):
            return None
        cond, step = stmt.cond, last.expr
    else:
        return None
    moved = advance(step)
    if moved is None:
        return None
    counter, amount = moved[0], constant(moved[1], {})
    if amount is None or not is_integer(types.get(counter)):
        return None
    limit = _limit(cond, counter, amount)
    if limit is None or counter in assigned_names(body):
        return None
    if begun is not None and (begun[0] != counter or limit[0] is None):
        return None
    from_zero, owned = begun is not None, begun is not None and begun[2]
    return Strip(counter, limit[0], abs(amount), tuple(body), from_zero, limit[1], owned)


def _limit(cond: Expr, counter: str, amount: int) -> tuple[Expr | None, bool] | None:
    """Return the limit of a strip's condition (None counts down to 0), and whether it is passed."""
    if not isinstance(cond, Binary):
        return None
    left, right = cond.left, cond.right
    if amount < 0:
        least = constant(right, {})
        at_least = {">=": least, ">": None if least is None else least + 1}.get(cond.op)
        if cond.op == "!=" and least == 0:
            at_least = 1
        if left != Name(id=counter) or at_least not in (1, -amount):
            return None
        return None, at_least != -amount
    extra = 0
    if isinstance(left, Binary) and left.op == "+" and left.left == Name(id=counter):
        known = constant(left.right, {})
        if known is None:
            return None
        extra, left = known, left.left
    if isinstance(right, Binary) and right.op == "-" and not extra:
        known = constant(right.right, {})
        if known is not None:
            extra, right = known, right.left
    wanted = {"<=": amount, "<": amount - 1}.get(cond.op)
    beyond = cond.op == "<" and extra == 0 and amount > 1
    fits = left == Name(id=counter) and (extra == wanted or beyond)
    return (right, beyond) if fits else None


def check_limits(strips: Sequence[Strip], tail: low.If | None) -> None:
    """Check that the loops of a chain count the same thing and only a single one passes it."""
    if any(s.limit != strips[0].limit for s in strips):
        raise Unliftable("the loops of a chain count differently")
    if strips[0].beyond and (len(strips) > 1 or tail is not None):
        raise Unliftable("a loop passes the end before others")
    if any(s.beyond for s in strips[1:]):
        raise Unliftable("a loop of a chain passes the end")


def check_dead(strips: Sequence[Strip], taken: Sequence[low.Stmt], later: set[str]) -> None:
    """Check that nothing reads later what loops, and what is taken with them, leave changed."""
    again = later & assigned_names(taken).union(*(strip.leaves() for strip in strips))
    if again:
        raise Unliftable(f"`{min(again)}` is used after the loops")
