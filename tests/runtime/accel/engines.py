"""A tiny Llama on the CPU and torch's CPU device; costs are assumed, so that nothing is timed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.plans import Figure
from dovetail.runtime.accel import executor
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule.cost_tables import TablePredictor
from dovetail.runtime.schedule.plan import SchedulerSettings, StepPlan
from dovetail.runtime.sim.machines import assumed_profile, find_machine
from tests.models import save_model
from tests.runtime.schedule.integrity import check_integrity

RNG = random.Random(6)
PROMPTS = [
    [RNG.randrange(3, 100) for _ in range(n)] for n in (1, 15, 16, 17, 40, 75, 100, 9, 33, 64)
]
PROMPTS += [[*PROMPTS[6][:64], 7, 8], [*PROMPTS[6][:48], 9]]  # share blocks
HOMES = ("gpu_decode", "cpu_decode")
ASKED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
SLOW = Figure(6e7, "of this test: products and attention of a layer take milliseconds")
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": 64}


def make_artifact(folder: Path, family: str = "llama", **heads: int) -> Path:
    save_model(folder / "model", family, **heads)
    options = {
        "effort": "none",
        "max_step_tokens": 64,
        "max_context": 256,
        "weight_dtype": "f32",
    }
    compile_model(folder / "model", output=folder / "app.dove", **options)
    return folder / "app.dove"


@contextmanager
def two_pools(
    path: Path,
    gpu: int,
    cpu: int,
    *,
    slow: bool = False,
    offload: str = "auto",
    given: dict[str, Any] | None = None,
    **options: object,
) -> Iterator[tuple[App, list[StepPlan]]]:
    """Load with pools of so many blocks; also give the plans that ran. Pools stay sound."""
    machine = replace(find_machine("t4"), gpu_blocks=gpu)
    if slow:
        machine = replace(machine.with_cpu(SLOW.value / 4 / 60e9), bandwidth=SLOW)
    threads = options.pop("threads", 1)
    chosen = SchedulerSettings(**options)  # type: ignore[arg-type]
    more: dict[str, Any] = {"threads": threads, "settings": chosen, **LIMITS, **(given or {})}

    def assume(_: object, device: DeviceExecutor, *__: object) -> TablePredictor:
        return TablePredictor(assumed_profile(machine, device.spec))

    more |= {"kv_blocks": cpu, "gpu_blocks": gpu, "offload": offload, "device": "torch:cpu"}
    with patch.object(executor, "predict", assume), load(path, **more) as app:
        engine = app.engine
        assert isinstance(engine.executor, DeviceExecutor)
        plans: list[StepPlan] = []
        execute, pools = engine._execute, engine.executor.pair.model.pools

        def follow(plan: StepPlan) -> object:
            plans.append(plan)
            touched = execute(plan)
            check_integrity(engine.scheduler)
            with torch.inference_mode():
                for layer in (*pools.k, *pools.v):
                    layer[gpu:-1] = float("nan")  # the next step may not count on what has landed
            return touched

        engine._execute = follow  # type: ignore[method-assign, assignment]
        yield app, plans
        check_blocks(app)


def check_blocks(app: App) -> None:
    """Check that both pools are sound, and that nobody holds a block."""
    scheduler = app.engine.scheduler
    assert not scheduler.busy
    for pool in scheduler.pools.values():
        check_integrity(pool)
        assert pool.free_blocks == pool.n_blocks
