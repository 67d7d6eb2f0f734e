"""Types, attention and graphs as a device gets them by default are near float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.accel import profile
from dovetail.runtime.app import load
from tests.models import save_model
from tests.runtime.accel.engines import ASKED, LIMITS, PROMPTS

NEAR = 0.05
"""Of a token's log probability. A bf16 value keeps 8 bits, 0.004 of itself; logits here are of the
size of 1, and the errors of some ten products add up to a few times that."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of bf16 weights, as checkpoints have them, served as such and as float32."""
    folder = tmp_path_factory.mktemp("defaults")
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_model(folder / "model", "llama", dtype="bfloat16", **heads)
    options: dict[str, Any] = {"effort": "none", "max_step_tokens": 64, "max_context": 256}
    found = {dtype: folder / f"{dtype}.dove" for dtype in ("f32", "bf16")}
    for dtype, path in found.items():
        compile_model(folder / "model", output=path, weight_dtype=dtype, **options)
    return found


@pytest.mark.timeout(1800)  # a GPU's attention may be compiled for minutes
@pytest.mark.parametrize("offload", ["off", "full"])
def test_tokens_are_as_likely_as_on_the_cpu_in_float32(
    artifacts: dict[str, Path], offload: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "BUDGET", 0.2)
    given: dict[str, Any] = {"device": accelerator, "gpu_blocks": 100, "kv_blocks": 100, **LIMITS}
    with load(artifacts["bf16"], offload=offload, **given) as app:
        found = app.generate(PROMPTS, logprobs=0, **ASKED)
        dtype = app.engine.executor.pair.model.dtype
        assert dtype.itemsize == 2
    with load(artifacts["f32"], kv_blocks=200) as app:
        whole = [[*p, *one.token_ids] for p, one in zip(PROMPTS, found, strict=True)]
        scores = app.score(whole)
    for prompt, one, score in zip(PROMPTS, found, scores, strict=True):
        told = [token.logprob for token in one.logprobs or ()]
        assert told == pytest.approx(list(score.logprobs[len(prompt) :]), abs=NEAR)
