"""Symbolic lanes to vector expressions of the high IR."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.codegen.lift.emit import call, op
from dovetail.codegen.lift.scalar import Scalars
from dovetail.codegen.lift.symbolic import Lane
from dovetail.codegen.lift.types import Names
from dovetail.ir.expr import Expr, Float, Name
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
            self.before.append(high.Assign(target=name, value=call("vbroadcast", value)))
        return self.made[value]


@dataclass(slots=True)
class Writer:
    """Writes lanes as vector expressions."""

    scalars: Scalars
    var: str
    moving: frozenset[str]
    spread: Broadcasts

    def address(self, array: str) -> Expr:
        """Return the place of the current elements of an array."""
        base = Name(id=self.scalars.names.find(array) or array)
        return op("+", base, Name(id=self.var))

    def scalar(self, lane: Lane) -> Expr:
        """Return a lane that is the same everywhere as a scalar."""
        value: Expr = Float(value=lane.args[0]) if lane.op == "const" else lane.args[0]
        return value

    def vector(self, lane: Lane) -> Expr:
        """Return a lane as the expression of a vector of them."""
        if lane.op == "load":
            array, offset = lane.args
            if array in self.moving:
                return call("vload", self.address(array))
            return self.spread.vector(call("load", op("+", Name(id=array), offset // 4)))
        if lane.op in ("const", "scalar"):
            return self.spread.vector(self.scalar(lane))
        return call(lane.op, *map(self.vector, lane.args))
