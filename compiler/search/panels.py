"""Which panel counts the micro-kernels of a weight keep, for its whole range of M.

A packed weight has panels of 16 columns whatever is chosen here: one copy serves every M and both
phases. Chosen is how many panels a micro-kernel takes at once (NP of gemm.dk); each count is a
kernel of its own in the artifact, so that few of them must serve all M well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations

from dovetail.compiler.search.policy import Choice

MOST_MORE = 2
"""Kernels beside those of the default schedules, which an artifact has anyway."""
WORTH = 0.01
"""Share of the workload's time that one more kernel must save."""
UNSEEN = 1e-3
"""Weight of an M that the workload never meets beside those that it does."""


def choose_panels(
    choices: Mapping[int, Choice],
    sizes: Mapping[int, float],
    defaults: Iterable[int],
    most: int = MOST_MORE,
) -> frozenset[int]:
    """Return the panel counts that take least time over the workload; `defaults` are among them.

    `sizes`: M -> share of its steps. M without timed programs do not count.
    """
    weights, free = _weights(choices, sizes), frozenset(defaults)
    timed = {m: choice.by_panels for m, choice in choices.items() if choice.by_panels}
    more = sorted({panels for by_panels in timed.values() for panels in by_panels} - free)

    def total(kept: frozenset[int]) -> float:
        return sum(weights[m] * _least(by_panels, kept) for m, by_panels in timed.items())

    best = free
    for size in range(1, min(most, len(more)) + 1):
        found = min((free.union(some) for some in combinations(more, size)), key=total)
        if not best or total(found) < (1 - WORTH) * total(best):
            best = found
    return best


def keep_panels(choices: Mapping[int, Choice], kept: frozenset[int]) -> dict[int, Choice]:
    """Return `choices` with the best program of the kept panel counts at each M."""
    return {m: _kept(choice, kept) for m, choice in choices.items()}


def _kept(choice: Choice, kept: frozenset[int]) -> Choice:
    options = [pair for panels, pair in choice.by_panels.items() if panels in kept]
    if not options or choice.program.tile.panels in kept:
        return choice
    program, seconds = min(options, key=lambda pair: pair[1])
    return replace(choice, program=program, seconds=seconds)


def _least(by_panels: Mapping[int, tuple[object, float]], kept: frozenset[int]) -> float:
    """Return the seconds of the best kept kernel; one that may not serve is twice the worst."""
    worst = 2 * max(seconds for _, seconds in by_panels.values())
    return min((by_panels[p][1] if p in by_panels else worst) for p in kept)


def _weights(choices: Mapping[int, Choice], sizes: Mapping[int, float]) -> dict[int, float]:
    """Return the share of steps that each searched M serves: its own and those below it."""
    points = sorted(choices)
    weights = dict.fromkeys(points, UNSEEN)
    for m, share in sizes.items():
        serving = next((point for point in points if point >= m), points[-1])
        weights[serving] += share
    return weights
