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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProblem:
    """What is to be divided, and what by.

    budget: bytes for both, after the weights. generation: generations done, by bytes of KV.
    retrieval: searches done, by bytes of clusters on the device. demand: stages of a workflow.
    rate: workflows that arrive each second. least_kv: bytes of KV that there must be: those of the
    longest request. most_clusters: bytes of the whole index, None for any; more is of no use.
    """

    budget: int
    generation: ThroughputTable
    retrieval: ThroughputTable
    demand: Demand
    rate: float
    least_kv: int = 0
    most_clusters: int | None = None

    def __post_init__(self) -> None:
        """Raises SpecError: the budget cannot hold `least_kv`, or a number makes no sense."""
        if not 0 <= self.least_kv <= self.budget or self.rate <= 0:
            raise SpecError(
                f"{self.budget} bytes cannot hold a KV cache of {self.least_kv}; take a smaller "
                "model or context"
            )
        if self.demand.generations < 0 or self.demand.retrievals < 0:
            raise SpecError("a workflow cannot have fewer than no stages")

    @property
    def least(self) -> int:
        """Bytes of the smallest KV cache that is worth a look."""
        most = self.budget if self.most_clusters is None else self.most_clusters
        return max(self.least_kv, self.budget - most)

    def judge(self, kv: int) -> GpuMemoryPlan:
        """Return what comes of a KV cache of so many bytes, the rest being for clusters."""
        clusters, demand = self.budget - kv, self.demand
        sides = (
            _workflows(self.generation, kv, demand.generations, self.rate),
            _workflows(self.retrieval, clusters, demand.retrievals, self.rate),
        )
        return GpuMemoryPlan(kv, clusters, min(sides), *sides)


def plan_gpu_memory(problem: MemoryProblem, step: int = 1 << 20) -> GpuMemoryPlan:
    """Return argmax over the KV cache's size of min(T_G(KV, rps_G), T_R(rps_R)), equation (2).

    The paper's T_R is that of the CPU alone, so that any KV size with T_G >= T_R is as good. Here
    T_R grows with the clusters that get the rest of the budget, and both sides are counted in
    workflows per second, as stages of both kinds are not equally many. Among equal ones the
    largest KV cache is taken. Sizes `step` bytes apart are tried beside those of the tables.
    """
    least, budget = problem.least, problem.budget
    step = max(step, (budget - least) // 4096 + 1)
    tried = {least, budget, *range(least, budget, step), *problem.generation.sizes}
    tried |= {budget - size for size in problem.retrieval.sizes}
    plans = map(problem.judge, (kv for kv in tried if least <= kv <= budget))
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
