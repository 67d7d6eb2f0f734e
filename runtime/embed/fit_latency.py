"""Latency lines and depths by measuring: a few concurrencies, then a short stress test together.

In: what runs so many queries at once and says how long they took: a function, or the devices of an
idle service. Out: `FittedLine`s; the depths at which devices meet the SLO side by side (WindVE
§IV-B2), and the trials behind them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dovetail.runtime.embed.depths import Depths, decide_depths, fixed_manager, make_manager
from dovetail.runtime.embed.devices import EmbeddingPlan
from dovetail.runtime.embed.line import MAX_DEPTH, Arrival, FittedLine, Line, Point, fit_line
from dovetail.runtime.embed.service import EmbeddingService
from dovetail.runtime.native.encoder import Ids

Sample = Callable[[int, int], Sequence[Ids]]
"""(queries, tokens of each) -> that many queries of this length."""
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
TOLERANCE = 0.0025
"""Distance between a depth that passes and one that fails, relative, at which a search ends."""


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
    if (alone := _alone(points)) > slo:
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
    if (alone := _alone(points)) > slo:
        return 0
    return max(1, fit_line(points).line.depth(min(slo, max(HORIZON, alone)), "closed"))


def _alone(points: Sequence[Point]) -> float:
    return statistics.median(point.seconds for point in points if point.concurrency == 1)


@dataclass(slots=True)
class _DepthSearch:
    """The largest concurrency of one device that passes, between bounds that close in."""

    line: Line
    candidate: int
    passes: int = 0
    fails: int = MAX_DEPTH + 1
    passed: float | None = None  # seconds at the bounds, where they were measured
    failed: float | None = None
    trials: int = 0
    step: int = 1  # between the bounds at the end
    settled: bool = False

    def note(self, seconds: float, slo: float) -> None:
        """Take a measurement at the candidate, and choose the next one."""
        self.trials += 1
        if seconds <= slo:
            self.passes, self.passed = self.candidate, seconds
            self.step = max(1, math.floor(TOLERANCE * self.passes))
        else:
            self.fails, self.failed = self.candidate, seconds
        self.settled = self.fails - self.passes <= self.step
        if self.settled:
            self.candidate = self.passes
            return
        if self.passed is None or self.failed is None:  # by the slope
            slope = max(self.line.alpha, seconds / self.candidate / 4)
            aim = self.candidate + math.floor((slo - seconds) / slope)
        elif self.trials % 3 == 0:  # whatever the shape between the bounds, they close in
            aim = (self.passes + self.fails) // 2
        else:
            slope = (self.failed - self.passed) / (self.fails - self.passes)
            aim = self.passes + math.floor((slo - self.passed) / slope)
        most = max(self.fails - self.step, self.passes + 1)
        self.candidate = min(max(aim, self.passes + self.step), most, MAX_DEPTH)


@dataclass(frozen=True, slots=True)
class Stress:
    """What a stress test found: depths, and each trial's concurrencies and seconds of each run."""

    depths: dict[str, int]
    trials: tuple[tuple[dict[str, int], tuple[Mapping[str, float], ...]], ...] = ()


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
    soon. A device of predicted depth 0 stays out. The median of `repeats` runs of a trial counts;
    where `trials` end first, what passed.
    """
    searches = {
        name: _DepthSearch(lines[name], depth) for name, depth in predicted.items() if depth
    }
    seen: list[tuple[dict[str, int], tuple[Mapping[str, float], ...]]] = []
    for _ in range(trials):
        if all(search.settled for search in searches.values()):
            break
        counts = {name: search.candidate for name, search in searches.items() if search.candidate}
        runs = tuple(trial(counts) for _ in range(repeats))
        seen.append((counts, runs))
        for name in counts:
            if not searches[name].settled:
                searches[name].note(statistics.median(run[name] for run in runs), slo)
    depths = {name: searches[name].passes if name in searches else 0 for name in predicted}
    return Stress(depths, tuple(seen))


@dataclass
class Calibrator:
    """Measures the devices of an idle service by giving it queues of the sizes to be measured.

    What is measured is `model` of the service, by queries of `sample`.
    """

    service: EmbeddingService
    plan: EmbeddingPlan
    sample: Sample
    model: str = ""

    def run(self, counts: Mapping[str, int], length: int) -> dict[str, float]:
        """Return the seconds of each device's slowest query when these come all at once."""
        self.service.use(fixed_manager(self.plan, length, counts, self.model))
        queries = self.sample(sum(counts.values()), length)
        job = self.service.submit(queries, model=self.model)
        job.result()
        taken = dict.fromkeys(counts, 0.0)
        for query, seconds in zip(job.queries, job.seconds, strict=True):
            taken[query.device] = max(taken[query.device], float(seconds))
        return taken

    def profile(self, classes: Sequence[int], slo: float) -> dict[str, dict[int, FittedLine]]:
        """Return the line of each device, for queries of the greatest length of a class."""
        names = [device.name for device in self.plan.devices]
        found = {n: profile_lines(partial(self.run, length=n), names, slo) for n in classes}
        return {name: {n: lines[name] for n, lines in found.items()} for name in names}

    def size_queues(
        self, classes: Sequence[int], slo: float, arrival: Arrival = "open", *, stress: bool = True
    ) -> Depths:
        """Profile, decide, refine by a stress test, and give the service its queues.

        classes: the most tokens of each query-length class. Closed depths are what is tested; for
        open arrivals the tested part of the closed depth is taken of the predicted one.
        """
        fitted = self.profile(classes, slo)
        decide = partial(decide_depths, self.plan, fitted, slo, model=self.model)
        depths = decide(arrival=arrival)
        if stress:
            depths = decide(arrival=arrival, tested=self._test(depths, decide(arrival="closed")))
        self.service.use(make_manager(self.plan, depths))
        return depths

    def _test(self, depths: Depths, closed: Depths) -> dict[tuple[str, int], int]:
        """Return tested depths for `depths`, from a stress test of each class with closed ones."""
        tested = {}
        for classes in zip(*closed.devices.values(), strict=True):
            together, length = dict(zip(closed.devices, classes, strict=True)), classes[0].length
            found = stress_depths(
                {name: c.predicted for name, c in together.items()},
                {name: c.line for name, c in together.items()},
                closed.slo,
                partial(self.run, length=length),
            ).depths
            for name, c in together.items():
                (predicted,) = (d.predicted for d in depths.devices[name] if d.length == length)
                if c.predicted and predicted:
                    part = max(1, int(predicted * found[name] / c.predicted))
                    tested[name, length] = part if found[name] else 0
        return tested
