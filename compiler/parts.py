"""What is searched for a model on one target, in parts that measure with the same kernel library.

In: a model's products, plans, machine and an effort. Out: libraries with every candidate, built or
from the build cache, and the searches that use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import BuiltLibrary
from dovetail.compiler.attention_search import attention_library, attention_tasks
from dovetail.compiler.jobs import Item, plan_job
from dovetail.compiler.payload import Payload
from dovetail.compiler.recorder import Identity
from dovetail.compiler.schedules import plan_teams
from dovetail.compiler.search.tables import Effort, search_tasks, tuning_library
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.model import ModelSpec
from dovetail.runtime.shard import shard_spec, split_model
from dovetail.topology.hardware import HardwareSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchScope:
    """A model on one target of one machine: what schedules are searched for.

    plans: those whose kernels are searched for, the likeliest first. others: plans that may also be
    chosen, with the default schedules.
    """

    spec: ModelSpec
    payload: Payload
    plans: tuple[ServicePlan, ...]
    others: tuple[ServicePlan, ...] = ()
    hardware: HardwareSpec
    target: Target


class TuningPart(NamedTuple):
    """Searches, and the library that has their candidates."""

    items: tuple[Item, ...]
    identity: Identity
    library: BuiltLibrary


def plan_parts(scope: SearchScope, effort: Effort, cache: Path | None) -> tuple[TuningPart, ...]:
    """Return what an effort searches; what takes least comes first."""
    return tuple(_parts(scope, effort, cache))


def _parts(scope: SearchScope, effort: Effort, cache: Path | None) -> Iterator[TuningPart]:
    spec, target, plans = scope.spec, scope.target, scope.plans
    if effort.attention:
        library = attention_library(spec, target, cache)
        alike = [plan for plan in plans if plan.processes == plans[0].processes]
        shard = shard_spec(spec, split_model(spec, 0, plans[0].processes))
        attention = attention_tasks(shard, target, (team.plan for team in plan_teams(alike)))
        yield TuningPart(attention, Identity.of(scope.hardware, library.index), library)
    library = tuning_library(spec, target, cache)
    products = plan_job(search_tasks(scope.payload, plans, scope.hardware, target, effort))
    yield TuningPart(products, Identity.of(scope.hardware, library.index), library)
