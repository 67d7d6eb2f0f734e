"""A setting to simulate: a machine class, a model, a policy and a trace -> what comes of it.

What `dovetail bench offload` and `benchmarks/offload.py` share; also makes arrivals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import msgspec

from dovetail.ir.errors import SpecError
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.schedule.cost_tables import Predictor, TablePredictor
from dovetail.runtime.schedule.kv_pool import KvPool
from dovetail.runtime.schedule.neo import NeoScheduler
from dovetail.runtime.schedule.plan import Limits, Offload, SchedulerSettings
from dovetail.runtime.sim.machines import Machine, assumed_profile, find_machine, kv_token_bytes
from dovetail.runtime.sim.simulated_step import Truth
from dovetail.runtime.sim.simulator import Arrival, Simulation, simulate
from dovetail.runtime.timeline import Timeline
from dovetail.topology.presets import preset_model

MAX_SEQUENCES = 1024
"""Sequences in a step, as in NEO's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """noise, hidden: how the truth differs from the scheduler's tables, as in `Truth`."""

    machine: Machine
    model: str
    spec: ModelSpec
    settings: SchedulerSettings
    noise: float = 0.1
    hidden: bool = True
    seed: int = 0

    def run(self, arrivals: Sequence[Arrival], timeline: Timeline | None = None) -> Simulation:
        """Simulate; requests that no pool holds are refused and counted."""
        profile = assumed_profile(self.machine, self.spec)
        truth = Truth(
            TablePredictor(profile),
            self.spec,
            noise=self.noise,
            hidden=self.hidden,
            seed=self.seed,
        )
        known = {name: rows for name, rows in profile.tables.items() if name != "launch"}
        tables = TablePredictor(msgspec.structs.replace(profile, tables=known))
        blocks, spec = (self.machine.gpu_blocks, self.machine.cpu_blocks), self.spec
        limits = Limits(
            max_step_tokens=self.machine.step_tokens,
            max_step_sequences=MAX_SEQUENCES,
            max_context=spec.max_context,
            vocab_size=spec.vocab_size,
            n_layers=spec.n_layers,
            block_bytes=KV_BLOCK * kv_token_bytes(spec) * spec.n_layers,
        )
        return serve(tables, truth, limits, blocks, self.settings, arrivals, timeline=timeline)


def serve(
    tables: Predictor,
    truth: Truth,
    limits: Limits,
    blocks: tuple[int, int],
    settings: SchedulerSettings,
    arrivals: Sequence[Arrival],
    *,
    in_flight: int | None = None,
    timeline: Timeline | None = None,
) -> Simulation:
    """Simulate the scheduler of two pools of `blocks` (device, CPU), which knows `tables`.

    in_flight: so many requests at most are in the system; others come as these end.
    """

    def make(clock: Callable[[], float]) -> NeoScheduler:
        gpu, cpu = map(KvPool, blocks)
        return NeoScheduler(limits, gpu, cpu, tables, clock, settings)

    return simulate(make, arrivals, truth, timeline, in_flight=in_flight)


def make_scenario(
    machine: str,
    model: str | None = None,
    offload: str = "auto",
    *,
    gpu_blocks: int | None = None,
    cpu: float = 1.0,
    noise: float = 0.1,
    hidden: bool = True,
    seed: int = 0,
) -> Scenario:
    """Return the setting of a machine class with its own model, or another one, by name.

    cpu: the CPU's bandwidth, in multiples of the class's.

    Raises:
        SpecError: no such machine, model or policy.
    """
    found = find_machine(machine).with_cpu(cpu)
    name = model or found.model
    return Scenario(
        machine=replace(found, gpu_blocks=gpu_blocks or found.gpu_blocks),
        model=name,
        spec=preset_model(name, kv_dtype="bf16"),
        settings=SchedulerSettings(offload=cast(Offload, offload)),  # which it checks
        noise=noise,
        hidden=hidden,
        seed=seed,
    )


def synthesize(
    prompt: int, output: int, count: int, *, rate: float | None = None, seed: int = 0
) -> list[Arrival]:
    """Return requests of lengths even within 10 % of the given ones (NEO §5.1).

    rate: mean arrivals per second of a Poisson process; None = all at once.
    """
    draw = random.Random(seed)
    lengths = [
        (round(prompt * draw.uniform(0.9, 1.1)), round(output * draw.uniform(0.9, 1.1)))
        for _ in range(count)
    ]
    return schedule(lengths, rate=rate, seed=seed)


def schedule(
    lengths: Sequence[tuple[int, int]],
    *,
    rate: float | None = None,
    seed: int = 0,
    times: Sequence[float] = (),
    speed: float = 1.0,
) -> list[Arrival]:
    """Return arrivals of these (prompt, output) lengths: at `times`, at a Poisson rate, or at 0.

    Recorded `times` are passed through `speed` times as fast.

    Raises:
        SpecError: the rate or the speed is not positive.
    """
    if not ((rate is None or rate > 0) and speed > 0):  # NaN is not
        raise SpecError("the rate and the speed of arrivals must be positive")
    if rate is not None:
        draw = random.Random(seed + 1)
        times = list(accumulate(draw.expovariate(rate) for _ in lengths))
    first = times[0] if times else 0.0
    return [
        Arrival((times[i] - first) / speed if times else 0.0, prompt, max(1, output))
        for i, (prompt, output) in enumerate(lengths)
    ]
