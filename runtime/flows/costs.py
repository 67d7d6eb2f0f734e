"""What the control plane of workflows is told of costs to begin with: measured, once.

In: an index that the worker has open, an engine. Out: `StageCosts`. Later figures it learns itself.
"""

from __future__ import annotations

import time
from statistics import median

from dovetail.ir.errors import DovetailError
from dovetail.runtime.flows.control.costs import StepCost
from dovetail.runtime.hosting.generator import Generator
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import Opened, ScanParts

ROUNDS = 3
MOST_CLUSTERS = 64
STEPS, SEQUENCES = 4, 4
PROMPT = "Documents about many things. " * 8
FIRST = -100
"""Priority of the few steps that are measured: a workflow waits for them."""
UNKNOWN_SCAN = ScanCost(fixed=1e-4, per_vector=1e-7)
"""Before there is an index: nothing is scanned by it."""
UNKNOWN_STEP = StepCost(fixed=1e-2)
"""Of an engine that has no room to be asked."""


def measure_scan(
    worker: RetrievalProcess, name: str, opened: Opened, threads: int
) -> tuple[ScanCost, float]:
    """Return what scans of an index cost, and what a sub-stage takes beyond its scan (beta).

    It scans one cluster and up to MOST_CLUSTERS ones for one query, in turns.
    """
    sizes, vector = opened.sizes, bytes(4 * opened.dim)
    few, many = 1, min(len(sizes), MOST_CLUSTERS)
    rounds = [[_scan(worker, name, vector, n) for n in (few, many)] for _ in range(ROUNDS)]
    one, all_ = (min(seconds for seconds, _ in times) for times in zip(*rounds, strict=True))
    overhead = median(elapsed - seconds for times in rounds for seconds, elapsed in times)
    cost = ScanCost.of((one, sum(sizes[:few])), (all_, sum(sizes[:many])), threads)
    return cost, overhead


def _scan(worker: RetrievalProcess, name: str, vector: bytes, clusters: int) -> tuple[float, float]:
    """Return the seconds of a scan, and those until its reply came."""
    part = Part(vector, tuple(range(clusters)), (0.0,) * clusters, 1)
    start = time.perf_counter()
    reply = worker.ask(ScanParts(name, (part,))).result()
    return reply.seconds, time.perf_counter() - start


def measure_step(generator: Generator) -> StepCost:
    """Return what a decode step costs, from a few tokens of one sequence, then of several.

    And what a character of a prompt adds, from the first token after a long one.
    """
    try:
        one, several = (_time_step(generator, count) for count in (1, SEQUENCES))
        prompt = _time_prompt(generator) - one
    except DovetailError:
        return UNKNOWN_STEP
    each = max(0.0, several - one) / (SEQUENCES - 1)
    prefill = max(0.0, prompt) / len(PROMPT)
    return StepCost(fixed=max(0.0, one - each), per_sequence=each, prefill=prefill)


def _time_prompt(generator: Generator) -> float:
    """Return the seconds until the first token after PROMPT."""
    (job,) = generator.accept(generator.read([PROMPT], {"max_tokens": 1}, FIRST))
    return job.result().metrics.ttft or 0.0


def _time_step(generator: Generator, sequences: int) -> float:
    options = {"max_tokens": STEPS, "ignore_eos": True, "n": sequences, "temperature": 1.0}
    jobs = generator.accept(generator.read([[0]], options, FIRST))
    metrics = [job.result().metrics for job in jobs]
    first = max(found.first_token or 0.0 for found in metrics)
    return (min(found.last_token or 0.0 for found in metrics) - first) / (STEPS - 1)
