"""Vector code whose width cannot be made symbolic: every C vector becomes a group of vectors.

A register of L lanes turns into a tile of max(1, L // VL) vectors, of which min(VL, L) lanes are
used, so the kernel still runs on every target. What a remainder block stores is found by running it
for every count that can be left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.codegen.lift.emit import VL, call, num, op
from dovetail.codegen.lift.loops import assigned_names, read_names
from dovetail.codegen.lift.statements import Body, Statements
from dovetail.codegen.lift.symbolic import Lane, Stores, SymbolicPointer, as_lane, vector_of
from dovetail.codegen.lift.types import Unliftable
from dovetail.codegen.lift.vectorise import ALIAS_NOTE
from dovetail.ir.errors import SpecError
from dovetail.ir.expr import Binary, Call, Cast, Expr, Float, Index, Int, Name, Unary
from dovetail.ir.high import nodes as high
from dovetail.ir.high.print import print_high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import constant, vector

LANES = re.compile(r"vget_(low|high)|_lane")
MOST_LANES = 64
"""The longest remainder that is run through, in elements."""


def count_of(lanes: int) -> Expr:
    """Return how many vectors hold `lanes` lanes."""
    return call("max", num(1), op("//", num(lanes), VL))


def used_lanes(lanes: int) -> Expr:
    """Return how many lanes of each vector of a group are used."""
    return call("min", VL, num(lanes))


def lanes_left(left: Expr, at: int, lanes: int, ahead: Expr) -> Expr:
    """Return how many lanes, `ahead` of element `at`, are of the first `left`: perhaps none."""
    rest = op("-", op("-", left, at), ahead)
    return call("max", call("min", rest, used_lanes(lanes)), num(0))


@dataclass(slots=True)
class Pinned(Statements):
    """Translates statements like `Statements`, vector ones included."""

    tiles: dict[str, tuple[str, int]] = field(default_factory=dict)  # C name -> tile, lanes
    regs: list[high.Regs] = field(default_factory=list)
    bases: dict[str, Expr] = field(default_factory=dict)  # computed addresses by their text
    widths: set[int] = field(default_factory=set)  # lanes of the groups worked on
    unroll: str = ""

    def function_body(self, body: Sequence[low.Stmt]) -> Body:
        """Translate a function body; its tiles are declared at the top."""
        self.unroll = self.scalars.names.fresh("u", "i64")
        made = self.body(body)
        used = read_names(made)
        shown = " and ".join(map(str, sorted(self.widths)))
        self.scalars.note(
            f"pinned to vectors of {shown} lanes; other widths use groups or parts of them"
        )
        return (*(r for r in self.regs if r.name in used), *made)

    def chain(self, body: Sequence[low.Stmt]) -> tuple[int, Body]:
        """Take no loop apart: it keeps its width."""
        return 0, ()

    def block(self, body: Sequence[low.Stmt]) -> Body:
        """Translate a C block; vectors declared in it end with it."""
        tiles, vectors = dict(self.tiles), dict(self.strips.vectors)
        made = Statements.block(self, body)
        self.tiles, self.strips.vectors = tiles, vectors
        return made

    def declare(self, stmt: low.Declare) -> Body:
        """Translate a declaration; a vector becomes a tile."""
        shape = vector(stmt.type)
        if shape is None or shape.lane not in ("float", "float32_t"):
            return Statements.declare(self, stmt)
        self.strips.types[stmt.name] = stmt.type
        if stmt.init is not None and self.by_lanes(stmt, shape.lanes):
            return self.set_lanes(stmt.name, stmt.init)
        self.strips.vectors.pop(stmt.name, None)
        name = self.scalars.names.fresh(stmt.name, "tile")
        self.tiles[stmt.name] = (name, shape.lanes)
        self.regs.append(high.Regs(name=name, shape=(count_of(shape.lanes),), elem="f32"))
        return self.set_tile(stmt.name, stmt.init) if stmt.init is not None else ()

    def by_lanes(self, stmt: low.Declare, lanes: int) -> bool:
        """Whether a vector is only a way to load scalars: its lanes are used one by one."""
        if lanes == 2:
            return True
        if not isinstance(stmt.init, Call) or stmt.init.name != "vld1q_f32":
            return False
        whole = self.function.body
        return stmt.name not in assigned_names(
            n for n in whole.walk() if isinstance(n, low.Assign)
        ) and any(
            isinstance(n, Call) and LANES.search(n.name) and lane_source(n) == Name(id=stmt.name)
            for n in whole.walk()
        )

    def set_lanes(self, target: str, value: Expr) -> Body:
        """Return assignments of scalars for the lanes of a loaded vector."""
        out: list[high.Stmt] = []
        held: list[Any] = []
        for i, lane in enumerate(self.evaluate(value, {})):
            if lane.op not in ("load", "scalar"):
                raise Unliftable("lanes that are computed one by one")
            name = Name(id=self.scalars.names.fresh(f"{target}_{i}", "f32"))
            out.append(high.Assign(target=name, value=self.uniform(lane)))
            held.append(Lane("scalar", (name,)))
        self.tiles.pop(target, None)
        self.strips.vectors[target] = vector_of(held)
        return tuple(out)

    def effect(self, expr: Expr) -> Body:
        """Translate an expression statement; vector assignments and stores by their lanes."""
        if isinstance(expr, low.Assign) and isinstance(expr.target, Name):
            if expr.target.id in self.tiles:
                if expr.op != "=":
                    raise Unliftable("vectors joined by operators")
                return self.set_tile(expr.target.id, expr.value)
        if isinstance(expr, Call) and expr.name in self.strips.intrinsics:
            return self.store(expr)
        return Statements.effect(self, expr)

    def set_tile(self, target: str, value: Expr) -> Body:
        """Return the assignment of a vector expression to a tile."""
        name, lanes = self.tiles[target]
        found = list(self.evaluate(value, {}))
        if len(found) != lanes:
            raise Unliftable(f"`{target}` has {lanes} lanes, its value {len(found)}")
        return self.each(lanes, high.Assign(target=self.part(name), value=self.join(found)))

    def part(self, tile: str) -> Index:
        """Return the vector with index `u` of a tile."""
        return Index(base=Name(id=tile), indices=(Name(id=self.unroll),))

    def store(self, expr: Call) -> Body:
        """Return a store of a whole vector, or nothing for a prefetch."""
        stores = Stores()
        self.evaluate(expr, stores)
        if not stores:
            return Statements.effect(self, expr) if "prefetch" in expr.name else ()
        arrays = {array for array, _ in stores}
        offsets = sorted(offset for _, offset in stores)
        first, lanes = offsets[0], len(offsets)
        if len(arrays) != 1 or offsets != list(range(first, first + 4 * lanes, 4)):
            raise Unliftable("a store that is not whole")
        array = arrays.pop()
        value = self.join([stores[array, offset] for offset in offsets])
        made = call("vstore", self.address(array, first // 4), value, used_lanes(lanes))
        return self.each(lanes, high.ExprStmt(expr=made))

    def each(self, lanes: int, stmt: high.Stmt) -> Body:
        """Return `stmt` for every vector of a group."""
        self.widths.add(lanes)
        loop = high.For(
            kind="unroll",
            var=self.unroll,
            start=num(0),
            stop=count_of(lanes),
            step=num(1),
            body=(stmt,),
        )
        return (loop,)

    # ---- lanes ----

    def environment(self, stores: Stores) -> dict[str, Any]:
        """Return what is known: pointers, and tiles as their own lanes."""
        tiles = {name: vector_of(row_of(name, lanes)) for name, (_, lanes) in self.tiles.items()}
        return {**self.strips.environment(stores), **tiles}

    def evaluate(self, expr: Expr, stores: Stores) -> Any:
        """Return the lanes of a vector expression."""
        executor = self.strips.executor(self.environment(stores), frozenset())
        executor.address = lambda place: self.place(place, stores)
        made = executor.expr(expr)
        return [as_lane(v) for v in made] if isinstance(made, np.ndarray) else made

    def join(self, lanes: Sequence[Lane]) -> Expr:
        """Return lanes as the expression of the vector with index `u` in their group."""
        first = lanes[0]
        if all(lane == first for lane in lanes) and first.op in ("scalar", "const", "load"):
            return call("vbroadcast", self.uniform(first))
        if any(lane.op != first.op for lane in lanes):
            raise Unliftable("lanes are computed differently")
        if first.op == "var":
            name, width = self.tiles[first.args[0]]
            if list(lanes) != row_of(first.args[0], width):
                raise Unliftable("lanes change their places")
            return self.part(name)
        if first.op == "load":
            array, offset = first.args
            wanted = [Lane("load", (array, offset + 4 * i)) for i in range(len(lanes))]
            if list(lanes) != wanted:
                raise Unliftable("a load that is not whole")
            return call("vload", self.address(array, offset // 4), used_lanes(len(lanes)))
        if first.op in ("scalar", "const"):
            raise Unliftable("lanes of different scalars")
        columns = zip(*(lane.args for lane in lanes), strict=True)
        return call(first.op, *map(self.join, columns))

    def uniform(self, lane: Lane) -> Expr:
        """Return the scalar that all lanes hold."""
        if lane.op == "const":
            return Float(value=lane.args[0])
        if lane.op == "scalar":
            made: Expr = lane.args[0]
            return made
        array, offset = lane.args
        base, at = self.base(array), offset // 4
        if isinstance(base, Binary) and base.op == "+":
            return Index(base=base.left, indices=(op("+", base.right, at),))
        return Index(base=base, indices=(num(at),))

    def place(self, expr: Expr, stores: Stores) -> SymbolicPointer | None:
        """Return a computed address: what moves names an array, the constant part is its offset."""
        if not isinstance(expr, Binary | Unary | Cast):
            return None
        try:
            made, type_ = self.scalars.expr(expr)
        except SpecError:
            return None
        if type_ != "ptr[f32]":
            return None
        base, offset = split_offset(made)
        key = print_high(base)
        self.bases[key] = base
        return SymbolicPointer(key, 4 * offset, stores)

    def base(self, array: str) -> Expr:
        """Return the high form of a C pointer, or of an address that `place` named."""
        return self.bases.get(array) or Name(id=self.scalars.names.find(array) or array)

    def address(self, array: str, offset: int) -> Expr:
        """Return the address of vector `u` of a group that starts at `array + offset`."""
        return op("+", op("+", self.base(array), offset), op("*", Name(id=self.unroll), VL))

    # ---- remainders ----

    def branch(self, stmt: low.If) -> Body:
        """Translate `if`; the arm for a remainder by what it stores for every count."""
        try:
            return Statements.branch(self, stmt)
        except SpecError as reason:
            found = remainder(stmt)
            if found is None:
                raise
            self.check_last(stmt, found[0])
            counter, lanes, block = found
            if not 1 < lanes <= MOST_LANES:
                raise Unliftable(f"a remainder of {lanes} elements: {reason}") from None
            tail = self.tail(counter, lanes, block)
            if stmt.other is None:
                return tail
            cond = self.scalars.expr(stmt.cond)[0]
            return (high.If(cond=cond, then=self.block(stmt.then.body), other=tail),)

    def check_last(self, stmt: low.If, counter: str) -> None:
        """Check that nothing runs after a remainder block: what it leaves behind is not kept."""
        last: Any = self.function.body.body[-1]
        if isinstance(last, low.While) and last.do:
            after = constant(last.cond, {counter: 0})
            last = last.body.body[-1] if after == 0 else None
        if last is not stmt:
            raise Unliftable("a remainder in the middle of a kernel")

    def tail(self, counter: str, lanes: int, block: low.Block) -> Body:
        """Return the stores of a remainder block, and the counter as it ends: 0."""
        runs = [self.leftover(counter, count, block) for count in range(lanes)]
        longest = runs[-1]
        arrays = list(dict.fromkeys(array for array, _ in longest))
        if len(arrays) > 1:
            self.scalars.note(ALIAS_NOTE.format(", ".join(arrays)))
        for count, stores in enumerate(runs):
            wanted = {(a, 4 * i): longest.get((a, 4 * i)) for a in arrays for i in range(count)}
            if stores != wanted:
                raise Unliftable(f"with {count} elements left, it stores something else")
        left = self.scalars.names.find(counter) or counter
        out: list[high.Stmt] = []
        for array in arrays:
            out += self.partial(array, [longest[array, 4 * i] for i in range(lanes - 1)], left)
        return (*out, high.Assign(target=Name(id=left), value=num(0)))

    def leftover(self, counter: str, count: int, block: low.Block) -> dict[tuple[str, int], Lane]:
        """Return what a remainder block stores with `count` elements left."""
        stores = Stores()
        env = {**self.environment(stores), counter: count}
        executor = self.strips.executor(env, frozenset())
        executor.run([block])
        if executor.env[counter] != 0:
            raise Unliftable("a remainder that leaves its counter")
        return stores

    def partial(self, array: str, lanes: list[Lane], left: str) -> list[high.Stmt]:
        """Return stores of the first `left` of `lanes`, which are those of whole tiles in a row."""
        out: list[high.Stmt] = []
        at = 0
        while at < len(lanes):
            if lanes[at].op != "var":
                raise Unliftable("a remainder that computes")
            name, width = self.tiles[lanes[at].args[0]]
            if lanes[at : at + width] != row_of(lanes[at].args[0], width)[: len(lanes) - at]:
                raise Unliftable("a remainder whose lanes change their places")
            count = lanes_left(Name(id=left), at, width, op("*", Name(id=self.unroll), VL))
            made = call("vstore", self.address(array, at), self.part(name), count)
            out += self.each(width, high.ExprStmt(expr=made))
            at += width
        return out


def row_of(name: str, lanes: int) -> list[Lane]:
    """Return the lanes of a C vector, each as itself."""
    return [Lane("var", (name, i)) for i in range(lanes)]


def split_offset(expr: Expr) -> tuple[Expr, int]:
    """Return an address without its constant part, and that part in elements."""
    if not isinstance(expr, Binary) or expr.op not in ("+", "-"):
        return expr, 0
    left, offset = split_offset(expr.left)
    right = expr.right
    if expr.op == "+" and isinstance(right, Binary):
        right, more = split_offset(right)
        offset += more
    if isinstance(right, Int):
        return left, offset + (right.value if expr.op == "+" else -right.value)
    return Binary(op=expr.op, left=left, right=right), offset


def lane_source(call: Call) -> Expr | None:
    """Return the vector of which `vget_low` or a `_lane` operation takes lanes."""
    at = -2 if "_lane" in call.name else 0
    return call.args[at] if len(call.args) >= max(1, -at) else None


def remainder(stmt: low.If) -> tuple[str, int, low.Block] | None:
    """Return the counter, its first value too large and the block of `if (n >= 16) .. else ..`."""
    cond = stmt.cond
    inner = cond.operand if isinstance(cond, Unary) else None
    if isinstance(cond, Unary) and isinstance(inner, Unary) and cond.op == inner.op == "!":
        cond = inner.operand  # `!!(n >= 16)`, as macros on what is likely spell it
    if not isinstance(cond, Binary) or not isinstance(cond.left, Name):
        return None
    bound = constant(cond.right, {})
    if bound is None or stmt.other is None:
        return None
    lanes = {">=": bound, ">": bound + 1}.get(cond.op)
    return None if lanes is None else (cond.left.id, lanes, stmt.other)
