"""Latency lines and depths by measuring: a few concurrencies, then a short stress test together.

In: functions that run so many queries at once and say how long they took. Out: `FittedLine`s; the
depths at which devices meet the SLO side by side (WindVE §IV-B2), and the trials behind them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.runtime.embedding.line import MAX_DEPTH, FittedLine, Line, Point, fit_line

Measure = Callable[[int], float]
"""Concurrency -> seconds until the last one of so many queries is done."""
Trial = Callable[[Mapping[str, int]], Mapping[str, float]]
"""Concurrency of each device -> seconds of each, all at work together."""
PART = 0.25
"""Part of the depth, and of the SLO, up to which a first line is measured, of each device alone."""
SHARES = (0.125, 0.5, 1.0)
"""Parts of the depth by the first line at which all devices are measured together, in turns."""
ROUNDS = 3
"""Turns: a stretch in which the machine is slow is then one of every concurrency, not of one."""
HORIZON = 2.0
"""Seconds of an SLO beyond which a line is measured no further: a straight one need not be."""
STEPS = 6
GROWTH = 8
"""Most that a concurrency is of the one before: small ones say little of the slope."""
REPEATS = 3
TRIALS = 16
NEAR = 0.25
"""Trials at concurrencies this far from the last, relative, say how fast the device is there."""
TOLERANCE = 0.0025
"""Distance between a depth that passes and one that fails, relative, at which a search ends."""


def profile_line(measure: Measure, slo: float) -> FittedLine:
    """Return the line of one device; see `profile_lines`."""
    return profile_lines(lambda counts: {"": measure(counts[""])}, [""], slo)[""]


def profile_lines(trial: Trial, names: Iterable[str], slo: float) -> dict[str, FittedLine]:
    """Fit the lines of devices to a few concurrencies up to their depths for `slo` seconds.

    Each alone first, up to a quarter of its depth, which says about where the depth is. What counts
    is measured then with all together, as they are when the CPU is needed, at concurrencies up to
    the depth. A device that misses the SLO with one query is measured no further.
    """
    alone = {name: _explore(trial, name, slo) for name in names}
    points: dict[str, list[Point]] = {name: [] for name in alone}
    for _ in range(ROUNDS):
        depths = {name: _depth([*alone[name], *points[name]], slo) for name in points}
        for share in SHARES if any(depths.values()) else ():
            counts = {name: max(1, round(share * depth)) for name, depth in depths.items() if depth}
            seconds = trial(counts)
            for name, count in counts.items():
                points[name].append(Point(count, seconds[name]))
    return {name: fit_line(points[name] or alone[name]) for name in points}


def _explore(trial: Trial, name: str, slo: float) -> list[Point]:
    """Return points of a device alone, up to where they tell its depth roughly."""
    trial({name: 1})  # to warm up
    points = [Point(1, trial({name: 1})[name]) for _ in range(REPEATS)]
    alone = _alone(points)
    if alone > slo:
        return points
    horizon = min(slo, max(HORIZON, alone))
    concurrency = max(2, min(GROWTH, round(PART * horizon / alone)))
    for _ in range(STEPS):
        points += [Point(concurrency, trial({name: concurrency})[name]) for _ in range(REPEATS)]
        following = min(GROWTH * concurrency, round(PART * _depth(points, slo)))
        if points[-1].seconds > PART * horizon or following <= 1.25 * concurrency:
            break
        concurrency = following
    return points


def _depth(points: Sequence[Point], slo: float) -> int:
    """Return the depth by the line of these points, for what of the SLO is measured."""
    alone = _alone(points)
    if alone > slo:
        return 0
    return max(1, fit_line(points).line.depth(min(slo, max(HORIZON, alone)), "closed"))


def _alone(points: Sequence[Point]) -> float:
    return statistics.median(point.seconds for point in points if point.concurrency == 1)


@dataclass(slots=True)
class _Search:
    """The largest concurrency of one device that passes, between bounds that close in."""

    line: Line
    candidate: int
    passes: int = 0
    fails: int = MAX_DEPTH + 1
    passed: float | None = None  # seconds at the bounds, where they were measured
    failed: float | None = None
    trials: int = 0

    @property
    def step(self) -> int:
        return max(1, math.floor(TOLERANCE * self.passes))

    @property
    def settled(self) -> bool:
        return self.fails - self.passes <= self.step

    def note(self, seconds: float, slo: float) -> None:
        """Take a measurement at the candidate, and choose the next one."""
        self.trials += 1
        if seconds <= slo:
            self.passes, self.passed = self.candidate, seconds
        else:
            self.fails, self.failed = self.candidate, seconds
        if self.settled:
            self.candidate = self.passes
            return
        most = max(self.fails - self.step, self.passes + 1)
        aim = self._aim(seconds, slo)
        self.candidate = min(max(aim, self.passes + self.step), most, MAX_DEPTH)

    def _aim(self, seconds: float, slo: float) -> int:
        """Return where the SLO is met: between the bounds once both are known, else by slope."""
        if self.passed is None or self.failed is None:
            slope = max(self.line.alpha, seconds / self.candidate / 4)
            return self.candidate + math.floor((slo - seconds) / slope)
        if self.trials % 3 == 0:  # whatever the shape between the bounds, they close in
            return (self.passes + self.fails) // 2
        slope = (self.failed - self.passed) / (self.fails - self.passes)
        return self.passes + math.floor((slo - self.passed) / slope)


@dataclass(frozen=True, slots=True)
class Stress:
    """What a stress test found: depths, and each trial's concurrencies and seconds of each run."""

    depths: dict[str, int]
    trials: tuple[tuple[dict[str, int], tuple[Mapping[str, float], ...]], ...] = ()

    def reach(self, name: str, line: Line, slo: float) -> int:
        """Return the depth for `slo` seconds by all runs near the last one.

        `depths` hang on the last trials alone. Where devices are compared that were tested in
        turns, this is their median over the same time, however fast the machine was when.
        """
        tried = [(counts[name], runs) for counts, runs in self.trials if name in counts]
        if not tried:
            return self.depths[name]
        last = tried[-1][0]
        near = [(count, runs) for count, runs in tried if abs(count - last) <= NEAR * last]
        paces = [run[name] / line.seconds(count) for count, runs in near for run in runs]
        return line.scaled(statistics.median(paces)).depth(slo, "closed")


def stress_depths(
    predicted: Mapping[str, int],
    lines: Mapping[str, Line],
    slo: float,
    trial: Trial,
    *,
    repeats: int = 1,
    trials: int = TRIALS,
) -> Stress:
    """Return the largest depths that meet `slo` while all devices work together.

    Starts at the predicted ones and follows the measured slope, so that a good prediction ends it
    soon. A device of predicted depth 0 stays out. Where `trials` end first, what passed counts.

    Args:
        predicted: depths by the lines.
        lines: of each device; only the slope is used.
        slo: seconds that the slowest query may take.
        trial: runs all devices together.
        repeats: runs of a trial, whose median counts.
        trials: most concurrencies that are tried.
    """
    searches = {name: _Search(lines[name], depth) for name, depth in predicted.items() if depth}
    seen: list[tuple[dict[str, int], tuple[Mapping[str, float], ...]]] = []
    for _ in range(trials):
        if not searches or all(search.settled for search in searches.values()):
            break
        counts = {name: search.candidate for name, search in searches.items() if search.candidate}
        runs = [trial(counts) for _ in range(repeats)]
        seconds = {name: statistics.median(run[name] for run in runs) for name in counts}
        seen.append((counts, tuple(runs)))
        for name in counts:
            if not searches[name].settled:
                searches[name].note(seconds[name], slo)
    depths = {name: searches[name].passes if name in searches else 0 for name in predicted}
    return Stress(depths, tuple(seen))
