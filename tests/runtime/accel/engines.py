"""A tiny Llama on the CPU and a torch device; costs are assumed, so that nothing is timed.

On any device activations are float32, of which products are float32, too (torch's own setting; no
TF32): tokens are those of the CPU but for ties. Attention is plain torch's: others compile kernels
for minutes, and have tests of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest

pytest.importorskip("torch")  # skips the modules that import this one

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.plans import Figure
from dovetail.runtime.accel import attention_choice, executor
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule.cost_tables import TablePredictor
from dovetail.runtime.schedule.plan import SchedulerSettings, StepPlan
from dovetail.runtime.schedule.request import Request
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
TwoPools: TypeAlias = Callable[..., AbstractContextManager[tuple[App, list[StepPlan]]]]


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
    device: str = "torch:cpu",
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
    more: dict[str, Any] = {"threads": threads, "settings": chosen, **LIMITS}
    more |= {"dtype": "f32", "device": device, **(given or {})}

    def assume(_: object, device: DeviceExecutor, *__: object) -> TablePredictor:
        return TablePredictor(assumed_profile(machine, device.spec))

    more |= {"kv_blocks": cpu, "gpu_blocks": gpu, "offload": offload}
    with (
        patch.object(executor, "predict", assume),
        patch.object(attention_choice, "BACKENDS", ()),
        load(path, **more) as app,
    ):
        engine = app.engine
        assert isinstance(engine.executor, DeviceExecutor)
        plans: list[StepPlan] = []
        execute, accelerator = engine._execute, engine.executor.accelerator
        pools = engine.executor.pair.model.pools

        def follow(plan: StepPlan, touched: list[Request]) -> None:
            plans.append(plan)
            execute(plan, touched)
            check_integrity(engine.scheduler)
            with accelerator.working():
                for layer in (*pools.k, *pools.v):
                    layer[gpu:-1] = float("nan")  # the next step may not count on what has landed
            accelerator.finish()

        engine._execute = follow  # type: ignore[method-assign]
        yield app, plans
        check_blocks(app)


def check_blocks(app: App) -> None:
    """Check that both pools are sound, and that nobody holds a block."""
    scheduler = app.engine.scheduler
    assert not scheduler.busy
    for pool in scheduler.pools.values():
        check_integrity(pool)
        assert pool.free_blocks == pool.n_blocks
