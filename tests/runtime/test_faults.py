"""A step that cannot be run takes its own requests with it, with a clear error, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import DeviceError, RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.engine.engine import Filled
from dovetail.runtime.engine.step_watch import StepWatch
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.schedule.plan import Batch, StepPlan
from dovetail.runtime.schedule.request import Request, SamplingParams
from tests.runtime.test_app import is_idle
from tests.runtime.throttle import Throttle

MakeArtifact = Callable[..., Path]
Answer = Callable[..., list[int]]
OPTIONS: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}


def refuse_entries(app: App, step: int) -> Callable[[int], None]:
    """The tapes lose their entries in one step: the native call itself returns an error."""
    tapes = [app.engine.executor.model.prefill, app.engine.executor.model.decode]
    whole = [tape._tape.n_entries for tape in tapes]

    def before(now: int) -> None:
        for tape, entries in zip(tapes, whole, strict=True):
            tape._tape.n_entries = 0 if now == step else entries

    return before


def run_out_of_memory(app: App, step: int) -> Callable[[int], None]:
    """A step asks for scratch memory that no machine has."""
    model = app.engine.executor.model
    run = model.run

    def greedy(*args: Any, **options: Any) -> None:
        allocate(1 << 62)
        run(*args, **options)

    def before(now: int) -> None:
        model.run = greedy if now == step else run  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize(
    ("break_step", "words"),
    [(refuse_entries, "could not run entries"), (run_out_of_memory, "memory ran out")],
)
def test_only_the_requests_of_the_broken_step_fail(
    make_artifact: MakeArtifact,
    answer: Answer,
    break_step: Callable[[App, int], Callable[[int], None]],
    words: str,
    step: int,
) -> None:
    prompts = [[1] * 9, [2] * 30, [1] * 20, [3] * 5]
    with load(make_artifact(max_sequences=2)) as app:
        throttle = Throttle(app, break_step(app, step))
        members, give_up = [], app.engine._give_up

        def follow(plan: StepPlan, error: BaseException) -> list[Request]:
            members.append(plan.members)
            return give_up(plan, error)

        app.engine._give_up = follow  # type: ignore[method-assign]
        jobs = [app.submit(prompt, **OPTIONS) for prompt in prompts]
        throttle.allow(10_000)
        failed = []
        for job, prompt in zip(jobs, prompts, strict=True):
            try:
                assert list(job.result().token_ids) == answer(prompt, 20, eos=False)
            except DeviceError as error:
                assert words in str(error)
                failed.append(job)
        assert [sorted(job.request.id for job in failed)] == [sorted(ids) for ids in members]
        assert 1 <= len(failed) <= 2
        assert is_idle(app)
        again = app.generate(prompts, **OPTIONS)
        assert [list(d.token_ids) for d in again] == [answer(p, 20, eos=False) for p in prompts]


def test_a_broken_step_ends_a_stream_and_a_batch(make_artifact: MakeArtifact) -> None:
    with load(make_artifact()) as app:
        throttle = Throttle(app, refuse_entries(app, 2))
        throttle.allow(10_000)
        chunks = []
        with pytest.raises(DeviceError, match="send the request again"):
            for chunk in app.stream([1, 2, 3], **OPTIONS):
                chunks.append(chunk)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 2
        throttle.steps = 0
        with pytest.raises(DeviceError, match="send the request again"):
            app.generate([[1, 2, 3], [4]], **OPTIONS)
        assert is_idle(app)


def test_steps_that_failed_or_had_nothing_to_compute_are_not_counted(
    make_artifact: MakeArtifact,
) -> None:
    with load(make_artifact()) as app:
        watch = app.engine.watch = StepWatch(app.engine.spec.hidden_size, lambda _: None)
        throttle = Throttle(app, refuse_entries(app, 2))
        throttle.allow(10_000)
        with pytest.raises(DeviceError):
            app.generate([1, 2, 3], **OPTIONS)
        app.generator.host.call(app.engine.step).result()
        steps = watch.tokens.read()
        assert (sum(steps.counts), steps.total) == (2, 3 + 1)


def test_a_fault_of_the_program_fails_all_and_the_next_are_served(
    make_artifact: MakeArtifact, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    def before(step: int) -> None:
        assert step != 3, "a made-up fault"

    with load(make_artifact(max_sequences=1)) as app:
        throttle = Throttle(app, before)
        jobs = [app.submit([i], **OPTIONS) for i in range(3)]
        throttle.allow(10_000)
        for job in jobs:
            with pytest.raises(AssertionError, match="made-up"):
                job.result()
        assert "because of a bug" in caplog.text and is_idle(app)
        assert list(app.generate([7], **OPTIONS)[0].token_ids) == answer([7], 20, eos=False)


def test_who_ended_before_the_rest_of_a_step_failed_is_told(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    """A step in two rounds, as where prompts have no room to land beside each other."""
    with load(make_artifact()) as app:
        engine, params = app.engine, SamplingParams(max_tokens=1)
        first, second = (engine.submit([n, 2, 3], params)[0] for n in (1, 4))
        compute = engine.executor.compute

        def split(plan: StepPlan, _: object) -> list[StepPlan]:
            (batch,) = plan.batches
            return [replace(plan, batches=(Batch(prefill=(c,)),)) for c in batch.prefill]

        def fail_second(plan: StepPlan, filled: Sequence[Filled]) -> None:
            if second.id in plan.members:
                raise DeviceError("broken")
            compute(plan, filled)

        engine.executor.begin = split  # type: ignore[method-assign, assignment]
        engine.executor.compute = fail_second  # type: ignore[method-assign]
        assert engine.step() == [first, second]
        assert first.output == answer([1, 2, 3], 1) and first.error is None
        assert isinstance(second.error, DeviceError) and is_idle(app)


def test_who_failed_by_its_form_is_told_where_its_step_fails_too(
    make_artifact: MakeArtifact,
) -> None:
    with load(make_artifact()) as app:
        engine = app.engine
        (formed,) = engine.submit([1, 2], SamplingParams(grammar="start: /a/"))  # no tokenizer
        (plain,) = engine.submit([3, 4], SamplingParams())

        def fail(*_: object) -> None:
            raise DeviceError("broken")

        engine.executor.sample = fail  # type: ignore[method-assign]
        assert set(engine.step()) == {formed, plain} and is_idle(app)
        assert isinstance(formed.error, RequestError) and isinstance(plain.error, DeviceError)


def test_a_cpu_that_went_away_is_no_want_of_memory(make_artifact: MakeArtifact) -> None:
    with load(make_artifact()) as app:
        for tape in app.engine.executor.model.tapes.values():
            tape.plan = PhasePlan(threads=1, cpus=(1023,))
        with pytest.raises(DeviceError, match=r"a step failed .*CPUs 1023: one is offline"):
            app.generate([1, 2, 3], **OPTIONS)
        assert is_idle(app)
