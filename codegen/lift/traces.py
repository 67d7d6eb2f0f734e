"""Where the addresses of a run go: which pointers moved, and which loads follow an index."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.codegen.lift.execute import Executor
from dovetail.codegen.lift.symbolic import Lane, SymbolicPointer, loads_of
from dovetail.codegen.lift.types import Unliftable

FAR = 1 << 12
"""An index far from 0, to see which addresses follow the counter."""


def steps_of(executor: Executor, pointers: Iterable[str]) -> dict[str, int]:
    """Return how many bytes each pointer moved in a run."""
    ends = {name: executor.env[name] for name in pointers}
    if not all(isinstance(end, SymbolicPointer) for end in ends.values()):
        raise Unliftable("a pointer's name is used for something else")
    return {name: end.offset for name, end in ends.items()}


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
    elif near.op != far.op or near.op in ("load", "scalar", "const", "acc"):
        raise Unliftable("an address does not follow the index by one element")
    else:
        for a, b in zip(near.args, far.args, strict=True):
            _compare(a, b, moved, fixed)
