"""The schedulers that are compared, by name, and what ours is told of the machine.

In: a `Setting`. Out: a control plane. `dovetail` has all techniques; `no_<technique>` lacks one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baselines.speculation import PipeRag, RalmSpec
from baselines.stages import AsyncDivided, AsyncUnsplit, FixedSplit, StageSequential
from dovetail.runtime.flows.control.costs import StageCosts, StepCost
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import REGISTRY
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.retrieval.hot import HotSet
from rag_costs import STEP_TOKENS
from rag_world import Scene
from scripted_engine import EngineCost
from simulated_workflows import Plane, WorkflowMachine

STORED = 300
"""Tokens of a typical sequence in the engine."""
CHARACTERS = 5
"""Of a token."""
CACHE = frozenset({"put", "prefetch"})
SPECULATION = frozenset({"speculate_generation", "speculate_retrieval"})
SPLITS = frozenset({"split", "split_reply"})
EARLY = 1 / 8
"""Part of a search without change of the nearest documents after which `early` ends it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scheduler may know. room: vectors that the device's cache holds."""

    scene: Scene
    machine: WorkflowMachine
    engine: EngineCost
    room: int = 0

    @property
    def costs(self) -> StageCosts:
        """What is measured beforehand, of the engine three points."""
        one, many = (self.engine.seconds([], n, n * STORED) for n in (1, 33))
        each = (many - one) / 32
        full = self.engine.seconds([STEP_TOKENS], 33, 33 * STORED) - many  # a step full of prompts
        step = StepCost(fixed=one, per_sequence=each, prefill=full / (STEP_TOKENS * CHARACTERS))
        scan, device = self.machine.scan, self.machine.device
        return StageCosts(scan=scan, overhead=scan.fixed, step=step, device=device)


class Timed:
    """A scheduler, and the seconds of a core that it took by now."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.seconds = plane, 0.0

    def __getattr__(self, name: str) -> Any:
        """Return what the scheduler has; its methods are timed."""
        found = getattr(self.plane, name)
        if not callable(found):
            return found

        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return found(*arguments)
            finally:
                self.seconds += time.thread_time() - start

        self.__dict__[name] = timed
        return timed


Maker = Callable[[Setting], Plane]


def make_plane(name: str, setting: Setting) -> Plane:
    """Return the scheduler of a name."""
    return MAKERS[name](setting)


def _ours(without: frozenset[str] = frozenset(), *, early: bool = False, **settings: Any) -> Maker:
    def make(setting: Setting) -> Plane:
        scene = setting.scene
        hot = {None: HotSet(scene.index.sizes, setting.room)} if setting.room else {}  # in vectors
        patience = round(EARLY * scene.nprobe) if early else None
        names = frozenset(REGISTRY) - without
        chosen = WavefrontSettings(transformations=names, patience=patience, **settings)
        return Wavefront(chosen, setting.costs, scene, hot)

    return make


MAKERS: dict[str, Maker] = {
    "sequential": lambda setting: StageSequential(setting.scene),
    "async": lambda setting: AsyncUnsplit(setting.scene),
    "async_divided": lambda setting: AsyncDivided(setting.scene, setting.machine.scan),
    "fixed": lambda setting: FixedSplit(setting.scene),
    "ralmspec": lambda setting: RalmSpec(setting.costs, setting.scene),
    "piperag": lambda setting: PipeRag(setting.costs, setting.scene),
    "dovetail": _ours(),
    "paper_triggers": _ours(generation_load=16),
    "no_split": _ours(SPLITS),
    "no_reorder": _ours(frozenset({"reorder"})),
    "no_speculation": _ours(SPECULATION),
    "no_cache": _ours(CACHE),
    "early": _ours(early=True),
    "early_no_reorder": _ours(frozenset({"reorder"}), early=True),
}
