"""Ranks with accelerators give the tokens of one process, and groups that lose a rank go on."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import ArtifactError, DeviceError, RankError, SpecError
from dovetail.runtime.app import App, load
from dovetail.runtime.device import Segment
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.orders import StepOrder
from dovetail.runtime.pipelined import PipelinedEngine
from dovetail.runtime.plan import Move, SchedulerSettings, StepPlan
from dovetail.runtime.sim.machines import find_machine
from tests.models import save_model
from tests.processes import running
from tests.runtime.groups import named_memory

RNG = random.Random(8)
PROMPTS = [[RNG.randrange(3, 100) for _ in range(n)] for n in (1, 15, 16, 17, 40, 75, 100, 9)]
PROMPTS += [[*PROMPTS[6][:64], 7, 8], [*PROMPTS[6][:48], 9]]  # share blocks
ASKED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}


def compile_small(folder: Path) -> Path:
    save_model(folder / "model", "llama", **HEADS)
    options = {
        "effort": "none",
        "max_step_tokens": 64,
        "max_context": 256,
        "weight_dtype": "f32",
    }
    compile_model(folder / "model", output=folder / "app.dove", **options)
    return folder / "app.dove"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_small(tmp_path_factory.mktemp("pairs"))


def answers(app: App, prompts: Sequence[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [done.token_ids for done in app.generate(prompts, **ASKED)]


@pytest.fixture(scope="module")
def alone(artifact: Path) -> list[tuple[int, ...]]:
    with load(artifact, kv_blocks=200, threads=1) as app:
        return answers(app)


def plan(processes: int) -> ServicePlan:
    phase = PhasePlan(threads=1, cpus=())
    return ServicePlan(processes=processes, prefill=phase, decode=phase)


@contextmanager
def ranks(
    path: Path,
    count: int,
    gpu: int,
    cpu: int,
    *,
    options: RankOptions | None = None,
    deterministic: bool = False,
    **choices: Any,
) -> Iterator[tuple[App, list[StepPlan]]]:
    """Load with pools of so many blocks at each rank; also give the plans that ran."""
    chosen = SchedulerSettings(**{"min_gain": 0.0, "patience": 4, **choices})
    made = Emulation(find_machine("t4").with_gpu_blocks(gpu), chosen)
    with load(
        path,
        plan=plan(count),
        kv_blocks=cpu,
        emulation=made,
        ranks=options,
        deterministic=deterministic,
    ) as app:
        plans: list[StepPlan] = []
        execute = app.engine._execute

        def follow(step: StepPlan) -> object:
            plans.append(step)
            return execute(step)

        app.engine._execute = follow  # type: ignore[method-assign, assignment]
        yield app, plans
        check_blocks(app)


def check_blocks(app: App) -> None:
    engine = app.engine
    assert isinstance(engine, PipelinedEngine) and not engine.scheduler.busy
    for pool in engine.scheduler.pools.values():  # type: ignore[attr-defined]
        pool.check_integrity()
        assert pool.free_blocks == pool.n_blocks


@pytest.mark.parametrize(
    ("count", "offload", "gpu", "cpu", "chunked"),
    [
        (2, "off", 9, 1, False),
        (2, "auto", 9, 30, True),
        (4, "full", 1, 12, True),
        (4, "auto", 8, 60, False),
    ],
)
def test_the_tokens_are_those_of_one_process(
    artifact: Path,
    alone: list[tuple[int, ...]],
    count: int,
    offload: str,
    gpu: int,
    cpu: int,
    chunked: bool,
) -> None:
    choices = {"offload": offload, "chunked": chunked}
    with ranks(artifact, count, gpu, cpu, **choices) as (app, plans):
        assert answers(app) == alone
    on_cpu = any(batch.cpu_decode for step in plans for batch in step.batches)
    on_gpu = any(batch.gpu_decode for step in plans for batch in step.batches)
    assert (on_gpu, on_cpu) == (offload != "full", offload != "off")
    assert offload == "auto" or any(step.preempt for step in plans)
    assert offload != "auto" or any(step.moves or len(step.batches) > 1 for step in plans)


def test_gloo_gives_the_tokens_too(artifact: Path, alone: list[tuple[int, ...]]) -> None:
    """Three ranks with 1, 1 and 2 of the KV heads, so that parts of a gather differ."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'dovetail[gpu]'")
    options = RankOptions(backend="gloo")
    with ranks(artifact, 3, 9, 30, options=options) as (app, plans):
        assert answers(app) == alone
        group = app.engine.group
        assert group is not None
        pids = group.pids
        jobs = [app.submit(prompt, **ASKED | {"max_tokens": 150}) for prompt in PROMPTS[:3]]
        next(iter(jobs[0]))
        os.kill(pids[1], signal.SIGKILL)
        for job in jobs:
            with pytest.raises(RankError, match=r"rank 2 of 3 .*killed by signal 9 \(SIGKILL\)"):
                job.result()
        assert running(pids) == []
        assert answers(app, PROMPTS[:3]) == alone[:3]
        pids = group.pids
    assert any(batch.cpu_decode for step in plans for batch in step.batches)
    assert running(pids) == []


@pytest.mark.long
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(1, 4),
    gpu=st.integers(1, 14),
    cpu=st.integers(13, 40),  # the longest request needs 8
    offload=st.sampled_from(["auto", "auto", "full"]),
    chunked=st.booleans(),
    patience=st.integers(1, 8),
)
def test_no_ranks_pools_or_settings_change_the_tokens(
    artifact: Path,
    alone: list[tuple[int, ...]],
    count: int,
    gpu: int,
    cpu: int,
    offload: str,
    chunked: bool,
    patience: int,
) -> None:
    choices = {"offload": offload, "chunked": chunked, "patience": patience}
    with ranks(artifact, count, gpu, cpu, **choices) as (app, _):
        assert answers(app) == alone


def test_deterministic_tokens_and_logprobs_are_those_of_one_process(artifact: Path) -> None:
    asked = {"max_tokens": 8, "ignore_eos": True, "logprobs": 3}
    with load(artifact, kv_blocks=200, threads=1, deterministic=True) as app:
        whole = [done.logprobs for done in app.generate(PROMPTS[:6], **asked)]
    with ranks(artifact, 2, 9, 30, deterministic=True) as (app, _):
        assert [done.logprobs for done in app.generate(PROMPTS[:6], **asked)] == whole


def test_a_killed_rank_is_named_and_the_next_requests_are_served(
    artifact: Path, alone: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    before = named_memory([os.getpid()])  # other programs have some, this one may
    with ranks(artifact, 4, 9, 60) as (app, _):
        group = app.engine.group
        assert group is not None
        pids = group.pids
        assert named_memory([os.getpid(), *pids]) == before  # what has no name is no litter
        jobs = [app.submit(prompt, **ASKED | {"max_tokens": 150}) for prompt in PROMPTS]
        next(iter(jobs[0]))
        os.kill(pids[1], signal.SIGKILL)
        failed = []
        for job, tokens in zip(jobs, alone, strict=True):
            try:
                assert job.result().token_ids[:24] == tokens
            except RankError as error:
                assert f"rank 2 of 4 (process {pids[1]} on " in str(error)
                assert "killed by signal 9 (SIGKILL); send the request again" in str(error)
                failed.append(job)
        assert failed and running(pids) == []
        check_blocks(app)
        assert answers(app, PROMPTS[:3]) == alone[:3]
        caplog.clear()
        os.kill(group.pids[2], signal.SIGKILL)  # while idle: nothing is lost
        os.waitid(os.P_PID, group.pids[2], os.WEXITED | os.WNOWAIT)
        assert answers(app, PROMPTS[:3]) == alone[:3]
        assert "rank 3 of 4" in caplog.text and "killed by signal 9" in caplog.text
        pids = group.pids
        assert len(running(pids)) == 3
    assert running(pids) == []


def test_a_step_that_fails_at_one_rank_says_why_and_the_next_requests_are_served(
    artifact: Path, alone: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(artifact, 2, 9, 60) as (app, _):
        engine = app.engine
        assert isinstance(engine, PipelinedEngine) and engine._pairs is not None
        device, broken = engine.accelerator, [True]
        run = device.run

        def fail_once(segment: Segment, stream: int = 0) -> None:
            if broken and broken.pop():
                raise DeviceError("a kernel has returned -1")
            run(segment, stream)

        device.run = fail_once  # type: ignore[method-assign]
        with pytest.raises(RankError, match=r"failed at rank 0 \(a kernel has returned -1\)"):
            app.generate(PROMPTS[0], **ASKED)
        assert answers(app, PROMPTS[:2]) == alone[:2]

        nowhere = StepOrder(moves=(Move(0, (1 << 40,), (0,)),), leaving=0, lanes=())
        engine._pairs.tell(nowhere)
        with suppress(RankError):  # the loss may be seen before a request is under way
            app.generate(PROMPTS[0], **ASKED)
        assert answers(app, PROMPTS[:2]) == alone[:2]
    assert re.search(r"rank 1 of 2 .*has failed: .*IndexError", caplog.text)


def test_an_artifact_changed_since_the_load_is_refused(tmp_path: Path) -> None:
    path = compile_small(tmp_path)
    with ranks(path, 2, 9, 30) as (app, _):
        assert app.engine.group is not None
        path.rename(tmp_path / "away.dove")
        os.kill(app.engine.group.pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, app.engine.group.pids[0], os.WEXITED | os.WNOWAIT)
        with pytest.raises(ArtifactError, match=r"app\.dove"):
            app.generate(PROMPTS[0])
        (tmp_path / "away.dove").rename(path)
        assert app.generate(PROMPTS[0], max_tokens=2)[0].finish_reason == "length"


def test_options_that_make_no_group_are_refused(artifact: Path) -> None:
    with pytest.raises(SpecError, match="shared, gloo or nccl"):
        RankOptions(backend="mpi")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="share no memory"):
        RankOptions(ray="127.0.0.1:1")
    with pytest.raises(SpecError, match="emulation"):
        load(artifact, plan=plan(2), ranks=RankOptions())
