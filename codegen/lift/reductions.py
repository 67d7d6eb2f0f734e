"""Vector loops that sum, or find an extreme, to one `vrange` with one vector accumulator.

Each loop body is run once on symbolic lanes: every accumulator lane must come out as itself joined
with terms, and the terms must be one function of their place, each place once. The code after the
loops must join all lanes into one float; a loop over single elements may add the rest to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.codegen.lift import symbolic as sym
from dovetail.codegen.lift.emit import call
from dovetail.codegen.lift.loops import assigned_names, read_names
from dovetail.codegen.lift.patterns import IDENTITY, join_term, vector_loop
from dovetail.codegen.lift.shapes import Strip, check_dead, check_limits, find_strip
from dovetail.codegen.lift.strips import Strips
from dovetail.codegen.lift.types import Unliftable
from dovetail.codegen.lift.writer import Broadcasts, Writer
from dovetail.ir.expr import Binary, Call, Float, Name, NamedType
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import vector

JOINS = {"vadd": "add", "vmax": "max", "vmin": "min"}


@dataclass(frozen=True, slots=True)
class Terms:
    """What one iteration joins to the accumulators: the term of element 0, and how many."""

    kind: str
    term: sym.Lane
    count: int
    moving: frozenset[str]


def match_chain(
    strips: Strips, body: Sequence[low.Stmt], later: set[str]
) -> tuple[int, tuple[high.Stmt, ...]]:
    """Return how many statements a chain at the start of `body` takes, and what they become.

    later: the names that are read after `body`.
    """
    found: list[Strip] = []
    for stmt in body:
        strip = find_strip(stmt, strips.types)
        if strip is None or (found and strip.counter != found[0].counter):
            break
        found.append(strip)
    if not any(map(_holds_vectors, body[: len(found)])):
        return 0, ()
    rest = body[len(found) :]
    tail = rest[0] if rest and isinstance(rest[0], low.If) else None
    if tail is not None and found[0].counter not in read_names([tail.cond]):
        tail = None
    used = len(found) + (tail is not None)
    try:
        return used, strips.chain(found, tail, read_names(body[used:]) | later)
    except Unliftable as reason:
        strips.reason = strips.reason or str(reason)
    try:
        used, made = _Reducer(strips, found, rest, later).run()
    except Unliftable as reason:
        strips.reason = f"{strips.reason}, {reason}"
        return 0, ()
    return len(found) + used, made


def _holds_vectors(stmt: low.Stmt) -> bool:
    return any(
        (isinstance(n, low.Declare) and vector(n.type) is not None)
        or (isinstance(n, Call) and n.name.startswith(("_mm", "vst1")))
        for n in stmt.walk()
    )


@dataclass(slots=True)
class _Reducer:
    strips: Strips
    found: Sequence[Strip]
    rest: Sequence[low.Stmt]
    later: set[str]

    def run(self) -> tuple[int, tuple[high.Stmt, ...]]:
        first = self.found[0]
        check_limits(self.found, None)
        accumulators = self.accumulators()
        terms = self.terms(first, accumulators)
        unit = first.count // terms.count
        if unit not in (1, 4) or unit * terms.count != first.count:
            raise Unliftable("the counter steps by something else than elements")
        least = terms.count
        for strip in self.found[1:]:
            self.check_same(terms, self.terms(strip, accumulators), strip.count // unit)
            least = min(least, strip.count // unit)
        used, result, extra = self.joined(accumulators, terms.kind)
        after = self.rest[used:]
        last = find_strip(after[0], self.strips.types) if after else None
        same = last is not None and (last.counter, last.limit) == (first.counter, first.limit)
        if last is not None and same and not last.from_zero:
            check_limits([*self.found, last], None)
            self.check_same(terms, self.terms(last, {result: 1}), last.count // unit)
            used, least, after = used + 1, 1, after[1:]
        later = read_names(self.rest[used:]) | self.later
        check_dead(self.found, self.rest[:used], later - {result})
        return used, self.build(terms, first, unit, least, result, extra)

    def accumulators(self) -> dict[str, int]:
        """Return the vectors the loops change, and their lanes."""
        changed = assigned_names(s for strip in self.found for s in strip.body)
        known = {
            name: len(self.strips.vectors[name]) for name in changed & set(self.strips.vectors)
        }
        if not known:
            raise Unliftable("it stores nothing and keeps no vector")
        return known

    def terms(self, strip: Strip, accumulators: dict[str, int]) -> Terms:
        """Run one iteration and return what it joins to the accumulators."""
        near, moving = self.changes(strip, accumulators, 0)
        if strip.limit is not None:
            far, _ = self.changes(strip, accumulators, sym.FAR)
            pairs = zip(near, far, strict=True)
            moving = sym.moved_arrays((a, b) for (_, a), (_, b) in pairs)
        kinds = {kind for kind, _ in near}
        if len(kinds) != 1 or not moving:
            raise Unliftable("accumulators are joined in different ways")
        places: dict[int, sym.Lane] = {}
        for _, term in near:
            offsets = {offset for array, offset in sym.loads_of(term) if array in moving}
            if len(offsets) != 1:
                raise Unliftable("a term reads several places")
            offset = offsets.pop()
            places[offset] = sym.shifted(term, dict.fromkeys(moving, -offset))
        first = places.get(0)
        if first is None or sorted(places) != [4 * i for i in range(len(near))]:
            raise Unliftable("the terms of a step are not one for each element")
        if any(sym.canonical(term) != sym.canonical(first) for term in places.values()):
            raise Unliftable("the terms of a step are computed differently")
        return Terms(kinds.pop(), first, len(near), moving)

    def changes(
        self, strip: Strip, accumulators: dict[str, int], at: int
    ) -> tuple[list[tuple[str, sym.Lane]], frozenset[str]]:
        """Return (join, term) for each accumulator lane, and the pointers that moved."""
        stores, steps, env = self.strips.run(
            strip, frozenset(assigned_names(strip.body)), at, _fresh(accumulators)
        )
        if stores:
            raise Unliftable("it stores and reduces in one loop")
        joins: list[tuple[str, sym.Lane]] = []
        for name, lanes in accumulators.items():
            for i, lane in enumerate(env[name] if lanes > 1 else [env[name]]):
                joins += taken(sym.as_lane(lane), sym.Lane("acc", (name, i)))
        if any(step != 4 * len(joins) for step in steps.values()):
            raise Unliftable("pointers do not move by the elements read")
        return joins, frozenset(steps)

    def check_same(self, wanted: Terms, found: Terms, count: int) -> None:
        if (found.kind, found.count, found.moving) != (wanted.kind, count, wanted.moving):
            raise Unliftable("the loops of a reduction differ")
        if sym.canonical(found.term) != sym.canonical(wanted.term):
            raise Unliftable("the loops of a reduction compute different terms")

    # ---- after the loops ----

    def joined(self, accumulators: dict[str, int], kind: str) -> tuple[int, str, sym.Lane | None]:
        """Run the code after the loops until all lanes are joined in one float.

        Returns the statements used, the float's name and what else is joined to it.
        """
        stores = sym.Stores()
        env = {**self.strips.environment(stores), **_fresh(accumulators)}
        executor = self.strips.executor(env, frozenset())
        name: str | None = None
        wanted = {
            sym.Lane("acc", (n, i)) for n, lanes in accumulators.items() for i in range(lanes)
        }
        for used, stmt in enumerate(self.rest, 1):
            if not isinstance(stmt, low.Declare | low.ExprStmt | low.For):
                break
            executor.run([stmt])
            if stores:
                break
            made = _target(stmt)
            name = made if made is not None else name
            value = executor.env.get(name) if name is not None else None
            if not isinstance(value, sym.Lane):
                continue
            leaves = _leaves(value, kind)
            extra = [leaf for leaf in leaves if leaf not in wanted]
            counted = len(leaves) - len(extra)
            once = kind != "add" or counted == len(wanted)
            if name is not None and {*leaves} >= wanted and len(extra) <= 1 and once:
                return used, name, self.starting(accumulators, kind, extra)
        raise Unliftable("the lanes are not joined in one float after the loops")

    def starting(
        self, accumulators: dict[str, int], kind: str, extra: list[sym.Lane]
    ) -> sym.Lane | None:
        """Return the value joined to all elements; accumulators of a sum must start at 0."""
        begun = {sym.as_lane(v) for name in accumulators for v in self.strips.vectors[name]}
        neutral = sym.Lane("const", (IDENTITY[kind],))
        others = [lane for lane in (*begun, *extra) if lane != neutral]
        if kind == "add" and begun != {neutral}:
            raise Unliftable("an accumulator does not start at 0")
        if len(set(others)) > 1 or any(o.op not in ("const", "scalar") for o in others):
            raise Unliftable("accumulators start at different values")
        return others[0] if others else None

    # ---- the result ----

    def build(
        self, terms: Terms, strip: Strip, unit: int, least: int, result: str, extra: sym.Lane | None
    ) -> tuple[high.Stmt, ...]:
        """Return the loop, with the accumulator before it and the float after it."""
        names = self.strips.scalars.names
        before, start, stop = self.strips.bounds(strip, unit, least)
        acc = Name(id=names.fresh(f"{result}_v", "vec"))
        var = names.fresh("i", "i64")
        text = Writer(self.strips.scalars, var, terms.moving, Broadcasts(names, before))
        zero_tail = _zero_past_end(terms.term, terms.moving)
        joined = join_term(terms.kind, acc, text.vector(terms.term), zero_tail)
        loop = vector_loop(var, start, stop, (high.Assign(target=acc, value=joined),))
        reduced = call(f"vreduce_{terms.kind}", acc)
        begin = call("vzero")
        if terms.kind != "add":
            identity = Float(value=IDENTITY[terms.kind])
            begin = call("vbroadcast", identity if extra is None else text.scalar(extra))
        elif extra is not None:
            reduced = Binary(op="+", left=text.scalar(extra), right=reduced)
        made = names.find(result) or names.declare(result, "f32")
        total = high.Assign(target=Name(id=made), value=reduced, type=NamedType(name="f32"))
        return (*before, high.Assign(target=acc, value=begin), loop, total)


def _zero_past_end(term: sym.Lane, moving: frozenset[str]) -> bool:
    """Whether the term is 0 where loads give 0: a load, or a product or sum of such."""
    if term.op == "load":
        return term.args[0] in moving
    joined = term.op in ("vmul", "vadd", "vsub", "vneg", "vabs")
    return joined and all(_zero_past_end(a, moving) for a in term.args)


def _fresh(accumulators: dict[str, int]) -> dict[str, Any]:
    """Return accumulators whose lanes are themselves."""
    lanes = {n: [sym.Lane("acc", (n, i)) for i in range(k)] for n, k in accumulators.items()}
    return {name: sym.vector_of(of) if len(of) > 1 else of[0] for name, of in lanes.items()}


def _target(stmt: low.Stmt) -> str | None:
    """Return the variable that a statement gives a value; of a loop, the one it adds to."""
    if isinstance(stmt, low.For):
        names = assigned_names([stmt.body])
        return names.pop() if len(names) == 1 else None
    if isinstance(stmt, low.Declare):
        return stmt.name
    if isinstance(stmt, low.ExprStmt) and isinstance(stmt.expr, low.Assign):
        target = stmt.expr.target
        return target.id if isinstance(target, Name) else None
    return None


def taken(lane: sym.Lane, acc: sym.Lane) -> list[tuple[str, sym.Lane]]:
    """Return the terms joined to `acc` in `lane`, with how they are joined."""
    if lane == acc:
        return []
    if lane.op == "vfma":
        a, b, c = lane.args
        return [*taken(c, acc), ("add", sym.Lane("vmul", (a, b)))]
    if lane.op in JOINS:
        left, right = lane.args
        kind = JOINS[lane.op]
        if acc in left.walk():
            return [*taken(left, acc), (kind, right)]
        return [*taken(right, acc), (kind, left)]
    raise Unliftable("an accumulator is not only joined with terms")


def _leaves(lane: sym.Lane, kind: str) -> list[sym.Lane]:
    """Return what is joined by `kind` in a lane."""
    if JOINS.get(lane.op) == kind:
        return [leaf for a in lane.args for leaf in _leaves(a, kind)]
    return [lane]
