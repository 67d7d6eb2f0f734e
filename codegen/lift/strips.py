"""Vector loops to one `vrange`, by proof: every strip and the tail must compute the same function.

A chain is what hand-written kernels look like: a main loop over many lanes, perhaps smaller ones,
then code for what is left. Each loop body is run once on symbolic lanes, the tail once for every
count that can be left. Where all elements are one function of their place, that is lifted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.codegen.lift import symbolic as sym
from dovetail.codegen.lift.execute import Executor, table
from dovetail.codegen.lift.loops import assigned_names, read_names
from dovetail.codegen.lift.patterns import vector_loop
from dovetail.codegen.lift.scalar import Scalars, convert
from dovetail.codegen.lift.shapes import Strip, check_limits, find_strip
from dovetail.codegen.lift.types import Unliftable
from dovetail.codegen.lift.vectorise import ALIAS_NOTE
from dovetail.codegen.lift.writer import Broadcasts, Writer
from dovetail.ir.errors import SpecError
from dovetail.ir.expr import ArrayType, Binary, Call, Expr, Float, Index, Int, Name, Type
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import vector
from dovetail.ir.node import Node

FUSED_NOTE = "the loops of a chain round their multiply-adds differently; the first one counts"


@dataclass(frozen=True, slots=True)
class Map:
    """What a run of elements computes: for each array written, the lane of element 0."""

    stores: tuple[tuple[str, sym.Lane], ...]
    elements: int
    advanced: Mapping[str, int] = field(default_factory=dict)  # pointer -> bytes


Reduce: TypeAlias = Callable[
    ["Strips", Sequence[Strip], Sequence[low.Stmt]], tuple[int, tuple[high.Stmt, ...]]
]
"""`reductions.reduce_chain`, which stands on this module."""


@dataclass(slots=True)
class Strips:
    """Finds chains in a statement list; knows the vector constants defined before them."""

    scalars: Scalars
    intrinsics: Mapping[str, Intrinsic]
    types: dict[str, Type]
    functions: Mapping[str, low.Function]
    reduce: Reduce
    vectors: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    off: bool = False  # leave loops alone

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
            env = {**self.vectors, **self.pointers(sym.Traffic({}))}
            value = [self.settled(v) for v in self.executor(env, frozenset()).expr(stmt.init)]
        except (Unliftable, SpecError) as reason:
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
            return sym.Lane("scalar", (Index(base=base, indices=(Int(value=offset // 4),)),))
        if lane.op in ("scalar", "const"):
            return lane
        raise Unliftable("a constant vector is computed")

    def match(self, body: Sequence[low.Stmt]) -> tuple[int, tuple[high.Stmt, ...]]:
        """Return how many statements a chain at the start of `body` takes, and what they become."""
        strips: list[Strip] = []
        if self.off:
            return 0, ()
        while len(strips) < len(body):
            strip = find_strip(body[len(strips)], self.types)
            if strip is None or (strips and strip.counter != strips[0].counter):
                break
            strips.append(strip)
        if not strips or not _vectors_inside(body[: len(strips)]):
            return 0, ()
        used = len(strips)
        tail: low.If | None = None
        after = body[used] if used < len(body) else None
        if isinstance(after, low.If) and strips[0].counter in read_names([after.cond]):
            tail, used = after, used + 1
        try:
            return used, self.chain(strips, tail, body[used:])
        except Unliftable as reason:
            self.reason = self.reason or str(reason)
        return self.reduction(strips, body)

    def reduction(
        self, strips: list[Strip], body: Sequence[low.Stmt]
    ) -> tuple[int, tuple[high.Stmt, ...]]:
        """Try a chain as a reduction."""
        try:
            used, made = self.reduce(self, strips, body[len(strips) :])
        except Unliftable as reason:
            self.reason = f"{self.reason}, {reason}"
            return 0, ()
        return len(strips) + used, made

    # ---- the proof ----

    def chain(
        self, strips: list[Strip], tail: low.If | None, rest: Sequence[low.Stmt]
    ) -> tuple[high.Stmt, ...]:
        """Return the chain as one loop; Unliftable says what could not be shown."""
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
                self.tail(found, first, tail, left * unit, left, changed)
            least = 1
        self.dead(strips, tail, rest)
        return self.build(found, first, unit, least)

    def elements(self, strip: Strip, changed: frozenset[str]) -> Map:
        """Run one iteration of a strip and return the function it maps over its elements."""
        runs = [self.run(strip, changed, 0)]
        if strip.limit is not None:
            runs.append(self.run(strip, changed, sym.FAR))
        traffic, executor, pointers = runs[0]
        moving = {p: step for p, step in sym.steps_of(executor.env, pointers).items() if step}
        arrays = {array for array, _ in traffic.stores}
        if strip.limit is not None:
            if moving:
                raise Unliftable("pointers and an index move together")
            moving = self.followers(traffic, runs[1][0])
        counts = {array: sum(1 for a, _ in traffic.stores if a == array) for array in arrays}
        if len(set(counts.values())) != 1:
            raise Unliftable("it stores nothing, or arrays of different lengths")
        count = next(iter(counts.values()))
        wrong = [p for p, step in moving.items() if step != 4 * count]
        if wrong or not arrays <= set(moving):
            raise Unliftable("pointers do not move by the elements stored")
        return self.mapped(traffic, set(moving), range(count))

    def followers(self, near: sym.Traffic, far: sym.Traffic) -> dict[str, int]:
        """Return the arrays whose addresses follow the index, all by its full distance."""
        count = max((offset for _, offset in near.stores), default=0) // 4 + 1
        pairs: list[tuple[sym.Lane, sym.Lane]] = []
        for (array, offset), lane in near.stores.items():
            other = far.stores.get((array, offset + 4 * sym.FAR))
            if other is None:
                raise Unliftable("stores do not follow the index")
            place = sym.Lane("load", (array, offset))
            pairs += [(lane, other), (place, sym.Lane("load", (array, offset + 4 * sym.FAR)))]
        return dict.fromkeys(sym.moved_arrays(pairs), 4 * count)

    def run(
        self, strip: Strip, changed: frozenset[str], at: int
    ) -> tuple[sym.Traffic, Executor, set[str]]:
        """Run one iteration with the counter at `at`."""
        traffic = sym.Traffic({})
        pointers = self.pointers(traffic)
        env: dict[str, Any] = {**self.vectors, **pointers}
        if strip.limit is not None:
            env[strip.counter] = at
        executor = self.executor(env, changed)
        executor.run(strip.body)
        return traffic, executor, set(pointers)

    def pointers(self, traffic: sym.Traffic) -> dict[str, Any]:
        """Return symbolic arrays for all visible float pointers."""
        found: dict[str, Any] = {}
        for scope in self.scalars.names.scopes:
            for name, made in scope.items():
                if self.scalars.names.type_of(made) == "ptr[f32]":
                    found[name] = sym.SymbolicPointer(name, 0, traffic)
        return found

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
            return (
                sym.as_lane(value.value)
                if isinstance(value, Float)
                else sym.Lane("scalar", (value,))
            )

        return Executor(self.intrinsics, env, dict(self.types), outer, self.functions)

    def mapped(self, traffic: sym.Traffic, moving: set[str], elements: range) -> Map:
        """Check that each element is element 0 moved along, and return element 0."""
        arrays = sorted({array for array, _ in traffic.stores})
        stores: list[tuple[str, sym.Lane]] = []
        for array in arrays:
            base = traffic.stores.get((array, 0))
            if base is None:
                raise Unliftable(f"`{array}` is not stored from its start")
            if any(a in moving and offset != 0 for a, offset in sym.loads_of(base)):
                raise Unliftable("an element depends on its neighbours")
            for i in elements:
                made = traffic.stores.get((array, 4 * i))
                if made != sym.shifted(base, dict.fromkeys(moving, 4 * i)):
                    raise Unliftable("the elements of a step are computed differently")
            stores.append((array, base))
        return Map(tuple(stores), len(elements), dict.fromkeys(moving, 4 * len(elements)))

    def same(self, wanted: Map, found: Map, count: int) -> None:
        """Check that another strip computes the same function."""
        if found.elements != count or not self.equal(found, wanted):
            raise Unliftable("the loops of a chain compute different things")
        if set(found.advanced) != set(wanted.advanced):
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
        left: int,
        count: int,
        changed: frozenset[str],
    ) -> None:
        """Run the tail with `left` of the counter left: it must do exactly `count` elements."""
        traffic = sym.Traffic({})
        env: dict[str, Any] = {**self.vectors, **self.pointers(traffic)}
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
        if set(traffic.stores) != expected:
            raise Unliftable(f"with {count} elements left, the tail stores others")
        if count:
            found = self.mapped(traffic, set(wanted.advanced), range(count))
            if not self.equal(found, wanted):
                raise Unliftable(f"with {count} elements left, the tail computes something else")

    def dead(self, strips: list[Strip], tail: low.If | None, rest: Sequence[low.Stmt]) -> None:
        """The counter and the pointers end elsewhere now: nothing may read them afterwards."""
        moved = set().union(*(s.leaves() for s in strips), assigned_names(_one(tail)))
        again = moved & read_names(rest)
        if again:
            raise Unliftable(f"`{sorted(again)[0]}` is used after the loops")

    # ---- the result ----

    def bounds(self, strip: Strip, unit: int, least: int) -> tuple[list[high.Stmt], Expr, Expr]:
        """Return where a chain starts and stops in elements, and what must be computed before.

        `least` is the smallest step of the chain: elements that fill no step stay untouched.
        """
        start: Expr = Int(value=0)
        if strip.limit is not None and not strip.from_zero:
            start = self.scalars.integer(Name(id=strip.counter))
        total = self.scalars.integer(strip.limit or Name(id=strip.counter))
        if unit != 1:
            total = Binary(op="//", left=total, right=Int(value=unit))
        if least != 1:
            size = Int(value=least)
            zero = start == Int(value=0)
            length = total if zero else Binary(op="-", left=total, right=start)
            if strip.beyond:
                length = Binary(op="+", left=length, right=Int(value=least - 1))
            whole = Binary(op="*", left=Binary(op="//", left=length, right=size), right=size)
            total = whole if zero else Binary(op="+", left=start, right=whole)
        if isinstance(total, Name):
            return [], start, total
        count = Name(id=self.scalars.names.fresh("count", "i64"))
        return [high.Assign(target=count, value=total)], start, count

    def build(self, found: Map, strip: Strip, unit: int, least: int) -> tuple[high.Stmt, ...]:
        """Return the `vrange`; without a tail, elements that fill no step stay untouched."""
        names = self.scalars.names
        before, start, stop = self.bounds(strip, unit, least)
        var = names.fresh("i", "i64")
        text = Writer(self.scalars, var, set(found.advanced), Broadcasts(names, before))
        body = [
            high.ExprStmt(expr=Call(name="vstore", args=(text.address(array), text.vector(lane))))
            for array, lane in found.stores
        ]
        arrays = sorted({a for a, _ in found.stores} | set(found.advanced))
        if len(arrays) > 1:
            self.scalars.note(ALIAS_NOTE.format(", ".join(arrays)))
        return (*before, vector_loop(var, start, stop, tuple(body)))


def _vectors_inside(body: Sequence[Node]) -> bool:
    return any(
        isinstance(n, low.Declare) and vector(n.type) is not None for s in body for n in s.walk()
    ) or any(
        isinstance(n, Call) and n.name.startswith(("_mm", "vst1")) for s in body for n in s.walk()
    )


def _one(stmt: low.Stmt | None) -> tuple[low.Stmt, ...]:
    return () if stmt is None else (stmt,)
