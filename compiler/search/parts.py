"""What is searched for a model on one target, in parts that measure with the same kernel library.

In: a model's products, plans, machine and an effort. Out: searches, and the libraries that have
their candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, index_library
from dovetail.compiler.measure.recorder import Identity
from dovetail.compiler.rules.payload import Payload
from dovetail.compiler.rules.tables import plan_teams
from dovetail.compiler.search.attention_search import attention_library, attention_tasks
from dovetail.compiler.search.gate_search import gate_library, gate_tasks
from dovetail.compiler.search.instances import InstanceTask
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.tables import Effort, search_tasks, task_key, tuning_library
from dovetail.compiler.search.user_kernels import UserKernel, model_cases, user_library, user_tasks
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.encoder import Spec
from dovetail.ir.model import ModelSpec
from dovetail.ir.tuning import TuningRecord, WorkKey
from dovetail.runtime.native.shard import shard_spec, split_model
from dovetail.topology.hardware import HardwareSpec

Item = SearchTask | InstanceTask
"""What is searched as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchScope:
    """A model on one target of one machine: what schedules are searched for.

    plans: those whose kernels are searched for, the likeliest first. others: plans that may also be
    chosen, with the default schedules. kernels: of the user, to be compared with ours.
    """

    spec: Spec
    payload: Payload
    plans: tuple[ServicePlan, ...]
    others: tuple[ServicePlan, ...] = ()
    hardware: HardwareSpec
    target: Target
    kernels: tuple[UserKernel, ...] = ()


class TuningPart(NamedTuple):
    """Searches, and the library that has their candidates, which is built where it is measured."""

    items: tuple[Item, ...]
    identity: Identity
    library: LibrarySpec


def plan_parts(scope: SearchScope, effort: Effort, cache: Path | None) -> tuple[TuningPart, ...]:
    """Return what an effort searches, in this order: gates are compared with products found."""
    spec, target, plans = scope.spec, scope.target, scope.plans
    searches: list[tuple[tuple[Item, ...], LibrarySpec]] = []
    if effort.attention and isinstance(spec, ModelSpec):
        alike = [plan for plan in plans if plan.processes == plans[0].processes]
        shard = shard_spec(spec, split_model(spec, 0, plans[0].processes))
        attention = attention_tasks(shard, target, (team.plan for team in plan_teams(alike)))
        searches.append((attention, attention_library(spec, target)))
    if fitted := tuple(kernel for kernel in scope.kernels if kernel.op):
        assert isinstance(spec, ModelSpec), "encoders have none that is replaced"
        cases = (
            (kernel, model_cases(kernel.op, spec.hidden_size, spec.norm_eps, team.plan))
            for team in plan_teams(plans)
            for kernel in fitted
        )
        rivals = tuple(task for k, some in cases for task in user_tasks(k, target, some))
        searches.append((rivals, user_library(fitted, target)))
    products = plan_job(search_tasks(scope.payload, plans, scope.hardware, target, effort))
    searches.append((products, tuning_library(spec, target)))
    hardware, payload = scope.hardware, scope.payload
    gates = [t for k in fitted for t in gate_tasks(k, payload, plans, hardware, target)]
    if gates:
        searches.append((tuple(gates), gate_library(fitted, gates, target)))
    return tuple(
        TuningPart(items, Identity.of(scope.hardware, index_library(library, cache)), library)
        for items, library in searches
    )


def plan_job(tasks: Iterable[tuple[str, SearchTask]]) -> tuple[SearchTask, ...]:
    """Return the searches of `search_tasks`; products of equal shape and threads share one."""
    found: dict[object, SearchTask] = {}
    for _, task in tasks:
        found.setdefault(task_key(task), task)
    return tuple(found.values())


def job_name(parts: Iterable[TuningPart], effort: str) -> str:
    """Return a short digest of what a job does and with which kernels, to know it again by."""
    work = [
        (
            [task_key(i) if isinstance(i, SearchTask) else i for i in part.items],
            sorted(part.identity.builds.items()),
            part.identity.index.target,
        )
        for part in parts
    ]
    return hashlib.sha256(msgspec.json.encode((work, effort))).hexdigest()[:12]


def spent_seconds(
    records: Iterable[TuningRecord], parts: Iterable[TuningPart], since: datetime | None = None
) -> dict[WorkKey, float]:
    """Return what the trials on record cost that the search of each item can use."""
    spent: dict[WorkKey, float] = {}
    known = tuple(records)
    for part in parts:
        spent |= dict.fromkeys((item.work for item in part.items), 0.0)
        for record in part.identity.matching(known):
            if record.work in spent and (since is None or record.when >= since):
                spent[record.work] += record.cost
    return spent
