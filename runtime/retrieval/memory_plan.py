"""One plan of a device's memory: KV cache or hot clusters (HedraRAG §4.4, equation (2)).

In: measured throughput of generation by bytes of KV, of retrieval by bytes of clusters, each at
several rates; what a workflow asks of both. Out: a frozen `GpuMemoryPlan`. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dovetail.ir.errors import SpecError

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """With so many bytes, and so many stages arriving each second, so many were done each second.

    origin: measured, simulated or assumed.
    """

    bytes: int
    rate: float
    done: float
    origin: str = "measured"


class ThroughputTable:
    """Throughput as measured: between rows interpolated in bytes and rate, outside held."""

    def __init__(self, rows: Iterable[ThroughputRow]) -> None:
        """Raises SpecError unless there is a row for every pair of its bytes and rates."""
        self.rows = tuple(rows)
        self.sizes = sorted({row.bytes for row in self.rows})
        self.rates = sorted({row.rate for row in self.rows})
        self._done = {(row.bytes, row.rate): row.done for row in self.rows}
        whole = len(self._done) == len(self.rows) == len(self.sizes) * len(self.rates)
        if not self.rows or not whole:
            raise SpecError("a table of throughput needs one row for each of its bytes and rates")
        if any(row.bytes < 0 or row.rate <= 0 or row.done < 0 for row in self.rows):
            raise SpecError("bytes and throughput cannot be negative, and rates are positive")

    def done(self, nbytes: float, rate: float) -> float:
        """Return the stages done each second with so many bytes, when `rate` arrive."""
        (low, high, part), (slow, fast, share) = (
            _around(self.sizes, nbytes),
            _around(self.rates, rate),
        )
        at = self._done
        few = at[low, slow] + share * (at[low, fast] - at[low, slow])
        many = at[high, slow] + share * (at[high, fast] - at[high, slow])
        return few + part * (many - few)


@dataclass(frozen=True, slots=True)
class Demand:
    """Stages of each kind in one workflow of the mix, on average."""

    generations: float
    retrievals: float


@dataclass(frozen=True, slots=True)
class GpuMemoryPlan:
    """How memory is divided. workflows: done each second by the slower of the two sides."""

    kv_bytes: int
    cluster_bytes: int
    workflows: float
    generation: float
    retrieval: float

    @property
    def limited_by(self) -> str:
        """The side that limits the rate."""
        return "generation" if self.generation <= self.retrieval else "retrieval"


def plan_gpu_memory(
    budget: int,
    generation: ThroughputTable,
    retrieval: ThroughputTable,
    demand: Demand,
    rate: float,
    *,
    least_kv: int = 0,
    most_clusters: int | None = None,
    step: int = 1 << 20,
) -> GpuMemoryPlan:
    """Return argmax over the KV cache's size of min(T_G(KV, rps_G), T_R(rps_R)), equation (2).

    The paper's T_R is that of the CPU alone, so that any KV size with T_G >= T_R is as good. Here
    T_R grows with the clusters that get the rest of `budget`, and both sides are counted in
    workflows per second, as stages of both kinds are not equally many. Among equal ones the
    largest KV cache is taken.

    Args:
        budget: bytes for both, after the weights.
        generation: generations done, by bytes of KV.
        retrieval: searches done, by bytes of clusters on the device.
        demand: stages of a workflow.
        rate: workflows that arrive each second.
        least_kv: bytes of KV that there must be: those of the longest request.
        most_clusters: bytes of the whole index; more is of no use.
        step: bytes between the sizes that are tried beside those of the tables.

    Raises:
        SpecError: the budget cannot hold `least_kv`, or a number makes no sense.
    """
    if not 0 <= least_kv <= budget or step < 1 or rate <= 0:
        raise SpecError(
            f"{budget} bytes cannot hold a KV cache of {least_kv}; take a smaller model or context"
        )
    if demand.generations < 0 or demand.retrievals < 0:
        raise SpecError("a workflow cannot have fewer than no stages")
    least = max(least_kv, budget - (budget if most_clusters is None else most_clusters))
    step = max(step, (budget - least) // 4096 + 1)
    tried = {least, budget, *range(least, budget, step), *generation.sizes}
    tried |= {budget - size for size in retrieval.sizes}

    def judge(kv: int) -> GpuMemoryPlan:
        sides = (
            _workflows(generation, kv, demand.generations, rate),
            _workflows(retrieval, budget - kv, demand.retrievals, rate),
        )
        return GpuMemoryPlan(kv, budget - kv, min(sides), *sides)

    plans = map(judge, (kv for kv in tried if least <= kv <= budget))
    return max(plans, key=lambda plan: (plan.workflows, plan.kv_bytes))


def _workflows(table: ThroughputTable, nbytes: int, stages: float, rate: float) -> float:
    """Return the workflows each second that one side can do; without stages all that arrive."""
    return table.done(nbytes, stages * rate) / stages if stages else rate


def _around(points: Sequence[N], value: float) -> tuple[N, N, float]:
    """Return the points below and above a value, and how far it lies between them."""
    at = bisect_right(points, value)
    if at in (0, len(points)):
        edge = points[min(at, len(points) - 1)]
        return edge, edge, 0.0
    low, high = points[at - 1], points[at]
    return low, high, (value - low) / (high - low)
