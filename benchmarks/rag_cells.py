"""Cells of the RAG benchmark: what is asked of which schedulers, and the rows that come of it.

In: a `Stage` (a machine that can be set up many times) and cells. Out: flat rows, seconds and
requests/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from dovetail.ir.workflow import Workflow
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.workflows import BUNDLED
from rag_costs import MOST_SEQUENCES, STEP_TOKENS
from rag_planes import Setting, Timed, make_plane
from rag_script import ROUNDS, Script, count_tokens
from rag_world import Arrival, Index, NoIndex, Scene, begin_runs, poisson
from scripted_engine import EngineCost, ScriptedEngine
from simulated_workflows import WorkflowMachine, WorkflowSimulation

SLO = 10.0
"""Seconds within which 99 of 100 requests must be answered."""
LEVELS = tuple(0.1 * 1.06**i for i in range(58))
"""Rates that are tried, as parts of what the index on the CPU and the engine can take: 0.1 to 2.8.

More than 1: part of the index may be on the device, and queues grow while the SLO allows it."""
LEAST_REQUESTS = 24
STEADY = ("rates", "cache")
"""Groups measured over longer times: a queue grows and a cache fills slowly."""
ROUND_MEAN = statistics.fmean(ROUNDS)
SEARCHES = {"one-shot": 1, "hyde": 1, "recomp": 1, "irg": 3, "multistep": ROUND_MEAN}
"""Of a request, on average."""
GRAPHS = {name: partial(make, chat=False) for name, make in BUNDLED.items()}
"""Their prompts are plain texts, which are the same for all that is compared."""
WORKFLOWS = tuple(GRAPHS)
FREE = "free"
"""A plane: asynchronous, with searches that take no time. None is faster on this engine, but for
how prompts happen to meet in its steps."""
LOSSY = ("early", "early_no_reorder")
"""Planes that may find other documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting. workflows take turns. point: sustained, burst, or the part of a rate.

    of: whose sustained rate `point` is a part of; bound: of what index and engine can take.
    room: part of the index that the device's cache holds, where a plane has one.
    """

    group: str
    workflows: tuple[str, ...]
    nprobe: int
    planes: tuple[str, ...]
    point: float | str = "sustained"
    of: str = "bound"
    model: str = "llama-3-8b"
    room: float = 0.0

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
    """A machine to be set up for each run.

    seconds: of arrivals, and of a burst's work; long: of arrivals at a rate that is to be kept up.
    """

    script: Script
    index: Index
    machine: WorkflowMachine
    engine: Callable[[str], EngineCost]
    simulation: type[WorkflowSimulation] = WorkflowSimulation
    topk: int = 1
    seconds: float = 10.0
    long: float = 3 * SLO
    seed: int = 0
    backlog: int = 2048
    """Requests at once by which the engine is measured: its steps are full until the last few."""
    generation: dict[tuple[tuple[str, ...], str], float] = field(default_factory=dict)
    """Requests/s of the engine alone, by workflows and model: measured when first wanted."""

    @cached_property
    def graphs(self) -> dict[str, Workflow]:
        """The five workflows."""
        return {name: make(topk=self.topk).workflow() for name, make in GRAPHS.items()}

    def arrivals(self, cell: Cell, rate: float) -> list[Arrival]:
        """Return requests at a rate for the stage's seconds; a burst has as many, all at once."""
        graphs = [self.graphs[name] for name in cell.workflows]
        burst = cell.point == "burst"
        seconds = self.long if cell.group in STEADY and not burst else self.seconds
        count = max(LEAST_REQUESTS, round(rate * seconds))
        pace = 1e6 if burst else rate
        return poisson(graphs, pace, count, self.script, self.seed)

    def run(self, cell: Cell, plane: str, arrivals: Sequence[Arrival]) -> WorkflowSimulation:
        """Serve arrivals."""
        index, machine, simulation = self.index, self.machine, self.simulation
        if plane == FREE:
            index, simulation = NoIndex(), WorkflowSimulation
            machine = replace(machine, scan=ScanCost(0.0, 0.0), turn=0.0)
            plane = "async"
        scene, cost = Scene(index, self.script, cell.nprobe), self.engine(cell.model)
        setting = Setting(scene, machine, cost, round(cell.room * sum(index.sizes)))
        engine = ScriptedEngine(
            cost,
            self.script.tokens,
            count_tokens,
            most_sequences=MOST_SEQUENCES,
            most_tokens=STEP_TOKENS,
        )
        timed = Timed(make_plane(plane, setting))
        made = simulation(timed, scene, machine, engine)
        made.run(begin_runs(arrivals))
        made.busy["control"] = timed.seconds
        assert len(made.outcomes) == len(arrivals), "a request was never answered"
        return made

    def bounds(self, cell: Cell) -> tuple[float, float]:
        """Return requests/s that the index on the CPU, and the engine, can take at most."""
        scan, sizes = self.machine.scan, self.index.sizes
        probed = [
            self.index.probe(self.script.meaning(self.script.question(i)), cell.nprobe)[0]
            for i in range(64)
        ]
        vectors = statistics.fmean(sum(sizes[c] for c in clusters) for clusters in probed)
        search = scan.per_vector * vectors / scan.threads
        searches = statistics.fmean(SEARCHES[name] for name in cell.workflows)
        alone = (cell.workflows, cell.model)
        if alone not in self.generation:
            graphs = [self.graphs[name] for name in cell.workflows]
            done = self.run(cell, FREE, poisson(graphs, 1e6, self.backlog, self.script))
            self.generation[alone] = self.backlog / done.now
        return 1 / (searches * search), self.generation[alone]


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
            row |= _sustained(stage, cell, plane, bound)
        return row
    rate = bound if cell.point == "burst" else float(cell.point) * _reference(cell, rows, bound)
    arrivals = stage.arrivals(cell, rate)
    row["rate"], row["requests"] = rate, len(arrivals)
    answers = None
    for plane in cell.planes:
        done = stage.run(cell, plane, arrivals)
        figures = _figures(done)
        if plane != FREE:
            said = {o.request: o.state["answer"] for o in done.outcomes if o.state is not None}
            answers = answers or said
            same = sum(said[i] == answer for i, answer in answers.items()) / len(answers)
            assert plane in LOSSY or same == 1, f"{plane} answers otherwise"
            figures["same"] = same
        row |= {f"{plane}_{name}": value for name, value in figures.items()}
    return row


def _figures(done: WorkflowSimulation) -> dict[str, float]:
    """Return what a run came to. rate: requests/s from the first arrival to the last answer."""
    latencies = sorted(outcome.latency for outcome in done.outcomes)
    ends = sorted(outcome.end for outcome in done.outcomes)
    count, seconds, scanned = len(ends), ends[-1], done.vectors.total()
    low, high = count // 10, count * 9 // 10  # neither start nor end counts
    return {
        "mean": statistics.fmean(latencies),
        "p99": latencies[min(count - 1, int(0.99 * count))],
        "seconds": seconds,
        "rate": count / seconds,
        "middle_rate": (high - low) / max(ends[high] - ends[low], 1e-9),
        "cpu_busy": done.busy["cpu"] / seconds,
        "control": done.busy["control"] / seconds,  # of a core, in true seconds
        "engine_busy": done.busy["engine"] / seconds,
        "on_device": done.vectors["gpu"] / scanned if scanned else 0.0,
        "scanned": scanned / count,
        "attempted": done.guesses,
        "accepted": done.held,
    }


def _sustained(stage: Stage, cell: Cell, plane: str, bound: float) -> dict[str, float]:
    """Return the highest of the rates tried at which 99 of 100 requests meet the objective.

    And the part of a core that the scheduler took then.
    """
    low, high, control = -1, len(LEVELS), 0.0
    while high - low > 1:
        level = (low + high) // 2
        figures = _figures(stage.run(cell, plane, stage.arrivals(cell, LEVELS[level] * bound)))
        if figures["p99"] <= SLO:
            low, control = level, figures["control"]
        else:
            high = level
    return {f"{plane}_rate": LEVELS[max(low, 0)] * bound, f"{plane}_control": control}


def _reference(cell: Cell, rows: Sequence[dict[str, Any]], bound: float) -> float:
    """Return the rate that a cell's load is a part of."""
    if cell.of == "bound":
        return bound
    if (row := rates_of(cell.key, rows)) is not None:
        return float(row[f"{cell.of}_rate"])
    raise SystemExit(f"rates of {cell.of} are wanted first: --only rates online")


def rates_of(key: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row of the sustained rates in the setting of a cell or row."""
    wanted = {"group": "rates"} | {name: key[name] for name in ("workflows", "nprobe", "model")}
    return next((row for row in rows if wanted.items() <= row.items()), None)
