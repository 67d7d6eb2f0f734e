"""Vector loops to one `vrange`, by proof: every strip and the tail must compute the same function.

A chain is what hand-written kernels look like: a main loop over many lanes, perhaps smaller ones,
then code for what is left. Each loop body is run once on symbolic lanes, the tail once for every
count that can be left. Where all elements are one function of their place, that is lifted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.codegen.lift import symbolic as sym
from dovetail.codegen.lift.emit import call, num, op
from dovetail.codegen.lift.execute import Executor, table
from dovetail.codegen.lift.loops import assigned_names, read_names
from dovetail.codegen.lift.patterns import vector_loop
from dovetail.codegen.lift.scalar import Scalars, convert
from dovetail.codegen.lift.shapes import Strip, check_dead, check_limits
from dovetail.codegen.lift.types import Unliftable
from dovetail.codegen.lift.vectorise import ALIAS_NOTE
from dovetail.codegen.lift.writer import Broadcasts, Writer
from dovetail.ir.errors import SpecError
from dovetail.ir.expr import ArrayType, Expr, Float, Index, Name, Type
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import vector

FUSED_NOTE = "the loops of a chain round their multiply-adds differently; the first one counts"


@dataclass(frozen=True, slots=True)
class Map:
    """What a run of elements computes: for each array written, the lane of element 0."""

    stores: tuple[tuple[str, sym.Lane], ...]
    elements: int
    moving: frozenset[str]  # arrays whose addresses go on with the elements


@dataclass(slots=True)
class Strips:
    """Finds chains in a statement list; knows the vector constants defined before them."""

    scalars: Scalars
    intrinsics: Mapping[str, Intrinsic]
    types: dict[str, Type]
    functions: Mapping[str, low.Function]
    vectors: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def define(self, stmt: low.Declare) -> bool:
        """Take a vector constant or constant table; nothing of it appears in the high text."""
        self.types[stmt.name] = stmt.type
        if isinstance(stmt.type, ArrayType) and stmt.init is not None:
            if not getattr(stmt.type.of, "const", False):
                return False
            try:
                self.vectors[stmt.name] = table(stmt)
            except Unliftable:
                return False
            return True
        if vector(stmt.type) is None or stmt.init is None:
            return False
        try:
            executor = self.executor(self.environment({}), frozenset())
            value = [self.settled(v) for v in executor.expr(stmt.init)]
        except SpecError as reason:
            self.reason = self.reason or str(reason)
            return False
        if any(lane != value[0] for lane in value):
            return False
        self.vectors[stmt.name] = sym.vector_of(value)
        return True

    def settled(self, value: Any) -> sym.Lane:
        """Return a lane of a constant: what it loads is loaded once, before the loops."""
        lane = sym.as_lane(value)
        if lane.op == "load":
            array, offset = lane.args
            base = Name(id=self.scalars.names.find(array) or array)
            return sym.Lane("scalar", (Index(base=base, indices=(num(offset // 4),)),))
        if lane.op in ("scalar", "const"):
            return lane
        raise Unliftable("a constant vector is computed")

    # ---- the proof ----

    def chain(
        self, strips: list[Strip], tail: low.If | None, later: set[str]
    ) -> tuple[high.Stmt, ...]:
        """Return the chain as one loop; Unliftable says what could not be shown.

        The counter and the pointers end elsewhere: nothing may read them `later`.
        """
        first = strips[0]
        check_limits(strips, tail)
        changed = frozenset(assigned_names([*(n for s in strips for n in s.body), *_one(tail)]))
        found = self.elements(first, changed)
        unit = first.count // found.elements
        if unit not in (1, 4) or unit * found.elements != first.count:
            raise Unliftable("the counter steps by something else than elements")
        least = first.count
        for strip in strips[1:]:
            self.same(found, self.elements(strip, changed), strip.count // unit)
            least = min(least, strip.count)
        least //= unit
        if tail is not None:
            for left in range(least):
                self.tail(found, first, tail, unit, left, changed)
            least = 1
        check_dead(strips, _one(tail), later)
        return self.build(found, first, unit, least)

    def elements(self, strip: Strip, changed: frozenset[str]) -> Map:
        """Run one iteration of a strip and return the function it maps over its elements."""
        near, steps, _ = self.run(strip, changed, 0)
        moving = frozenset(steps)
        if strip.limit is not None:
            moving = self.followers(near, self.run(strip, changed, sym.FAR)[0])
        counts = Counter(array for array, _ in near)
        if len(set(counts.values())) != 1:
            raise Unliftable("it stores nothing, or arrays of different lengths")
        count = next(iter(counts.values()))
        if any(step != 4 * count for step in steps.values()) or not set(counts) <= moving:
            raise Unliftable("pointers do not move by the elements stored")
        return self.mapped(near, moving, count)

    def followers(self, near: sym.Stores, far: sym.Stores) -> frozenset[str]:
        """Return the arrays whose addresses follow the index, all by its full distance."""
        pairs: list[tuple[sym.Lane, sym.Lane]] = []
        for (array, offset), lane in near.items():
            there = array, offset + 4 * sym.FAR
            if there not in far:
                raise Unliftable("stores do not follow the index")
            place = sym.Lane("load", (array, offset))
            pairs += [(lane, far[there]), (place, sym.Lane("load", there))]
        return sym.moved_arrays(pairs)

    def run(
        self, strip: Strip, changed: frozenset[str], at: int, known: Mapping[str, Any] | None = None
    ) -> tuple[sym.Stores, dict[str, int], Mapping[str, Any]]:
        """Run one iteration with the counter at `at`; `known`: values of other variables.

        Returns what it reads and writes, by how many bytes pointers moved, and all values.
        """
        stores = sym.Stores()
        env = {**self.environment(stores), **(known or {})}
        if strip.limit is not None:
            env[strip.counter] = at
        executor = self.executor(env, changed)
        executor.run(strip.body)
        steps = sym.steps_of(executor.env, self.pointers(stores))
        if steps and strip.limit is not None:
            raise Unliftable("pointers and an index move together")
        return stores, steps, executor.env

    def environment(self, stores: sym.Stores) -> dict[str, Any]:
        """Return what is known before a statement runs: constant vectors, and pointers."""
        return {**self.vectors, **self.pointers(stores)}

    def pointers(self, stores: sym.Stores) -> dict[str, Any]:
        """Return symbolic arrays for all visible float pointers."""
        names = self.scalars.names
        floats = [name for name, made in names.scopes.items() if names.used[made] == "ptr[f32]"]
        return {name: sym.SymbolicPointer(name, 0, stores) for name in floats}

    def executor(self, env: dict[str, Any], changed: frozenset[str]) -> Executor:
        """Return an executor that sees outer scalars, but not the names `changed`."""

        def outer(expr: Expr) -> sym.Lane:
            names = read_names([expr])
            if names & changed:
                raise Unliftable(f"`{sorted(names & changed)[0]}` changes from step to step")
            try:
                made, type_ = self.scalars.expr(expr)
            except SpecError as error:
                raise Unliftable(str(error)) from None
            if type_ not in ("f32", "int"):
                raise Unliftable(f"a {type_} is computed with")
            value = convert(made, type_, "f32")
            if isinstance(value, Float):
                return sym.as_lane(value.value)
            return sym.Lane("scalar", (value,))

        return Executor(self.intrinsics, env, dict(self.types), outer, self.functions)

    def mapped(self, stores: sym.Stores, moving: frozenset[str], count: int) -> Map:
        """Check that each element is element 0 moved along, and return element 0."""
        arrays = sorted({array for array, _ in stores})
        bases: list[tuple[str, sym.Lane]] = []
        for array in arrays:
            base = stores.get((array, 0))
            if base is None:
                raise Unliftable(f"`{array}` is not stored from its start")
            if any(a in moving and offset != 0 for a, offset in sym.loads_of(base)):
                raise Unliftable("an element depends on its neighbours")
            for i in range(count):
                made = stores.get((array, 4 * i))
                if made != sym.shifted(base, dict.fromkeys(moving, 4 * i)):
                    raise Unliftable("the elements of a step are computed differently")
            bases.append((array, base))
        return Map(tuple(bases), count, moving)

    def same(self, wanted: Map, found: Map, count: int) -> None:
        """Check that another strip computes the same function."""
        if found.elements != count or not self.equal(found, wanted):
            raise Unliftable("the loops of a chain compute different things")
        if found.moving != wanted.moving:
            raise Unliftable("the loops of a chain move different pointers")

    def equal(self, found: Map, wanted: Map) -> bool:
        """Whether two maps compute the same, fused multiply-adds and separate ones taken alike."""
        if found.stores == wanted.stores:
            return True
        pairs = zip(found.stores, wanted.stores, strict=True)
        if len(found.stores) != len(wanted.stores) or any(
            a != b or sym.canonical(x) != sym.canonical(y) for (a, x), (b, y) in pairs
        ):
            return False
        self.scalars.note(FUSED_NOTE)
        return True

    def tail(
        self,
        wanted: Map,
        strip: Strip,
        tail: low.If,
        unit: int,
        count: int,
        changed: frozenset[str],
    ) -> None:
        """Run the tail with `count` elements left, of `unit`s: it must do exactly those."""
        stores, left = sym.Stores(), count * unit
        env = self.environment(stores)
        if strip.limit is None:
            env[strip.counter] = left
        else:
            env[strip.counter] = 0
            if not isinstance(strip.limit, Name):
                raise Unliftable("the tail's count is no variable")
            env[strip.limit.id] = left
        self.executor(env, changed - {strip.counter}).run([tail])
        arrays = {array for array, _ in wanted.stores}
        expected = {(array, 4 * i) for array in arrays for i in range(count)}
        if set(stores) != expected:
            raise Unliftable(f"with {count} elements left, the tail stores others")
        if count:
            found = self.mapped(stores, wanted.moving, count)
            if not self.equal(found, wanted):
                raise Unliftable(f"with {count} elements left, the tail computes something else")

    # ---- the result ----

    def bounds(self, strip: Strip, unit: int, least: int) -> tuple[list[high.Stmt], Expr, Expr]:
        """Return where a chain starts and stops in elements, and what must be computed before.

        `least` is the smallest step of the chain: elements that fill no step stay untouched.
        """
        start = num(0)
        if strip.limit is not None and not strip.from_zero:
            start = self.scalars.integer(Name(id=strip.counter))
        total = self.scalars.integer(strip.limit or Name(id=strip.counter))
        if unit != 1:
            total = op("//", total, unit)
        if least != 1:
            length = op("-", total, start)
            if strip.beyond:
                length = op("+", length, least - 1)
            total = op("+", start, op("*", op("//", length, least), least))
        if isinstance(total, Name):
            return [], start, total
        count = Name(id=self.scalars.names.fresh("count", "i64"))
        return [high.Assign(target=count, value=total)], start, count

    def build(self, found: Map, strip: Strip, unit: int, least: int) -> tuple[high.Stmt, ...]:
        """Return the `vrange`; without a tail, elements that fill no step stay untouched."""
        names = self.scalars.names
        before, start, stop = self.bounds(strip, unit, least)
        var = names.fresh("i", "i64")
        text = Writer(self.scalars, var, found.moving, Broadcasts(names, before))
        body = [
            high.ExprStmt(expr=call("vstore", text.address(array), text.vector(lane)))
            for array, lane in found.stores
        ]
        arrays = sorted({a for a, _ in found.stores} | found.moving)
        if len(arrays) > 1:
            self.scalars.note(ALIAS_NOTE.format(", ".join(arrays)))
        return (*before, vector_loop(var, start, stop, tuple(body)))


def _one(stmt: low.Stmt | None) -> tuple[low.Stmt, ...]:
    return () if stmt is None else (stmt,)
