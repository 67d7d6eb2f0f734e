"""The schedulers that are compared, by name, and what ours is told of the machine.

In: a scene. Out: a control plane. `dovetail` has all techniques; `no_<technique>` lacks one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baselines.speculation import PipeRag, RalmSpec
from baselines.stages import AsyncUnsplit, FixedSplit, StageSequential
from dovetail.runtime.retrieval.hot import HotSet
from dovetail.runtime.wavefront.costs import StageCosts, StepCost
from dovetail.runtime.wavefront.settings import (
    PREFETCH,
    REORDER,
    SPECULATE_GENERATION,
    SPECULATE_RETRIEVAL,
    SPLIT,
    SPLIT_DEVICES,
    TRANSFORMATIONS,
    WavefrontSettings,
)
from dovetail.runtime.wavefront.wavefront import Wavefront
from rag_costs import EngineCost
from rag_world import Plane, Scene

Maker = Callable[[Scene, EngineCost, int], Plane]

STORED = 300
"""Tokens of a typical sequence in the engine."""
CACHE = frozenset({SPLIT_DEVICES, PREFETCH})
SPECULATION = frozenset({SPECULATE_GENERATION, SPECULATE_RETRIEVAL})
ALL = frozenset(TRANSFORMATIONS)


def stage_costs(scene: Scene, engine: EngineCost) -> StageCosts:
    """Return what is measured beforehand, of the engine two points."""
    one, many = (engine.seconds([], n, n * STORED) for n in (1, 33))
    step = StepCost(fixed=one, per_sequence=(many - one) / 32)
    return StageCosts(scan=scene.scan, overhead=scene.scan.fixed, step=step, device=scene.device)


def make_plane(name: str, scene: Scene, engine: EngineCost, room: int = 0) -> Plane:
    """Return the scheduler of a name; room: vectors that the device's cache holds."""
    return MAKERS[name](scene, engine, room)


def _ours(without: frozenset[str] = frozenset(), **settings: Any) -> Maker:
    def make(scene: Scene, engine: EngineCost, room: int) -> Plane:
        hot = {None: HotSet(scene.index.sizes, room)} if room and scene.device else {}  # in vectors
        chosen = WavefrontSettings(transformations=ALL - without, **settings)
        return Wavefront(chosen, stage_costs(scene, engine), scene, hot)

    return make


MAKERS: dict[str, Maker] = {
    "sequential": lambda scene, engine, room: StageSequential(scene),
    "async": lambda scene, engine, room: AsyncUnsplit(scene),
    "fixed": lambda scene, engine, room: FixedSplit(scene),
    "ralmspec": lambda scene, engine, room: RalmSpec(stage_costs(scene, engine), scene),
    "piperag": lambda scene, engine, room: PipeRag(stage_costs(scene, engine), scene),
    "dovetail": _ours(),
    "paper_triggers": _ours(generation_load=16),
    "no_split": _ours(frozenset({SPLIT})),
    "no_reorder": _ours(frozenset({REORDER})),
    "no_speculation": _ours(SPECULATION),
    "no_cache": _ours(CACHE),
}
