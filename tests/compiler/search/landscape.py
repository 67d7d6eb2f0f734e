"""A made-up machine: seconds of a program by a formula, on a clock that only measuring moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.measure.meter import Candidate, GemmCase, Measurement, summarize
from dovetail.compiler.rules.schedules import LINEAR, GemmOp
from dovetail.compiler.search.policy import SearchTask
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.schedule import SCHEDULE_VALUES
from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import CacheSpec

TARGET = TARGETS["x86-64-avx512"]
CACHES = tuple(
    CacheSpec(level=level, kind="unified", bytes=kib << 10, line_bytes=64, pus=(0,))
    for level, kib in enumerate((32, 1024, 32768), 1)
)
HARDWARE = replace(read_hardware(), allowed_pus=(0,), caches=CACHES)
"""The rules' slices follow the caches, which differ from host to host."""
OVERHEAD = 1e-3
"""Seconds that asking for one candidate costs beside its runs."""

Values = dict[str, int]
Cost = Callable[[GemmCase, int, Values], float]


def task(n: int = 512, k: int = 1024, threads: int = 2, **rest) -> SearchTask:
    phase = PhasePlan(threads=threads, cpus=())
    op = GemmOp("x", rest.pop("kind", LINEAR), n, k, "f32")
    rest = {"points": (1, 8, 64), **rest}
    return SearchTask(op, TARGET, phase, HARDWARE, **rest)


def panels_of(candidate: Candidate) -> int:
    return int(candidate.kernel.rsplit("x", 1)[1])


def bowl(case: GemmCase, panels: int, values: Values) -> float:
    """One smooth valley: a tile of 14 x 2, K in slices of 256, rows in slices of 3 tiles."""
    height = math.ceil(case.m / math.ceil(case.m / values["m_tile"]))
    best = min(14, case.m)
    seconds = 1 + 0.05 * abs(height - best) + 0.2 * abs(panels - 2)
    threads = values["grid_m"] * values["grid_n"] * values["grid_k"]
    seconds *= 1 + 2 * (case.threads / threads - 1)
    seconds += 0.3 * abs(math.log2((values["block_k"] or case.k) / 256))
    seconds += 0.1 * (values["grid_m"] - 1) + 0.4 * (values["grid_k"] - 1)
    return 1e-4 * case.m * seconds


def quiet(case: GemmCase, candidate: Candidate, turn: int) -> float:
    """No noise."""
    return 1.0


@dataclass
class Landscape:
    """A Measurer over `cost`; `asked` has every (case, candidate) that was timed.

    noise: what the time of a turn is multiplied by.
    """

    cost: Cost = bowl
    bad: Callable[[Candidate], str | None] = lambda candidate: None
    noise: Callable[[GemmCase, Candidate, int], float] = quiet
    asked: list[tuple[GemmCase, Candidate]] = field(default_factory=list)
    clock: float = 0.0

    def seconds(self, case: GemmCase, candidate: Candidate) -> float:
        values = dict(zip(SCHEDULE_VALUES, candidate.schedule, strict=True))
        return self.cost(case, panels_of(candidate), values)

    def measure(
        self, case: GemmCase, candidates: Sequence[Candidate], *, rounds: int, seconds: float
    ) -> tuple[Measurement, ...]:
        times: list[list[float]] = []
        for candidate in candidates:
            self.asked.append((case, candidate))
            time = self.seconds(case, candidate)
            self.clock += OVERHEAD + rounds * time
            turns = range(0 if self.bad(candidate) else rounds)
            times.append([time * self.noise(case, candidate, turn) for turn in turns])
        return tuple(
            summarize(candidate, mine, times[0])
            if mine
            else Measurement(candidate=candidate, status=self.bad(candidate))
            for candidate, mine in zip(candidates, times, strict=True)
        )

    def now(self) -> float:
        return self.clock
