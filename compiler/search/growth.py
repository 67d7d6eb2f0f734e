"""How a computation slice grows: fast start, then finetune (Sandwich §3.2, §6). Pure.

Both are generators: they yield the slices they want timed, are sent their seconds, and return the
best slice. Whoever drives them may time the slices of many micro-kernels in turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dovetail.compiler.search.space import Slice

GAIN = 0.01
"""A larger slice must be faster by this share, or the dimension is rolled back."""
DIMENSIONS = ("n", "m", "k")

Growth = Generator[Sequence[Slice], Sequence[float], Slice]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Room:
    """What a slice may grow by and to: the unit of each side, its largest size, its whole extent.

    most: beyond it a side would leave fewer slices than threads, and with them no choice of a
    scheme: half of each side for two threads, as in Sandwich §6.
    """

    unit: Slice
    most: Slice
    whole: Slice


def room_for(unit: Slice, whole: Slice, threads: int) -> Room:
    """Return the room that slices of a product have; limits are whole units."""

    def most(size: int, step: int) -> int:
        return max(size // threads // step, 1) * step

    limit = Slice(most(whole.m, unit.m), most(whole.n, unit.n), most(whole.k, unit.k))
    return Room(unit, limit, whole)


def fast_start(start: Slice, room: Room) -> Growth:
    """Grow each side of `start` by 2^t units, t counting its growths; roll back what does not pay.

    Like TCP's slow start: the first, simple decisions are taken in large steps.
    """
    best, steps = start, dict.fromkeys(DIMENSIONS, 0)
    (cost,) = yield (best,)
    while steps:
        for side in tuple(steps):
            size: int = getattr(best, side)
            limit: int = getattr(room.most, side)
            grown = min(size + (getattr(room.unit, side) << steps[side]), limit)
            if size == 0 or grown <= size:
                del steps[side]
                continue
            larger = replace(best, **{side: grown})
            (seconds,) = yield (larger,)
            if seconds < (1 - GAIN) * cost:
                best, cost, steps[side] = larger, seconds, steps[side] + 1
            else:
                del steps[side]
    return best


def finetune(start: Slice, room: Room) -> Growth:
    """Move `start` by single units along the side that pays most, until none does.

    A side may also take the whole extent at once: no unit at a time would get there.
    """
    best = start
    (cost,) = yield (best,)
    while options := _neighbours(best, room):
        seconds = yield options
        least = min(seconds)
        if not least < (1 - GAIN) * cost:
            break
        best, cost = options[seconds.index(least)], least
    return best


def _neighbours(part: Slice, room: Room) -> tuple[Slice, ...]:
    found: dict[Slice, None] = {}
    for side in DIMENSIONS:
        size, unit, whole = (getattr(s, side) for s in (part, room.unit, room.whole))
        if not whole:
            continue
        sizes = (size + unit, size - unit, 0) if size else ((whole - 1) // unit * unit,)
        for other in sizes:
            if other == 0 or unit <= other < whole:
                found[replace(part, **{side: other})] = None
    return tuple(found)


def drive(
    growths: Mapping[Key, Growth],
    cost: Callable[[Sequence[tuple[Key, Slice]]], Sequence[float]],
) -> dict[Key, Slice]:
    """Run growths side by side, the slices of each step timed together; return their results."""
    running = {key: (growth, tuple(next(growth))) for key, growth in growths.items()}
    done: dict[Key, Slice] = {}
    while running:
        asked = [(key, part) for key, (_, parts) in running.items() for part in parts]
        seconds = iter(cost(asked))
        for key, (growth, parts) in tuple(running.items()):
            answer = [next(seconds) for _ in parts]
            try:
                running[key] = (growth, tuple(growth.send(answer)))
            except StopIteration as end:
                done[key] = end.value
                del running[key]
    return done


def distance(part: Slice, average: Slice) -> float:
    """Return how far a slice is from another: the largest share by which a side differs."""
    ratios = [1.0]
    for side in DIMENSIONS:
        sizes = sorted((getattr(part, side), getattr(average, side)))
        if sizes[1]:
            ratios.append(sizes[1] / sizes[0] if sizes[0] else math.inf)
    return max(ratios) - 1
