"""Fits the cost model to what was timed: on this machine, or on others of the same target.

In: tuning records. Out: a CostModel whose correction scikit-learn has learnt from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from dovetail.codegen.isa.target import Target
from dovetail.compiler.measure.meter import Candidate
from dovetail.compiler.rules.schedules import MOST_ROWS, GemmOp
from dovetail.compiler.search.cost_model import CostModel, describe_program, estimate_work
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.space import Program
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.formats import FORMATS
from dovetail.ir.tuning import OK, HardwareKey, RecordKey, TuningRecord
from dovetail.topology.values import CacheSpec, HardwareSpec, PuSpec

LEAST_SAMPLES = 64
"""Fewer timed programs than this fit nothing."""
MOST_SAMPLES = 3000
"""More take longer to learn from than they are worth."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A timed program."""

    task: SearchTask
    m: int
    program: Program
    seconds: float


def can_fit() -> bool:
    """Return whether scikit-learn (extra `tune`) is installed."""
    return find_spec("sklearn") is not None


def fit_cost_model(samples: Sequence[Sample]) -> CostModel:
    """Return a model corrected by timed programs.

    The analytic one where they are too few, or where scikit-learn is not installed.
    """
    if len(samples) < LEAST_SAMPLES or not can_fit():
        return CostModel()
    from sklearn.ensemble import GradientBoostingRegressor  # noqa: PLC0415  (a second to import)

    samples = samples[:: -(-len(samples) // MOST_SAMPLES)]
    features = np.array([describe_program(s.task, s.m, s.program) for s in samples])
    ratios = [s.seconds / estimate_work(s.task, s.m, s.program).seconds for s in samples]
    model = GradientBoostingRegressor(n_estimators=120, max_depth=4, random_state=0)
    return CostModel(model.fit(features, np.log(ratios)).predict, len(samples))


def read_samples(records: Iterable[TuningRecord], target: Target) -> list[Sample]:
    """Return the programs of `target` in records that were right, as slow as on a calm machine."""
    good = [
        record
        for record in records
        if record.status == OK
        and record.target == target.name
        and record.kind in MOST_ROWS
        and record.dtype in FORMATS
        and record.threads > 0
        and all(record.shape.get(side, 0) > 0 for side in "nkm")
    ]
    return list(_samples(good, target))


def _samples(records: Sequence[TuningRecord], target: Target) -> Iterator[Sample]:
    best: dict[RecordKey | None, float] = {}
    for record in records:
        if record.reference is not None and record.reference.seconds:
            key, seconds = record.reference_key, record.reference.seconds
            best[key] = min(best.get(key, seconds), seconds)
    for record in records:
        task = _task(record, target)
        program = task.problem(record.shape["m"]).program(Candidate(record.kernel, record.schedule))
        if program is None:
            continue
        beside, seconds = record.reference, record.low
        if beside is not None and beside.seconds:
            seconds *= best[record.reference_key] / beside.seconds
        yield Sample(task, record.shape["m"], program, seconds)


def _task(record: TuningRecord, target: Target) -> SearchTask:
    shape, threads = record.shape, record.threads
    return SearchTask(
        op=GemmOp("", record.kind, shape["n"], shape["k"], record.dtype),
        target=target,
        phase=PhasePlan(threads=threads, cpus=()),
        hardware=_machine(record.hardware),
        points=(shape["m"],),
    )


def _machine(key: HardwareKey) -> HardwareSpec:
    """Return as much of a machine as the cost model sees."""
    return HardwareSpec(
        source="tuning record",
        arch=key.arch,
        cpu_vendor="",
        cpu_model=key.cpu,
        isa_flags=key.isa,
        pus=(PuSpec(id=0, core=0, socket=0, node=0),),
        allowed_pus=(0,),
        caches=tuple(
            CacheSpec(level=level, kind="data", bytes=size, line_bytes=64, pus=(0,))
            for level, size in enumerate(key.caches, 1)
        ),
        nodes=(),
        memory_bytes=0,
    )
