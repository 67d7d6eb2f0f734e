"""Kernels of a fixed width for targets with wider vectors: neighbouring groups become one.

In: a kernel of groups as `pinned` makes it, each statement in a loop of its own. Out: groups of
twice the lanes where all that is done to one is done beside it, too. What is done to a lane, and in
which order, stays, and so do the bits. The tunable LANES says how many lanes of a vector are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import VL, call, num, op
from dovetail.codegen.lift.pinned import count_of, lanes_left, split_offset, used_lanes
from dovetail.codegen.lift.unroll import names_of
from dovetail.ir.expr import Binary, Call, Expr, Index, Int, Name
from dovetail.ir.high import nodes as high
from dovetail.ir.high.scopes import Body, all_statements, defined_name, map_bodies
from dovetail.ir.node import Node, rewrite_node

WIDTHS = (4, 8, 16)
"""Lanes of the groups that C has; the last fill a vector of every CPU."""


def widen(kernel: high.Function) -> high.Function:
    """Return a kernel with neighbouring groups joined, and loops over equal groups merged."""
    made, joined = move_last(kernel), set[int]()
    for width in WIDTHS[:-1]:
        wider = _Joiner(width).join(made)
        if wider is not None:
            made, joined = wider, joined | {width, 2 * width}
    if not joined:
        made = kernel
    elif kernel.kind == "kernel":
        choices = tuple(n for n in WIDTHS if min(joined) <= n <= max(joined))
        lanes = names_of(kernel).fresh("LANES", "i64")
        tunable = high.Tunable(name=lanes, choices=choices, default=max(choices))
        made = _replaced(made, {VL: call("min", VL, Name(id=lanes))})
        made = replace(made, tunables=(*made.tunables, tunable))
    return replace(made, body=merge_unrolls(made.body))


def _replaced(node: Any, table: Mapping[Expr, Expr]) -> Any:
    return rewrite_node(node, [(Expr, table.get)])


def _calls(node: Node, *names: str) -> list[Call]:
    return [n for n in node.walk() if isinstance(n, Call) and n.name in names]


def move_last(kernel: high.Function) -> high.Function:
    """Return a kernel whose pointers move on after the statements in a row that use them.

    So places that lie side by side differ by a number.
    """
    places = (c.args[0] for c in _calls(kernel, "vload", "vstore"))
    used = {node.id for place in places for node in place.walk() if isinstance(node, Name)}

    def ordered(body: Body) -> Body:
        out: list[high.Stmt] = []
        ahead: dict[str, int] = {}
        for stmt in (*body, None):
            name = defined_name(stmt) or "" if stmt is not None else ""
            straight = isinstance(stmt, high.Assign) or getattr(stmt, "kind", "") == "unroll"
            by = stmt.value if isinstance(stmt, high.Assign) and stmt.op == "+=" else None
            if name in used and isinstance(by, Int):
                ahead[name] = ahead.get(name, 0) + by.value
            elif straight and name not in ahead:
                moved: dict[Expr, Expr] = {
                    Name(id=n): op("+", Name(id=n), count) for n, count in ahead.items()
                }
                out.append(_replaced(stmt, moved))
            else:
                for n, count in ahead.items():
                    out.append(high.Assign(target=Name(id=n), value=num(count), op="+="))
                ahead = {}
                out += () if stmt is None else (map_bodies(stmt, ordered),)
        return tuple(out)

    return replace(kernel, body=ordered(kernel.body))


def merge_unrolls(body: Body, *, stores: bool = False) -> Body:
    """Join neighbouring loops over one group; those that store what others may read only if so."""
    out: list[high.Stmt] = []
    for stmt in body:
        last = out[-1] if out else None
        if not isinstance(stmt, high.For) or stmt.kind != "unroll":
            out.append(map_bodies(stmt, partial(merge_unrolls, stores=stores)))
        elif (
            isinstance(last, high.For)
            and (last.kind, last.stop) == ("unroll", stmt.stop)
            and (stores or not (_calls(last, "vstore") or _calls(stmt, "vstore")))
        ):
            out[-1] = replace(last, body=(*last.body, *stmt.body))
        else:
            out.append(stmt)
    return tuple(out)


@dataclass(slots=True)
class _Joiner:
    """Joins groups of `lanes`. beside: a tile to its neighbour, itself where lanes are alike."""

    lanes: int
    tiles: set[str] = field(default_factory=set)
    beside: dict[str, str] = field(default_factory=dict)

    def join(self, kernel: high.Function) -> high.Function | None:
        """Return the kernel with joined groups, None where none can be."""
        kernel = replace(kernel, body=merge_unrolls(kernel.body, stores=True))
        own = (count_of(self.lanes),)
        self.tiles = {s.name for s in kernel.body if isinstance(s, high.Regs) and s.shape == own}
        loops = (s for s in all_statements(kernel.body) if isinstance(s, high.For))
        runs = [loop.body for loop in loops if (loop.stop,) == own]
        elsewhere = Counter(self.named(kernel))
        elsewhere.subtract(name for run in runs for stmt in run for name in self.named(stmt))
        self.tiles -= set(+elsewhere)
        self.beside = {name: name for name in self.tiles}
        while other := {
            name
            for run in runs
            for stmt in run
            if (name := self.writes(stmt)) in self.beside and not self.follows(stmt, stmt)
        }:
            self.beside = {name: name for name in self.beside.keys() - other}
        while self.learn(runs):
            pass
        while lost := self.known() & set[str]().union(*map(self.unpaired, runs)):
            self.beside = {a: b for a, b in self.beside.items() if not {a, b} & lost}
        if all(a == b for a, b in self.beside.items()) or not all(map(self.can_meet, runs)):
            return None
        made = rewrite_node(kernel, [(high.For, self.joined), (high.Regs, self.declared)])
        assert isinstance(made, high.Function)
        return made

    def known(self) -> set[str]:
        return {*self.beside, *self.beside.values()}

    def tile(self, node: Node) -> str:
        name = node.base.id if isinstance(node, Index) and isinstance(node.base, Name) else ""
        return name if name in self.tiles else ""

    def named(self, node: Node) -> list[str]:
        return [name for n in node.walk() if (name := self.tile(n))]

    def writes(self, stmt: high.Stmt) -> str:
        return self.tile(stmt.target) if isinstance(stmt, high.Assign) else ""

    def reads(self, stmt: high.Stmt) -> set[str]:
        return set(self.named(stmt.value if isinstance(stmt, high.Assign) else stmt))

    # ---- what joining changes ----

    def joined(self, loop: high.For) -> Body | None:
        """Return a run, each statement in a loop of its own, and those of pairs as one."""
        if loop.kind != "unroll":
            return None
        own = loop.stop == count_of(self.lanes)
        table = {change(self.lanes): change(2 * self.lanes) for change in (used_lanes, count_of)}
        out: list[high.Stmt] = []
        for first, *second in self.pairs(loop.body) if own else zip(range(len(loop.body))):
            alone = replace(loop, body=(loop.body[first],))
            out.append(_replaced(alone, table) if second else alone)
        return tuple(out)

    def declared(self, stmt: high.Regs) -> Body | None:
        """Return what declares a tile and its neighbour, nothing for the neighbour itself."""
        if stmt.name in self.beside:
            return (replace(stmt, shape=(count_of(2 * self.lanes),)),)
        return () if stmt.name in self.known() else None

    def can_meet(self, run: Body) -> bool:
        """Whether the later of each pair may move to the first one's place."""
        pairs = [sorted(pair) for pair in self.pairs(run) if len(pair) == 2]
        return not any(self.binds(run[k], run[j]) for i, j in pairs for k in range(i + 1, j))

    def binds(self, first: high.Stmt, later: high.Stmt) -> bool:
        """Whether a statement has to stay behind an earlier one."""
        a, b = self.writes(first), self.writes(later)
        if (a and a in {b, *self.reads(later)}) or b in self.reads(first):
            return True
        return not (a and b) and all(not self.writes(s) or self.loads(s) for s in (first, later))

    def loads(self, stmt: high.Stmt) -> bool:
        """Whether a statement reads memory: vectors, or what is no vector of a tile."""
        source = stmt.value if isinstance(stmt, high.Assign) else stmt
        indices = [n for n in source.walk() if isinstance(n, Index)]
        return bool(_calls(source, "vload")) or not all(map(self.tile, indices))

    # ---- neighbours ----

    def pairs(self, run: Body) -> list[tuple[int, ...]]:
        """Return the places of statements, each with that of what repeats it one group on."""
        places, out = list(range(len(run))), list[tuple[int, ...]]()
        while places:
            i = places[0]
            pairs = [(i, j) for j in places if self.follows(run[i], run[j])]
            pairs += [(j, i) for j in places if self.follows(run[j], run[i])]
            out.append(pairs[0] if pairs else (i,))
            places = [j for j in places if j not in out[-1]]
        return out

    def unpaired(self, run: Body) -> set[str]:
        alone = [run[i] for i, *second in self.pairs(run) if not second]
        return {name for stmt in alone for name in self.named(stmt)}

    def learn(self, runs: Iterable[Body]) -> bool:
        """Add neighbours that what is known tells; return whether there are new ones."""
        before = len(self.beside)
        for run in runs:
            for stmt in run:
                if self.writes(stmt) not in {"", *self.known()}:
                    likely = {self.writes(s) for s in run if self.follows(stmt, s, learn=True)}
                    self.beside |= {self.writes(stmt): min(likely)} if len(likely) == 1 else {}
        return len(self.beside) > before

    def follows(self, a: high.Stmt, b: high.Stmt, *, learn: bool = False) -> bool:
        """Whether `b` does what `a` does, one group on; learn: also on tiles that are not known."""
        if isinstance(a, high.Assign) and isinstance(b, high.Assign):
            own = self.writes(a), self.writes(b)
            known = self.beside.get(own[0]) == own[1]
            if not known and not (learn and len({"", *own} - self.known()) == 3):
                return False
            found = self.evidence(a.value, b.value, own)
            return found is not None and (known or found > 0)
        if isinstance(a, high.Assign) or isinstance(b, high.Assign):
            return False
        (to, value, count), (there, other, left) = (_calls(s, "vstore")[0].args for s in (a, b))
        same = self.evidence(value, other, ("", "")) is not None and not self.loads(a)
        return same and self.is_beside(to, there) and self.goes_on(count, left)

    def evidence(self, a: Expr, b: Expr, own: tuple[str, str]) -> int | None:
        """Return how many neighbours tell that `b` is `a` one group on; None where it is not.

        own: the tiles that take the values, which may be part of them.
        """
        tiles = self.tile(a), self.tile(b)
        if any(tiles):
            known = self.beside.get(tiles[0]) == tiles[1]
            return 0 if tiles == own else int(tiles[0] != tiles[1]) if known else None
        if not isinstance(a, Call) or not isinstance(b, Call) or a.name != b.name:
            return 0 if a == b else None
        if a.name == "vload":
            alike = a.args[1:] == b.args[1:] == (used_lanes(self.lanes),)
            return 1 if alike and self.is_beside(a.args[0], b.args[0]) else None
        found = [self.evidence(x, y, own) for x, y in zip(a.args, b.args, strict=True)]
        return None if None in found else sum(n for n in found if n)

    def is_beside(self, a: Expr, b: Expr) -> bool:
        """Whether an address `base + offset + u * VL` is that of the group after another's."""
        if not isinstance(a, Binary) or not isinstance(b, Binary) or a.right != b.right:
            return False
        (base, at), (there, at_there) = split_offset(a.left), split_offset(b.left)
        return base == there and at_there - at == self.lanes

    def goes_on(self, a: Expr, b: Expr) -> bool:
        """Whether the lanes stored of two groups are the first so many of both together."""
        if a == b == used_lanes(self.lanes):
            return True
        rest = next((n for n in a.walk() if isinstance(n, Binary)), None)
        if rest is None:
            return False
        left, at = split_offset(rest.left)
        made = [lanes_left(left, on - at, self.lanes, rest.right) for on in (0, self.lanes)]
        return [a, b] == made
