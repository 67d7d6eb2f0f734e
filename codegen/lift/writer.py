"""Symbolic lanes to vector expressions of the high IR."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.codegen.lift.scalar import Scalars
from dovetail.codegen.lift.symbolic import Lane
from dovetail.codegen.lift.types import Names
from dovetail.ir.expr import Binary, Call, Expr, Float, Int, Name
from dovetail.ir.high import nodes as high


@dataclass(slots=True)
class Broadcasts:
    """Vectors of one scalar each, made once, by statements `before` a loop."""

    names: Names
    before: list[high.Stmt]
    made: dict[Expr, Name] = field(default_factory=dict)

    def vector(self, value: Expr) -> Name:
        """Return the vector of a scalar."""
        if value not in self.made:
            base = f"{value.id}_v" if isinstance(value, Name) else "all"
            name = self.made[value] = Name(id=self.names.fresh(base, "vec"))
            call = Call(name="vbroadcast", args=(value,))
            self.before.append(high.Assign(target=name, value=call))
        return self.made[value]


@dataclass(slots=True)
class Writer:
    """Writes lanes as vector expressions."""

    scalars: Scalars
    var: str
    moving: set[str]
    spread: Broadcasts

    def address(self, array: str) -> Expr:
        """Return the place of the current elements of an array."""
        base = Name(id=self.scalars.names.find(array) or array)
        return Binary(op="+", left=base, right=Name(id=self.var))

    def scalar(self, lane: Lane) -> Expr:
        """Return a lane that is the same everywhere as a scalar."""
        value: Expr = Float(value=lane.args[0]) if lane.op == "const" else lane.args[0]
        return value

    def vector(self, lane: Lane) -> Expr:
        """Return a lane as the expression of a vector of them."""
        if lane.op == "load":
            array, offset = lane.args
            if array in self.moving:
                return Call(name="vload", args=(self.address(array),))
            made = Binary(op="+", left=Name(id=array), right=Int(value=offset // 4))
            return self.spread.vector(Call(name="load", args=(made,)))
        if lane.op in ("const", "scalar"):
            return self.spread.vector(self.scalar(lane))
        return Call(name=lane.op, args=tuple(self.vector(a) for a in lane.args))
