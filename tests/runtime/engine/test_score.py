"""Log probabilities of prompts, on a model that answers wrongly as soon as one row is wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.errors import RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.native.step import StepShape
from dovetail.runtime.schedule.request import Score
from tests.runtime.schedule.integrity import check_integrity

MakeArtifact = Callable[..., Path]
Answer = Callable[..., list[int]]
VOCAB = 97


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def expected(prompt: Sequence[int]) -> list[float]:
    """What the toy model must find: it takes its logits for log probabilities."""
    found, value = [], 17
    for token, following in itertools.pairwise(prompt):
        value = (value * 31 + token + 7) & 0xFFFFFFFF
        found.append(-0.1 * ((following - value) % VOCAB))
    return found


def assert_right(score: Score, prompt: Sequence[int]) -> None:
    assert list(score.token_ids) == list(prompt) and score.logprobs[0] is None
    np.testing.assert_allclose(np.array(score.logprobs[1:], float), expected(prompt), atol=1e-5)


def watch_rows(app: App) -> list[tuple[int, int]]:
    """Return a list to which each step adds its token rows and its rows of logits."""
    rows: list[tuple[int, int]] = []
    forward = app.engine.executor.forward

    def counted(shape: StepShape) -> None:
        rows.append((shape.n_tokens, shape.n_out))
        forward(shape)

    app.engine.executor.forward = counted  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 31, 33, 100, 255, 256])
def test_prompts_across_block_edges(make_artifact: MakeArtifact, length: int) -> None:
    (prompt,) = prompts_of(length, seed=length)
    with load(make_artifact()) as app:
        (found,) = app.score(prompt)
        assert_right(found, prompt)
        (done,) = app.generate(prompt, max_tokens=0, prompt_logprobs=0)
        assert done.token_ids == () and app.engine.scheduler.pool.free_blocks == 64


def test_a_step_has_no_more_rows_of_logits_than_its_buffer(make_artifact: MakeArtifact) -> None:
    prompts = prompts_of(50, 60, 1, 70)
    with load(make_artifact()) as app:
        rows = watch_rows(app)
        held = app.engine.executor.buffers.arrays["logits"]
        assert held.shape[0] == 8  # max_sequences: with or without scores
        for prompt, found in zip(prompts, app.score(prompts), strict=True):
            assert_right(found, prompt)
        assert max(out for _, out in rows) == 8 == len(held)
        assert sum(out for _, out in rows) == sum(len(prompt) - 1 for prompt in prompts)


@pytest.mark.parametrize("kv_blocks", [16, 24, 64])
def test_scores_among_requests_that_generate(
    make_artifact: MakeArtifact, answer: Answer, kv_blocks: int
) -> None:
    """With few blocks, requests are preempted half-way and go on where their scores end."""
    rng = random.Random(5)
    prompts = prompts_of(*(rng.randint(1, 150) for _ in range(24)))
    with load(make_artifact(kv_blocks=kv_blocks)) as app:
        rows = watch_rows(app)
        plain = app.submit_all(prompts[::2], max_tokens=60)
        both = app.submit_all(prompts[1::2], max_tokens=9, prompt_logprobs=0)
        scores = app.score(prompts)
        for prompt, score in zip(prompts, scores, strict=True):
            assert_right(score, prompt)
        for prompt, job in zip(prompts[::2], plain, strict=True):
            done = job.result()
            assert list(done.token_ids) == answer(prompt, 60) and done.prompt_logprobs is None
        for prompt, job in zip(prompts[1::2], both, strict=True):
            done = job.result()
            assert list(done.token_ids) == answer(prompt, 9) and done.prompt_logprobs is not None
            found = [one.logprob for one in done.prompt_logprobs[1:] if one]
            np.testing.assert_allclose(found, expected(prompt), atol=1e-5)
        preempted = sum(job.result().metrics.preemptions for job in (*plain, *both))
        assert (preempted > 0) == (kv_blocks < 64)
        assert max(out for _, out in rows) <= 8
        check_integrity(app.engine.scheduler.pool)
        assert app.engine.scheduler.pool.free_blocks == kv_blocks


def test_shared_blocks_leave_out_no_row(make_artifact: MakeArtifact, answer: Answer) -> None:
    (prompt,) = prompts_of(100)
    with load(make_artifact()) as app:
        app.generate(prompt, max_tokens=1)
        (found,) = app.score(prompt)
        assert_right(found, prompt)
        (again,) = app.generate(prompt, max_tokens=4)  # shares with both
        assert again.metrics.cached_tokens == 96 and list(again.token_ids) == answer(prompt, 4)


def test_alternatives_and_ranks(make_artifact: MakeArtifact) -> None:
    (prompt,) = prompts_of(40)
    with load(make_artifact()) as app:
        (found,) = app.score(prompt, top=3)
        (done,) = app.generate(prompt, max_tokens=0, prompt_logprobs=3)
    assert found.top[0] == () and done.prompt_logprobs is not None and done.token_ids == ()
    for place in range(1, 40):
        best = found.top[place][0][0]  # whose logit is 0; the next ids follow
        ids = [(best + i) % VOCAB for i in range(3)]
        assert [token for token, _ in found.top[place]] == ids
        np.testing.assert_allclose([p for _, p in found.top[place]], [0, -0.1, -0.2], atol=1e-5)
        one = done.prompt_logprobs[place]
        assert one is not None and one.token_id == prompt[place]
        assert one.rank == 1 + (prompt[place] - best) % VOCAB


def test_samples_of_a_prompt_are_scored_once(make_artifact: MakeArtifact, answer: Answer) -> None:
    (prompt,) = prompts_of(50)
    with load(make_artifact()) as app:
        rows = watch_rows(app)
        asked = {"n": 3, "max_tokens": 5, "ignore_eos": True, "prompt_logprobs": 0}
        first, *others = app.generate(prompt, **asked)
        assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 50
        assert [one.prompt_logprobs for one in others] == [None, None]
        wanted = answer(prompt, 5, eos=False)
        assert [list(one.token_ids) for one in (first, *others)] == [wanted] * 3
        assert sum(out for _, out in rows) == 49 + 3 * 5


def test_scores_come_from_an_engine_apart(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = prompts_of(1, 30, 120)
    with load(make_artifact(), apart=True) as app:
        for prompt, found in zip(prompts, app.score(prompts), strict=True):
            assert_right(found, prompt)
        job = app.submit(prompts[2], max_tokens=6, prompt_logprobs=1)
        assert [t for chunk in job for t in chunk.token_ids] == answer(prompts[2], 6)
        assert len(job.result().prompt_logprobs or ()) == 120


def test_what_a_score_is_told_of_nothing(make_artifact: MakeArtifact) -> None:
    with load(make_artifact()) as app:
        (alone,) = app.score([3])
        assert alone.logprobs == (None,) and alone.sum == 0.0 and np.isnan(alone.perplexity)
        (pair,) = app.score([3, 4])
        assert pair.perplexity == pytest.approx(np.exp(-expected([3, 4])[0]))
        with pytest.raises(RequestError, match="context holds 256; shorten"):
            app.score([1] * 257)
        with pytest.raises(RequestError, match="max_tokens must be"):
            app.generate([1], max_tokens=0)
        with pytest.raises(RequestError, match="prompt_logprobs must be"):
            app.score([1], top=101)
