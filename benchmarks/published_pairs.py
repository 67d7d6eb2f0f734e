"""The published pairs of accelerator and CPU (WindVE §V): their lines, and what they came to.

In: a pair, an SLO, a query length, a number of cores. Out: depths by the product's own estimator,
beside the published ones. Betas are published, alphas are solved from the published depths and
ratios; how lines depend on length and cores is assumed, and said so.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.ir.errors import CapacityError, SpecError
from dovetail.runtime.embed.depths import Depths, decide_depths, make_manager
from dovetail.runtime.embed.device_queue import EmbedQuery, QueryBatch, batch_seconds
from dovetail.runtime.embed.line import FittedLine, Line, Point, fit_line
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.sim.capacity import CPU, NPU, cost_saving, pair_plan

LENGTH = 75
"""Tokens of a query in the paper's experiments."""
LENGTH_POWER = 1.1
"""alpha grows as length to this power: what the published depths at 500 tokens need."""
SLOS = (1.0, 2.0)
LENGTHS = (50, 75, 100, 150, 200, 300, 400, 500)
CORES = (12, 24, 32, 36, 40, 44, 48)
PROFILED = (1, 4, 8, 16)
"""Concurrencies at which the lines are sampled for the estimator."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two devices; published depths at 1 s and 2 s: (accelerator, CPU) by each method.

    bge, jina: Table I and II, fine-tuned; regression: Table III, "linear regression".
    """

    name: str
    accelerator: str
    cpu: str
    betas: tuple[float, float]
    ratio: float
    cores: int
    regression: tuple[tuple[int, int], tuple[int, int]]
    bge: tuple[tuple[int, int], tuple[int, int]]
    jina: tuple[tuple[int, int], tuple[int, int]]

    @property
    def alpha(self) -> float:
        """The accelerator's alpha: depth C means alpha * C + beta <= T < alpha * (C + 1) + beta."""
        return statistics.mean(
            (slo - self.betas[0]) / (depths[0] + 0.5)
            for slo, depths in zip(SLOS, self.regression, strict=True)
        )

    def lines(self, length: int = LENGTH, cores: int | None = None) -> dict[str, Line]:
        """Return the lines of both devices for a query length and a number of CPU cores."""
        longer = (length / LENGTH) ** LENGTH_POWER
        fewer = self.cores / (cores or self.cores)
        alpha = self.alpha * longer
        return {
            NPU: Line(alpha, self.betas[0]),
            CPU: Line(alpha / self.ratio * fewer, self.betas[1] * fewer),
        }


PAIRS = {
    pair.name: pair
    for pair in (
        Pair(
            name="v100",
            accelerator="Tesla V100",
            cpu="2 x Xeon E5-2690",
            betas=(0.27, 0.32),
            ratio=0.21,
            cores=48,
            regression=((40, 8), (96, 20)),
            bge=((44, 8), (96, 22)),
            jina=((48, 11), (112, 30)),
        ),
        Pair(
            name="atlas",
            accelerator="Atlas 300I DUO",
            cpu="2 x Kunpeng 920",
            betas=(0.24, 0.85),
            ratio=0.12,
            cores=128,
            regression=((84, 2), (195, 15)),
            bge=((84, 1), (172, 8)),
            jina=((128, 6), (256, 20)),
        ),
    )
}


def find_pair(name: str) -> Pair:
    """Return a published pair by name; SpecError where there is none."""
    if name not in PAIRS:
        raise SpecError(f"unknown pair {name!r}; choose one of {', '.join(PAIRS)}")
    return PAIRS[name]


def pair_depths(pair: Pair, slo: float, length: int = LENGTH, cores: int | None = None) -> Depths:
    """Return closed depths as the product's estimator finds them from a few points of the lines."""
    fitted: dict[str, dict[int, FittedLine]] = {}
    for name, line in pair.lines(length, cores).items():
        points = [Point(each, line.seconds(each)) for each in PROFILED]
        fitted[name] = {length: fit_line(points)}
    return decide_depths(pair_plan(), fitted, slo, "closed")


@dataclass(frozen=True, slots=True)
class PairRow:
    """One cell of the published figures: depths, the gain, the cost saved, and whether they hold.

    gain: C_cpu / C_npu. slowest: seconds of the slowest query when npu + cpu queries come together
    in the simulated service, all of which it must accept.
    """

    pair: str
    slo: float
    length: int
    cores: int
    npu: int
    cpu: int
    gain: float
    saving: float
    slowest: float
    busy: int


def pair_row(pair: Pair, slo: float, length: int = LENGTH, cores: int | None = None) -> PairRow:
    """Return the depths of a pair and what serving as many queries at once comes to."""
    depths = pair_depths(pair, slo, length, cores)
    npu, cpu = (depths.devices[name][0].depth for name in (NPU, CPU))
    truth = {name: (line,) for name, line in pair.lines(length, cores).items()}
    queries = [EmbedQuery(number, length, slo, "") for number in range(npu + cpu)]
    slowest, busy = serve_burst(make_manager(pair_plan(), depths), truth, queries)
    return PairRow(
        pair=pair.name,
        slo=slo,
        length=length,
        cores=cores or pair.cores,
        npu=npu,
        cpu=cpu,
        gain=cpu / npu if npu else 0.0,
        saving=cost_saving(npu, cpu),
        slowest=slowest,
        busy=busy,
    )


def serve_burst(
    manager: QueueManager, truth: Mapping[str, Sequence[Line]], queries: Sequence[EmbedQuery]
) -> tuple[float, int]:
    """Return when the last of queries that come together is done, and how many are BUSY.

    In virtual time: batches take what the true line of their device and class says.
    """
    try:
        manager.submit(queries, 0.0)
    except CapacityError:
        return 0.0, len(queries)
    now, order, ends = 0.0, itertools.count(), list[tuple[float, int, QueryBatch]]()
    while True:
        for name in manager.depths():
            while batch := manager.take(name, now):
                end = now + batch_seconds(truth[name], batch.counts)
                heapq.heappush(ends, (end, next(order), batch))
        if not ends:
            return now, 0
        now, _, batch = heapq.heappop(ends)
        manager.complete(batch)


def table_rows(pair: Pair) -> list[dict[str, object]]:
    """Return Table III's linear-regression row as reproduced, beside the published values."""
    rows: list[dict[str, object]] = []
    for at, slo in enumerate(SLOS):
        found = pair_row(pair, slo)
        for device, name, depth in ((0, pair.accelerator, found.npu), (1, pair.cpu, found.cpu)):
            rows.append(
                {
                    "device": name,
                    "slo": slo,
                    "reproduced": depth,
                    "linear_regression": pair.regression[at][device],
                    "off_by": depth - pair.regression[at][device],
                    "fine_tuned_bge": pair.bge[at][device],
                    "fine_tuned_jina": pair.jina[at][device],
                }
            )
    return rows


def length_rows(pair: Pair) -> list[PairRow]:
    """Return the curves of Fig. 5: depths over query length."""
    return [pair_row(pair, slo, length) for slo in SLOS for length in LENGTHS]


def core_rows(pair: Pair) -> list[PairRow]:
    """Return the curves of Fig. 6: depths over CPU cores."""
    return [
        pair_row(pair, slo, LENGTH, each) for slo in SLOS for each in CORES if each <= pair.cores
    ]
