"""Random arrivals, cancels and steps on a torch device and the CPU: tokens are those of one pool.

The machine of `test_queues.py` on the executor itself: what ends by its length has the tokens that
the CPU's engine gives alone, and both pools are sound after each step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

from dovetail.ir.errors import CapacityError
from dovetail.runtime.accel import attention_choice, executor
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.app import load
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.executor import CpuExecutor
from dovetail.runtime.schedule.plan import Offload, SchedulerSettings
from dovetail.runtime.schedule.request import Request, SamplingParams
from dovetail.runtime.sim.machines import assumed_profile, find_machine
from tests.runtime.accel.engines import LIMITS, make_artifact
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.two_pools import check_plan

SHORT, LONG, PIECES = 300, 100_000, 10
LONGEST = 24
"""Tokens of an answer at most."""
MOST = 12
"""Requests at once."""
POOLS: tuple[tuple[int, int], ...] = ((12, 60), (3, 12), (8, 8), (1, 40))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def prompts(artifact: Path) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompts, some of which begin alike, and the longest answers that the CPU alone gives."""
    draw = random.Random(31)
    made = [[draw.randrange(3, 100) for _ in range(draw.randrange(1, 100))] for _ in range(40)]
    made += [[*prompt[: draw.randrange(1, len(prompt) + 1)], 7] for prompt in made[:20]]
    with load(artifact, kv_blocks=200) as app:
        found = app.generate(made, max_tokens=LONGEST, ignore_eos=True)
    return [(p, done.token_ids) for p, done in zip(made, found, strict=True)]


class Machine:
    """An engine that is driven at random; `run` makes so many steps and then lets all end."""

    def __init__(
        self, engine: Engine, prompts: list[tuple[list[int], tuple[int, ...]]], seed: int
    ) -> None:
        self.engine, self.prompts, self.draw = engine, prompts, random.Random(seed)
        self.asked: dict[int, tuple[Request, tuple[int, ...]]] = {}
        self.steps = self.cancelled = 0

    def run(self, steps: int) -> None:
        while self.steps < steps:
            for _ in range(self.draw.choice((0, 0, 0, 1, 3))):
                self.arrive()
            if self.draw.random() < 0.04:
                self.cancel()
            self.step()
        bound = self.steps + 200 * MOST * LONGEST
        while self.engine.scheduler.busy:
            self.step()
            assert self.steps < bound, "a request waits for ever"

    def arrive(self) -> None:
        if len(self.engine.scheduler.requests) >= MOST:
            return
        prompt, answer = self.draw.choice(self.prompts)
        length = self.draw.randint(1, LONGEST)
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
        try:
            (request,) = self.engine.submit(prompt, params, self.draw.choice((-1, 0, 0, 1)))
        except CapacityError:
            return  # larger than either pool
        self.asked[request.id] = request, answer[:length]

    def cancel(self) -> None:
        if requests := list(self.engine.scheduler.requests.values()):
            self.engine.finish(self.draw.choice(requests), "abort")
            self.cancelled += 1

    def step(self) -> None:
        self.engine.step()
        self.steps += 1
        check_integrity(self.engine.scheduler)
        for number in [n for n, (r, _) in self.asked.items() if r.finished]:
            request, wanted = self.asked.pop(number)
            assert request.error is None
            if request.finish_reason == "length":
                assert tuple(request.tokens[request.prompt_length :]) == wanted


def drive(
    path: Path,
    prompts: list[tuple[list[int], tuple[int, ...]]],
    *,
    pools: tuple[int, int],
    offload: Offload,
    steps: int,
    seed: int,
    device: str = "torch:cpu",
) -> None:
    gpu, cpu = pools
    profile = replace(find_machine("t4"), gpu_blocks=gpu)
    settings = SchedulerSettings(min_gain=0.0, patience=4)
    more = {"device": device, "dtype": "f32", "threads": 1, "settings": settings, **LIMITS}

    def assume(_: object, cpu: CpuExecutor, *__: object) -> object:
        return assumed_profile(profile, cpu.spec)

    with (
        patch.object(executor, "find_profile", assume),
        patch.object(attention_choice, "BACKENDS", ()),
        load(path, gpu_blocks=gpu, kv_blocks=cpu, offload=offload, **more) as app,
    ):
        engine = app.engine
        assert isinstance(engine.executor, DeviceExecutor)
        plan = engine.scheduler.plan

        def checked() -> object:
            made = plan()
            check_plan(engine.scheduler, made)  # type: ignore[arg-type]
            return made

        engine.scheduler.plan = checked  # type: ignore[method-assign, assignment]
        machine = Machine(engine, prompts, seed)
        machine.run(steps)
        assert machine.cancelled and not machine.asked
        for pool in engine.scheduler.pools.values():
            check_integrity(pool)
            assert pool.free_blocks == pool.n_blocks


@pytest.mark.parametrize("offload", ["auto", "full", "off"])
def test_random_steps_keep_pools_sound_and_tokens_right(
    artifact: Path,
    prompts: list[tuple[list[int], tuple[int, ...]]],
    offload: Offload,
    accelerator: str,
) -> None:
    pools = (12, 1) if offload == "off" else POOLS[0]
    given = {"offload": offload, "steps": SHORT, "seed": 1, "device": accelerator}
    drive(artifact, prompts, pools=pools, **given)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", range(PIECES))
def test_a_hundred_thousand_random_steps(
    artifact: Path, prompts: list[tuple[list[int], tuple[int, ...]]], piece: int
) -> None:
    """In pieces of their own seeds and pools, so that several may run side by side."""
    offload: Offload = "full" if piece % 5 == 4 else "auto"
    pools = POOLS[piece % len(POOLS)]
    drive(artifact, prompts, pools=pools, offload=offload, steps=LONG // PIECES, seed=piece)
