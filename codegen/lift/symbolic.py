"""Lane-wise symbolic values: what a vector register holds, written as expressions over memory.

Vectors are numpy object arrays of `Lane`s, so that the numpy meanings of shuffles, casts, masked
loads and stores in the ISA tables move them like numbers; arithmetic comes from the op column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.codegen.lift.types import Unliftable
from dovetail.ir.expr import Call, Expr, Index, Int, Name
from dovetail.ir.low.parse import parse_low_expr

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Lane:
    """One float: an operation; `load` (array, byte offset), `scalar` (expression) or `const`."""

    op: str
    args: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Lane, ...]:
        """The lanes that this one is computed from."""
        return () if self.op in LEAVES else self.args

    def walk(self) -> Iterator[Lane]:
        """Yield this lane and all that it is computed from."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def __add__(self, other: Any) -> Lane:
        return Lane("vadd", (self, as_lane(other)))

    def __sub__(self, other: Any) -> Lane:
        return Lane("vsub", (self, as_lane(other)))

    def __mul__(self, other: Any) -> Lane:
        return Lane("vmul", (self, as_lane(other)))

    def __truediv__(self, other: Any) -> Lane:
        return Lane("vdiv", (self, as_lane(other)))

    def __bool__(self) -> bool:
        raise Unliftable("lanes are compared")

    def _compared(self, other: Any) -> bool:
        raise Unliftable("lanes are compared")

    __lt__ = __gt__ = __le__ = __ge__ = _compared


LEAVES = ("load", "scalar", "const", "acc", "var")


def as_lane(value: Any) -> Lane:
    """Return a number as a constant lane."""
    return value if isinstance(value, Lane) else Lane("const", (float(value),))


class Lanes(np.ndarray[Any, Any]):
    """A vector of `Lane`s; reading its bits as another type is not followed."""

    def view(self, *types: Any) -> Any:  # type: ignore[override]
        """Return the vector itself where floats are read as floats."""
        if all(np.dtype(t) == np.float32 for t in types):
            return self
        raise Unliftable("float bits are read as integers")


def vector_of(lanes: list[Any]) -> Array:
    """Return a vector of these lanes."""
    out = np.ndarray.view(np.empty(len(lanes), object), Lanes)
    for i, lane in enumerate(lanes):
        out[i] = lane
    return out


Stores = dict[tuple[str, int], Lane]
"""What one run writes: (array, byte offset) to the lane that is stored there."""


@dataclass(frozen=True, slots=True)
class SymbolicPointer:
    """An address in an array nothing is known of."""

    array: str
    offset: int
    stores: Stores

    def advance(self, count: int) -> SymbolicPointer:
        """Return the pointer `count` bytes further."""
        return replace(self, offset=self.offset + count)

    def load(self, dtype: Any, count: int) -> Array:
        """Return `count` floats."""
        return self.load_lanes(dtype, np.ones(count, bool))

    def load_lanes(self, dtype: Any, mask: Array) -> Array:
        """Return floats, 0 where the mask is false."""
        if np.dtype(dtype) != np.float32:
            raise Unliftable(f"it loads {np.dtype(dtype)} from an array of floats")
        places = [(self.array, self.offset + 4 * i) for i in range(len(mask))]
        found = [self.stores.get(place, Lane("load", place)) for place in places]
        return vector_of(
            [lane if on else as_lane(0.0) for lane, on in zip(found, mask, strict=True)]
        )

    def store(self, values: Array) -> None:
        """Write all lanes."""
        self.store_lanes(values, np.ones(len(values), bool))

    def store_lanes(self, values: Array, mask: Array) -> None:
        """Write the lanes whose mask is true."""
        for i, (value, on) in enumerate(zip(values, mask, strict=True)):
            if on:
                self.stores[self.array, self.offset + 4 * i] = as_lane(value)


@dataclass(frozen=True, slots=True)
class Table:
    """An address in a constant table, whose bytes are `data`; IndexError for what lies outside."""

    data: npt.NDArray[np.uint8]
    offset: int = 0

    def advance(self, count: int) -> Table:
        """Return the pointer `count` bytes further."""
        return replace(self, offset=self.offset + count)

    def load(self, dtype: npt.DTypeLike, count: int) -> Array:
        """Return a copy of `count` elements."""
        end = self.offset + np.dtype(dtype).itemsize * count
        if self.offset < 0 or end > self.data.size:
            raise IndexError(f"bytes {self.offset} to {end} of a table of {self.data.size}")
        return self.data[self.offset : end].view(dtype).copy()

    def load_lanes(self, dtype: npt.DTypeLike, mask: Array) -> Array:
        """Return elements, 0 where the mask is false; only true lanes are touched."""
        out = np.zeros(mask.size, dtype)
        for lane in map(int, np.flatnonzero(mask)):
            out[lane] = self.advance(lane * out.itemsize).load(dtype, 1)[0]
        return out


# ---- intrinsics ----

POINTWISE = frozenset(
    "vadd vsub vmul vdiv vmin vmax vfma vfnma vabs vneg vsqrt vround vfloor vceil vtrunc".split()
)

REDUCTIONS = {"vreduce_add": "vadd", "vreduce_max": "vmax", "vreduce_min": "vmin"}


@cache
def op_tree(op: str) -> Expr:
    """Return the op column of an intrinsic as an expression over `_0`, `_1` ..."""
    count = op.count("{")
    return parse_low_expr(op.format(*(f"_{i}" for i in range(count + 4))))


def apply(row: Intrinsic, args: list[Any]) -> Any:
    """Return what an intrinsic gives on symbolic or concrete operands; Unliftable if unknown."""
    args = [np.ndarray.view(a, Lanes) if _is_vector(a) else a for a in args]
    if row.op and (row.meaning is None or any(_symbolic(a) for a in args)):
        return _value(op_tree(row.op), args, row.lanes)
    if row.meaning is None:
        raise Unliftable(f"`{row.name}` is not followed")
    return row.meaning(*args)


def _is_vector(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def _symbolic(value: Any) -> bool:
    return isinstance(value, SymbolicPointer | Lane) or _is_vector(value)


def _value(expr: Expr, given: list[Any], lanes: int) -> Any:
    """Return the value of an op column; `given` are the operands that its names count."""
    if isinstance(expr, Name):
        return given[int(expr.id[1:])]
    if isinstance(expr, Int):
        return expr.value
    if isinstance(expr, Index):
        base = _value(expr.base, given, lanes)
        at = _value(expr.indices[0], given, lanes)
        return base[at] if _is_vector(base) else base.load(np.float32, 1)[at]
    assert isinstance(expr, Call)
    args = [_value(a, given, lanes) for a in expr.args]
    if expr.name in POINTWISE:
        columns = zip(*args, strict=True)
        return vector_of([Lane(expr.name, tuple(map(as_lane, c))) for c in columns])
    if expr.name in REDUCTIONS:
        return reduce(lambda a, b: Lane(REDUCTIONS[expr.name], (a, b)), map(as_lane, args[0]))
    if expr.name in _MOVES:
        return _MOVES[expr.name](lanes, *args)
    raise Unliftable(f"{expr.name} mixes lanes")


_MOVES: Mapping[str, Callable[..., Any]] = {
    "vload": lambda lanes, at: at.load(np.float32, lanes),
    "vstore": lambda lanes, at, values: at.store(values),
    "vbroadcast": lambda lanes, value: vector_of([as_lane(value)] * lanes),
    "vzero": lambda lanes: vector_of([as_lane(0.0)] * lanes),
    "prefetch": lambda lanes, at: None,
}


def shifted(lane: Lane, moving: Mapping[str, int]) -> Lane:
    """Return the lane with loads of the arrays in `moving` that many bytes further."""
    if lane.op == "load":
        array, offset = lane.args
        return Lane("load", (array, offset + moving.get(array, 0)))
    if not lane.parts:
        return lane
    return Lane(lane.op, tuple(shifted(a, moving) for a in lane.args))


def canonical(lane: Lane) -> Lane:
    """Return a form that is equal for sums and products in any order, fused or not."""
    if not lane.parts:
        return lane
    if lane.op == "vfma":
        a, b, c = lane.args
        return canonical(Lane("vadd", (Lane("vmul", (a, b)), c)))
    args = [canonical(a) for a in lane.args]
    if lane.op in ("vmul", "vadd"):
        args.sort(key=repr)
    return Lane(lane.op, tuple(args))


def loads_of(lane: Lane) -> set[tuple[Any, ...]]:
    """Return the (array, byte offset) pairs that a lane reads."""
    return {part.args for part in lane.walk() if part.op == "load"}


# ---- where the addresses of a run go ----

FAR = 1 << 12
"""An index far from 0, to see which addresses follow the counter."""


def steps_of(env: Mapping[str, Any], pointers: Iterable[str]) -> dict[str, int]:
    """Return by how many bytes those pointers moved that did in a run; `env` is its end."""
    ends = {name: env[name] for name in pointers}
    if not all(isinstance(end, SymbolicPointer) for end in ends.values()):
        raise Unliftable("a pointer's name is used for something else")
    return {name: end.offset for name, end in ends.items() if end.offset}


def moved_arrays(pairs: Iterable[tuple[Lane, Lane]]) -> frozenset[str]:
    """Return the arrays whose loads all lie further away in the second lane of each pair.

    Everything else must be the same in both, and no array may be read both ways.
    """
    moved: set[str] = set()
    fixed: set[str] = set()
    for near, far in pairs:
        _compare(near, far, moved, fixed)
    if moved & fixed:
        raise Unliftable("an array is read at the index and at a fixed place")
    return frozenset(moved)


def _compare(near: Lane, far: Lane, moved: set[str], fixed: set[str]) -> None:
    if near == far:
        fixed |= {array for array, _ in loads_of(near)}
    elif near.op == far.op == "load" and near.args[0] == far.args[0]:
        if far.args[1] - near.args[1] != 4 * FAR:
            raise Unliftable("an address does not follow the index by one element")
        moved.add(near.args[0])
    elif near.op != far.op or not near.parts:
        raise Unliftable("an address does not follow the index by one element")
    else:
        for a, b in zip(near.args, far.args, strict=True):
            _compare(a, b, moved, fixed)
