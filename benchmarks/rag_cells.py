"""Cells of the RAG benchmark: what is asked of which schedulers, and the rows that come of it.

In: a `Stage` (a world that can be set up many times) and cells. Out: flat rows, seconds and
requests/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dovetail.ir.workflow import Workflow
from dovetail.workflows import hyde, irg, multistep, one_shot, recomp
from rag_costs import EngineCost
from rag_engine import MOST_SEQUENCES
from rag_planes import STORED, make_plane
from rag_script import QUESTION_TOKENS, ROUNDS, TOKENS, Script
from rag_world import Arrival, Outcome, Scene, World, poisson

SLO = 10.0
"""Seconds within which 99 of 100 requests must be answered."""
LEVELS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75)
LEVELS += (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
"""Rates that are tried, as parts of what index and engine can take at most."""
ROUND_MEAN = statistics.fmean(ROUNDS)
STAGES: dict[str, tuple[float, dict[str, float]]] = {
    "one-shot": (1, {"answer": 1}),
    "hyde": (1, {"imagine": 1, "answer": 1}),
    "recomp": (1, {"compress": 1, "answer": 1}),
    "irg": (3, {"read": 3}),
    "multistep": (ROUND_MEAN, {"next": ROUND_MEAN, "read": ROUND_MEAN, "answer": 1}),
}
"""Searches of a request, and its replies by kind, on average."""
GRAPHS = {"one-shot": one_shot, "hyde": hyde, "recomp": recomp, "irg": irg, "multistep": multistep}
WORKFLOWS = tuple(GRAPHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting. workflows take turns. point: sustained, burst, or the part of a rate.

    of: whose sustained rate `point` is a part of; bound: of what index and engine can take.
    """

    group: str
    workflows: tuple[str, ...]
    nprobe: int
    planes: tuple[str, ...]
    point: float | str = "sustained"
    of: str = "bound"
    model: str = "llama-3-8b"
    requests: int = 160  # 0: as many as come while rates are looked for
    room: float = 0.0  # part of the index that the device's cache holds

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from other cells, as columns."""
        return {
            "group": self.group,
            "workflows": "+".join(self.workflows),
            "nprobe": self.nprobe,
            "model": self.model,
            "point": self.point,
            "of": self.of,
            "room": self.room,
        }


@dataclass
class Stage:
    """A world to be set up for each run. seconds: of arrivals, where a rate is looked for."""

    scene: Callable[[int, str], Scene]
    engine: Callable[[str], EngineCost]
    script: Script
    world: type[World] = World
    topk: int = 1
    seconds: float = 30.0
    seed: int = 0

    @cached_property
    def graphs(self) -> dict[str, Workflow]:
        """The five workflows."""
        return {name: make(topk=self.topk).workflow() for name, make in GRAPHS.items()}

    def arrivals(self, cell: Cell, rate: float, count: int) -> list[Arrival]:
        """Return requests at a rate."""
        graphs = [self.graphs[name] for name in cell.workflows]
        return poisson(graphs, rate, count, self.script, self.seed)

    def run(self, cell: Cell, plane: str, arrivals: Sequence[Arrival]) -> Outcome:
        """Serve arrivals."""
        scene, engine = self.scene(cell.nprobe, cell.model), self.engine(cell.model)
        room = round(cell.room * sum(scene.index.sizes))
        return self.world(scene, make_plane(plane, scene, engine, room)).run(arrivals)

    def bounds(self, cell: Cell) -> tuple[float, float]:
        """Return requests/s that the index, and the engine, can take at most."""
        scene, engine = self.scene(cell.nprobe, cell.model), self.engine(cell.model)
        sizes = scene.index.sizes
        probed = [
            scene.index.probe(self.script.meaning(self.script.question(i)), cell.nprobe)[0]
            for i in range(64)
        ]
        vectors = statistics.fmean(sum(sizes[c] for c in clusters) for clusters in probed)
        search = scene.scan.per_vector * vectors / scene.scan.threads
        searches = statistics.fmean(STAGES[name][0] for name in cell.workflows)
        step = engine.seconds([], MOST_SEQUENCES, MOST_SEQUENCES * STORED) / MOST_SEQUENCES
        prompt = engine.seconds([2048], 0, 0) / 2048
        work = statistics.fmean(
            sum(
                n * (TOKENS[kind] * step + (130 + 4 * QUESTION_TOKENS) * prompt)
                for kind, n in STAGES[name][1].items()
            )
            for name in cell.workflows
        )
        return 1 / (searches * search), 1 / work


def run_cell(stage: Stage, cell: Cell, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a cell; rates are looked up in earlier rows."""
    retrieval, generation = stage.bounds(cell)
    row: dict[str, Any] = {
        **cell.key,
        "retrieval_bound": retrieval,
        "generation_bound": generation,
    }
    bound = min(retrieval, generation)
    if cell.point == "sustained":
        for plane in cell.planes:
            row[f"{plane}_rate"] = _sustained(stage, cell, plane, bound)
        return row
    if cell.point == "burst":
        arrivals = stage.arrivals(cell, 1e6, cell.requests)
    else:
        rate = row["rate"] = float(cell.point) * _reference(cell, rows, bound)
        arrivals = stage.arrivals(cell, rate, cell.requests or round(rate * stage.seconds))
    answers = None
    for plane in cell.planes:
        outcome = stage.run(cell, plane, arrivals)
        if cell.point == "burst":
            row[f"{plane}_rate"] = outcome.rate
        row |= {f"{plane}_{name}": value for name, value in _figures(outcome).items()}
        assert answers in (None, outcome.answers), f"{plane} answers otherwise"
        answers = outcome.answers
    return row


def _figures(outcome: Outcome) -> dict[str, float]:
    scanned = outcome.vectors.total()
    return {
        "mean": outcome.mean,
        "p99": outcome.p99,
        "seconds": outcome.seconds,
        "middle_rate": _middle_rate(outcome),
        "cpu_busy": outcome.busy["cpu"] / outcome.seconds,
        "engine_busy": outcome.busy["engine"] / outcome.seconds,
        "on_device": outcome.vectors["gpu"] / scanned if scanned else 0.0,
        "attempted": outcome.guesses,
        "accepted": outcome.held,
    }


def _middle_rate(outcome: Outcome) -> float:
    """Return requests/s over the middle 80 % of answers, where neither start nor end counts."""
    ends = sorted(outcome.ends)
    low, high = int(0.1 * len(ends)), int(0.9 * len(ends))
    return (high - low) / max(ends[high] - ends[low], 1e-9)


def _sustained(stage: Stage, cell: Cell, plane: str, bound: float) -> float:
    """Return the highest of the rates tried at which 99 of 100 requests meet the objective."""
    low, high = -1, len(LEVELS)
    while high - low > 1:
        level = (low + high) // 2
        rate = LEVELS[level] * bound
        count = max(40, round(rate * stage.seconds))
        fits = stage.run(cell, plane, stage.arrivals(cell, rate, count)).p99 <= SLO
        low, high = (level, high) if fits else (low, level)
    return LEVELS[max(low, 0)] * bound


def _reference(cell: Cell, rows: Sequence[dict[str, Any]], bound: float) -> float:
    """Return the rate that a cell's load is a part of."""
    if cell.of == "bound":
        return bound
    wanted = {"group": "rates", "workflows": "+".join(cell.workflows)}
    wanted |= {"nprobe": cell.nprobe, "model": cell.model}
    for row in rows:
        if wanted.items() <= row.items() and f"{cell.of}_rate" in row:
            return float(row[f"{cell.of}_rate"])
    raise SystemExit(f"rates of {cell.of} are wanted first: --only rates online")
