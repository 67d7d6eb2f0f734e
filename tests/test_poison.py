"""Requests whose logits are no numbers fail alone, with the kernels and weights of a real model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import RequestError
from dovetail.ir.model import ModelFile
from dovetail.runtime.app import load
from dovetail.runtime.hosting.generator import Job
from tests.models import make_model
from tests.runtime.schedule.integrity import check_integrity

POISON = 99
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
PROMPTS = [[3, 4, 5], [7] * 40, list(range(10, 60)), [8, 9] * 20, [11]]
KV_BLOCKS = 24


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poison")
    model = make_model("llama")
    # A token that no other request comes by
    model.lm_head.weight.data[POISON] = -model.lm_head.weight.data[:POISON].mean(0)
    model.save_pretrained(folder / "model")
    options = {
        "effort": "none",
        "max_step_tokens": 64,
        "max_context": 256,
        "weight_dtype": "f32",
    }
    compile_model(folder / "model", output=folder / "app.dove", **options)
    return folder / "app.dove"


def damage(artifact: Path, target: Path, value: float) -> Path:
    """Copy the artifact and fill the embedding row of POISON with `value`."""
    shutil.copytree(artifact, target)
    (file,) = target.glob("models/*/model.json")
    model = msgspec.json.decode(file.read_bytes(), type=ModelFile)
    (embed,) = [weight for weight in model.weights if weight.name == "embed"]
    width = model.spec.hidden_size
    assert embed.bytes == 4 * model.spec.vocab_size * width
    weights = np.memmap(file.parent / "weights/weights.bin", np.float32, "r+", embed.offset)
    weights[POISON * width : (POISON + 1) * width] = value
    weights.flush()
    return target


def tokens_of(job: Job) -> list[int]:
    return list(job.result().token_ids)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_poisoned_request_fails_alone(artifact: Path, tmp_path: Path, value: float) -> None:
    with load(artifact, kv_blocks=KV_BLOCKS) as app:
        expected = [list(d.token_ids) for d in app.generate(PROMPTS, **OPTIONS)]
    assert not any(POISON in tokens for tokens in expected)
    poisoned = [[POISON], [5] * 50 + [POISON] + [6] * 20, [POISON] * 100]
    with load(damage(artifact, tmp_path / "bad.dove", value), kv_blocks=KV_BLOCKS) as app:
        for _ in range(2):  # the second time in blocks that held the poison
            bad = [app.submit(prompt, **OPTIONS) for prompt in poisoned]
            good = [app.submit(prompt, **OPTIONS) for prompt in PROMPTS]
            for job in bad:
                with pytest.raises(RequestError, match="not finite"):
                    job.result()
            assert [tokens_of(job) for job in good] == expected
            pool = app.engine.scheduler.pool
            check_integrity(pool)
            assert pool.free_blocks == KV_BLOCKS and not app.engine.scheduler.busy
        with pytest.raises(RequestError, match="not finite"):
            app.generate([PROMPTS[0], poisoned[0]], **OPTIONS)
        with pytest.raises(RequestError, match="not finite"):
            app.generate(poisoned[0], temperature=1.0, top_p=0.9, top_k=7, seed=1)
        assert [list(d.token_ids) for d in app.generate(PROMPTS, **OPTIONS)] == expected


def test_a_poisoned_prompt_that_is_scored_fails_alone(artifact: Path, tmp_path: Path) -> None:
    """In the middle of a prompt, whose chunks give no token yet."""
    damaged = damage(artifact, tmp_path / "damaged.dove", float("nan"))
    long = [*range(3, 60), POISON, *range(3, 90)]
    with load(artifact) as app:
        expected = [score.sum for score in app.score(PROMPTS)]
    with load(damaged, kv_blocks=KV_BLOCKS) as app:
        lost = [app.submit(long, max_tokens=most, prompt_logprobs=1) for most in (0, 9)]
        found = [score.sum for score in app.score(PROMPTS)]
        assert found == pytest.approx(expected, abs=1e-3)
        for job in lost:
            with pytest.raises(RequestError, match="not finite"):
                job.result()
        check_integrity(app.engine.scheduler.pool)
        assert app.engine.scheduler.pool.free_blocks == KV_BLOCKS
