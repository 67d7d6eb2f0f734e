"""Scores of prompts equal transformers' log probabilities, whatever else is computed then."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dovetail
from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.schedule.plan import SchedulerSettings
from dovetail.runtime.schedule.request import Score
from dovetail.tiny_world import LLAMA

LENGTHS = (2, 3, 16, 17, 63, 64, 65, 66, 129, 300, 512)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("scored") / "llama.dove"
    options = {"effort": "none", "threads": 2, "max_step_tokens": 160}
    compile_model(LLAMA, output=output, weight_dtype="f32", **options)  # bfloat16 rounds rows
    return output


@pytest.fixture(scope="module")
def exact() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64).eval()
    with torch.no_grad():
        yield lambda ids: np.asarray(
            torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
        )


def prompts_of(vocab: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(vocab) for _ in range(length)] for length in LENGTHS]


def check(score: Score, ids: list[int], logprobs: npt.NDArray[np.float64]) -> None:
    wanted = logprobs[np.arange(len(ids) - 1), ids[1:]]
    assert list(score.token_ids) == ids and score.logprobs[0] is None
    np.testing.assert_allclose(np.array(score.logprobs[1:], float), wanted, atol=1e-4)
    assert score.sum == pytest.approx(wanted.sum(), abs=1e-4 * len(ids))
    assert score.perplexity == pytest.approx(np.exp(-wanted.mean()), rel=1e-4)
    for row, top in zip(logprobs[:-1], score.top[1:], strict=True):
        best = np.sort(row)[::-1][: len(top)]
        np.testing.assert_allclose([found for _, found in top], best, atol=1e-4)
        np.testing.assert_allclose([row[token] for token, _ in top], best, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
def test_all_positions_equal_transformers(artifact: Path, exact: Any, keep: bool) -> None:
    with dovetail.load(artifact, settings=SchedulerSettings(keep_prefixes=keep)) as app:
        prompts = prompts_of(app.engine.spec.vocab_size)
        jobs = app.submit_all(prompts[:6], max_tokens=30, ignore_eos=True)
        scores = app.score(prompts, top=5)  # among requests that generate
        again = app.score(prompts, top=5)  # all of their blocks are there now
        for ids, first, second in zip(prompts, scores, again, strict=True):
            logprobs = exact(ids)
            check(first, ids, logprobs)
            check(second, ids, logprobs)
        assert [len(job.result().token_ids) for job in jobs] == [30] * 6
        held = app.engine.executor.buffers.arrays["logits"]
        assert held.shape[0] == app.engine.scheduler.limits.max_step_sequences == 64


def test_deterministic_loads_give_the_same_bits(artifact: Path) -> None:
    with dovetail.load(artifact, deterministic=True) as app:
        prompts = prompts_of(app.engine.spec.vocab_size)
        alone = [app.score(ids)[0] for ids in prompts]
    settings = SchedulerSettings(prompt_tokens=7)
    with dovetail.load(artifact, deterministic=True, threads=1, settings=settings) as app:
        app.submit_all(prompts[:4], max_tokens=20)
        assert app.score(prompts) == alone


def test_texts_are_scored_with_the_tokens_around_them(artifact: Path) -> None:
    with dovetail.load(artifact) as app:
        assert app.tokenizer is not None
        likely, unlikely = app.score(["The language of Zorvia", "Zorvia of language The"])
        assert list(likely.token_ids) == app.tokenizer.encode("The language of Zorvia")
        assert likely.perplexity < unlikely.perplexity
