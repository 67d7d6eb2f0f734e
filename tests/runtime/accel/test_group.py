"""Ranks with accelerators give the tokens of one process, and groups that lose a rank go on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import ArtifactError, DeviceError, RankError, SpecError
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.accel.orders import StepOrder
from dovetail.runtime.accel.tape import Step, TorchTape
from dovetail.runtime.app import App, load
from dovetail.runtime.engine.options import RankOptions
from dovetail.runtime.schedule.plan import Move, StepPlan
from tests.processes import running
from tests.runtime.accel.engines import (
    ASKED,
    HOMES,
    PROMPTS,
    check_blocks,
    make_artifact,
    two_pools,
)
from tests.runtime.groups import named_memory

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("pairs"), **HEADS)


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
    path: Path, count: int, gpu: int, cpu: int, **choices: Any
) -> Iterator[tuple[App, list[StepPlan]]]:
    """Load with pools of so many blocks at each rank; also give the plans that ran."""
    given = {"plan": plan(count), "ranks": choices.pop("options", None)}
    choices = {"min_gain": 0.0, "patience": 4, **choices}
    with two_pools(path, gpu, cpu, given=given, **choices) as found:
        yield found


@pytest.mark.parametrize(
    ("count", "offload", "gpu", "cpu", "chunked"),
    [
        pytest.param(2, "off", 9, 1, False, marks=pytest.mark.long),
        (2, "auto", 9, 30, True),
        (3, "full", 1, 12, True),  # 1, 1 and 2 of the KV heads: parts of a gather differ
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
    if offload != "auto":  # which is decided by the clock
        decoded = {home: any(getattr(b, home) for p in plans for b in p.batches) for home in HOMES}
        assert decoded == {"gpu_decode": offload == "off", "cpu_decode": offload == "full"}
        assert any(step.preempt for step in plans)


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


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_killed_rank_is_named_and_the_next_requests_are_served(
    artifact: Path, alone: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture, count: int
) -> None:
    before = named_memory([os.getpid()])  # other programs have some, this one may
    with ranks(artifact, count, 9, 60) as (app, _):
        group = app.engine.executor.group
        assert group is not None
        pids = group.pids
        assert named_memory([os.getpid(), *pids]) == before  # what has no name is no litter
        jobs = [app.submit(prompt, **ASKED | {"max_tokens": 150}) for prompt in PROMPTS]
        next(iter(jobs[0]))
        os.kill(pids[-1], signal.SIGKILL)
        failed = []
        for job, tokens in zip(jobs, alone, strict=True):
            try:
                assert job.result().token_ids[:24] == tokens
            except RankError as error:
                assert f"rank {count - 1} of {count} (process {pids[-1]} on " in str(error)
                assert "killed by signal 9 (SIGKILL); send the request again" in str(error)
                failed.append(job)
        assert failed and running(pids) == []
        check_blocks(app)
        assert answers(app, PROMPTS[:3]) == alone[:3]
        caplog.clear()
        os.kill(group.pids[0], signal.SIGKILL)  # while idle: nothing is lost
        os.waitid(os.P_PID, group.pids[0], os.WEXITED | os.WNOWAIT)
        assert answers(app, PROMPTS[:3]) == alone[:3]
        assert f"rank 1 of {count}" in caplog.text and "killed by signal 9" in caplog.text
        pids = group.pids
        assert len(running(pids)) == count - 1
    assert running(pids) == []


@pytest.mark.long
def test_a_step_that_fails_at_one_rank_says_why_and_the_next_requests_are_served(
    artifact: Path,
    alone: list[tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks(artifact, 2, 9, 60) as (app, _):
        engine = app.engine
        assert isinstance(engine.executor, DeviceExecutor) and engine.executor.group
        run, broken = TorchTape.run, [True]

        def fail_once(tape: TorchTape, span: range, step: Step) -> None:
            if broken and broken.pop():
                raise DeviceError("a kernel has returned -1")
            run(tape, span, step)

        monkeypatch.setattr(TorchTape, "run", fail_once)
        with pytest.raises(RankError, match=r"failed at rank 0 \(a kernel has returned -1\)"):
            app.generate(PROMPTS[0], **ASKED)
        assert answers(app, PROMPTS[:2]) == alone[:2]

        nowhere = StepOrder(moves=(Move(0, (1 << 40,), (0,)),), leaving=0, batches=())
        engine.executor.group.tell(nowhere)
        with suppress(RankError):  # the loss may be seen before a request is under way
            app.generate(PROMPTS[0], **ASKED)
        assert answers(app, PROMPTS[:2]) == alone[:2]
    assert re.search(r"rank 1 of 2 .*has failed: OverflowError", caplog.text)


@pytest.mark.long
def test_an_artifact_changed_since_the_load_is_refused(tmp_path: Path) -> None:
    path = make_artifact(tmp_path, **HEADS)
    with ranks(path, 2, 9, 30) as (app, _):
        assert app.engine.executor.group is not None
        path.rename(tmp_path / "away.dove")
        os.kill(app.engine.executor.group.pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, app.engine.executor.group.pids[0], os.WEXITED | os.WNOWAIT)
        with pytest.raises(ArtifactError, match=r"app\.dove"):
            app.generate(PROMPTS[0])
        (tmp_path / "away.dove").rename(path)
        assert app.generate(PROMPTS[0], max_tokens=2)[0].finish_reason == "length"


def test_options_that_make_no_group_are_refused(artifact: Path) -> None:
    with pytest.raises(SpecError, match="gloo or nccl"):
        RankOptions(backend="mpi")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="device"):
        load(artifact, plan=plan(2), ranks=RankOptions())
