"""What is searched for a model on one target, in parts that measure with the same kernel library.

In: a model's products, plans, machine and an effort. Out: searches, and the libraries that have
their candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, index_library
from dovetail.compiler.attention_search import attention_library, attention_tasks
from dovetail.compiler.jobs import Item, plan_job
from dovetail.compiler.payload import Payload
from dovetail.compiler.recorder import Identity
from dovetail.compiler.search.tables import Effort, search_tasks, tuning_library
from dovetail.compiler.tables import plan_teams
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.encoder import Spec
from dovetail.ir.model import ModelSpec
from dovetail.runtime.shard import shard_spec, split_model
from dovetail.topology.hardware import HardwareSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchScope:
    """A model on one target of one machine: what schedules are searched for.

    plans: those whose kernels are searched for, the likeliest first. others: plans that may also be
    chosen, with the default schedules.
    """

    spec: Spec
    payload: Payload
    plans: tuple[ServicePlan, ...]
    others: tuple[ServicePlan, ...] = ()
    hardware: HardwareSpec
    target: Target


class TuningPart(NamedTuple):
    """Searches, and the library that has their candidates, which is built where it is measured."""

    items: tuple[Item, ...]
    identity: Identity
    library: LibrarySpec


def plan_parts(scope: SearchScope, effort: Effort, cache: Path | None) -> tuple[TuningPart, ...]:
    """Return what an effort searches; the products come last."""
    spec, target, plans = scope.spec, scope.target, scope.plans
    searches: list[tuple[tuple[Item, ...], LibrarySpec]] = []
    if effort.attention and isinstance(spec, ModelSpec):
        alike = [plan for plan in plans if plan.processes == plans[0].processes]
        shard = shard_spec(spec, split_model(spec, 0, plans[0].processes))
        attention = attention_tasks(shard, target, (team.plan for team in plan_teams(alike)))
        searches.append((attention, attention_library(spec, target)))
    products = plan_job(search_tasks(scope.payload, plans, scope.hardware, target, effort))
    searches.append((products, tuning_library(spec, target)))
    return tuple(
        TuningPart(items, Identity.of(scope.hardware, index_library(library, cache)), library)
        for items, library in searches
    )
