"""One plan of a device's memory: KV cache or hot clusters (HedraRAG §4.4, equation (2)).

In: throughput of generation by bytes of KV, of retrieval by bytes of clusters; what a workflow asks
of both. Out: a frozen `GpuMemoryPlan`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.ir.errors import SpecError


@dataclass(frozen=True, slots=True)
class Throughput:
    """Stages done each second by bytes, which rise: interpolated between these, outside held."""

    bytes: tuple[int, ...]
    done: tuple[float, ...]

    def at(self, nbytes: int) -> float:
        """Return the stages done each second with so many bytes."""
        return float(np.interp(nbytes, self.bytes, self.done))


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
    retrieval: searches done, by bytes of clusters on the device. generations, retrievals: stages
    of a workflow on average. rate: workflows that arrive each second. least_kv: bytes of KV that
    there must be: those of the longest request. most_clusters: bytes of the whole index, None for
    any; more is of no use.
    """

    budget: int
    generation: Throughput
    retrieval: Throughput
    generations: float
    retrievals: float
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
        if self.generations < 0 or self.retrievals < 0:
            raise SpecError("the number of stages of a workflow cannot be negative")

    @property
    def least(self) -> int:
        """Bytes of the smallest KV cache that is worth a look."""
        most = self.budget if self.most_clusters is None else self.most_clusters
        return max(self.least_kv, self.budget - most)

    def judge(self, kv: int) -> GpuMemoryPlan:
        """Return what comes of a KV cache of so many bytes, the rest being for clusters."""
        clusters = self.budget - kv
        sides = (
            self.generation.at(kv) / self.generations if self.generations else self.rate,
            self.retrieval.at(clusters) / self.retrievals if self.retrievals else self.rate,
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
    tried = {least, budget, *range(least, budget, step), *problem.generation.bytes}
    tried |= {budget - size for size in problem.retrieval.bytes}
    plans = map(problem.judge, (kv for kv in tried if least <= kv <= budget))
    return max(plans, key=lambda plan: (plan.workflows, plan.kv_bytes))
