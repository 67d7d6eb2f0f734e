"""Plans on this machine, measured in turns.

In: artifacts and ServicePlans by name. Out: samples of seconds per prompt and per decode step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from common import QUIET_TRIES, Sample, sample, timed_region
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.app import App, load
from dovetail.runtime.artifact import open_artifact
from dovetail.topology.binding import choose_pus
from dovetail.topology.configuration import Configuration, allows_processes
from dovetail.topology.hardware import HardwareSpec, read_hardware

PHASES = ("prefill", "decode")
Times = dict[str, dict[str, Sample]]
"""Plan -> phase -> seconds of a prompt, or of a decode step of the whole batch."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a round: `batch` prompts of `prompt` tokens, `new_tokens` for each."""

    prompt: int
    new_tokens: int
    batch: int = 1

    @property
    def blocks(self) -> int:
        """Return the KV blocks they need."""
        return self.batch * (-(-(self.prompt + self.new_tokens) // KV_BLOCK) + 1)


def planned_for(artifact: Path) -> ServicePlan:
    """Return the plan that the compile chose."""
    return open_artifact(artifact, read_hardware()).service


def every_plan(hardware: HardwareSpec, model: ModelSpec) -> dict[str, ServicePlan]:
    """Return each number of processes and threads that this machine can run, both phases alike.

    Powers of two, and as many threads as there are cores. Phases of one process number can be
    paired as one likes; `uneven_pairs` has the others.
    """
    most = hardware.usable_threads
    found = {}
    for processes in _powers(most):
        if allows_processes(model, processes):
            for threads in _powers(most // processes):
                cpus = choose_pus(hardware, processes * threads)
                phase = PhasePlan(threads=threads, cpus=cpus)
                plan = ServicePlan(processes=processes, prefill=phase, decode=phase)
                found[f"{processes} x {threads}"] = plan
    return found


def uneven_pairs(plans: Mapping[str, ServicePlan]) -> dict[str, ServicePlan]:
    """Return the pairs of plans whose phases have other numbers of processes (Sandwich §5)."""
    return {
        f"{first} -> {then}": ServicePlan(
            processes=decode.processes,
            prefill_processes=prefill.processes,
            prefill=prefill.prefill,
            decode=decode.decode,
        )
        for (first, prefill), (then, decode) in permutations(plans.items(), 2)
        if prefill.processes != decode.processes
    }


def simulated_plan(configuration: Configuration) -> ServicePlan:
    """Return a configuration as the plan of both phases."""
    processes = configuration.processes
    cpus = tuple(pu for process in processes for pu in process.pus)
    phase = PhasePlan(threads=len(processes[0].pus), cpus=cpus)
    return ServicePlan(processes=len(processes), prefill=phase, decode=phase)


def measure_plans(
    contestants: Mapping[str, tuple[Path, ServicePlan]], load_: Load, rounds: int, seconds: float
) -> Times:
    """Serve an artifact with a plan, all in turns, `rounds` times or for about `seconds`.

    Each is warmed up once before.
    """
    names = list(contestants)
    found: dict[str, dict[str, list[float]]] = {name: {p: [] for p in PHASES} for name in names}
    noisy = dict.fromkeys(names, 0)
    with ExitStack() as stack:
        apps = {
            name: stack.enter_context(load(artifact, plan=plan, kv_blocks=load_.blocks))
            for name, (artifact, plan) in contestants.items()
        }
        for app in apps.values():
            serve(app, load_)
        end = time.perf_counter() + seconds
        for turn in range(rounds):
            if turn and time.perf_counter() > end:
                break
            for name, app in apps.items():
                times, quiet = serve_quietly(app, load_, end)
                noisy[name] += not quiet
                for phase, value in zip(PHASES, times, strict=True):
                    found[name][phase].append(value)
    return {
        name: {phase: sample(values, noisy[name]) for phase, values in phases.items()}
        for name, phases in found.items()
    }


def serve_quietly(app: App, load_: Load, end: float) -> tuple[tuple[float, float], bool]:
    """Serve until other processes left the machine alone, a few times at most, not beyond `end`."""
    for _ in range(QUIET_TRIES):
        with timed_region() as region:
            times = serve(app, load_)
        if region.quiet or time.perf_counter() > end:
            break
    return times, region.quiet


def serve(app: App, load_: Load) -> tuple[float, float]:
    """Return seconds per prompt and per decode step, for prompts that no request had before."""
    draw = random.Random(time.perf_counter_ns())
    prompts = [draw.choices(range(3, 900), k=load_.prompt) for _ in range(load_.batch)]
    start = app.engine.scheduler.clock()
    done = app.generate(prompts, max_tokens=load_.new_tokens, ignore_eos=True)
    first = max(item.metrics.first_token or start for item in done)
    last = max(item.metrics.last_token or first for item in done)
    return (first - start) / load_.batch, (last - first) / (load_.new_tokens - 1)


def _powers(most: int) -> list[int]:
    return sorted({1 << i for i in range(most.bit_length())} | {most}) if most else []
