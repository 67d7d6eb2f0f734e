"""Deterministic loads: the bits of logits in any batch, chunks, threads, memory and processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import ArtifactError
from dovetail.runtime.app import load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.native.deterministic import adapt_part
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.tiny_world import LLAMA
from dovetail.topology.hardware import read_hardware
from tests.models import save_model

_draw = random.Random(3)
PROMPTS = [[_draw.randrange(2, 90) for _ in range(n)] for n in (70, 1, 33, 16, 5, 120, 17)]
TOKENS = 12
HEADS4 = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}
BIASES = {"attention_bias": True, "mlp_bias": True, "intermediate_size": 333}
TIED = {"tie_word_embeddings": True}  # the same kernels as the tiny world's
SMALL, LARGE = 24, 256
"""Tokens in a step: what cuts the prompts, and what takes all of them at once."""

Bits = dict[int, list[bytes]]


def plan(processes: int, threads: int = 1) -> ServicePlan:
    phase = PhasePlan(threads=threads, cpus=())
    return ServicePlan(processes=processes, prefill=phase, decode=phase, kv_blocks=200)


def make_model(folder: Path, name: str) -> Path:
    if name == "llama":
        return LLAMA
    return save_model(folder / "model", "llama", **HEADS4, **BIASES, **TIED)


@pytest.fixture(scope="module", params=["llama-f32", "llama-bf16", "4kv-f32", "4kv-bf16"])
def artifacts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """One model, compiled for small and for large steps."""
    name, dtype = request.param.rsplit("-", 1)
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, name)
    made = {}
    for tokens in (SMALL, LARGE):
        made[tokens] = folder / f"{tokens}.dove"
        limits = {"max_step_tokens": tokens, "max_step_sequences": 8, "max_context": 256}
        compile_model(model, output=made[tokens], effort="none", weight_dtype=dtype, **limits)
    return made


def logits(
    path: Path, batches: Sequence[Sequence[int]], *, max_tokens: int = TOKENS, **options: Any
) -> tuple[Bits, int]:
    """Return the bits of every step's logits of each prompt, and how often one was preempted."""
    found: Bits = {}
    preempted = 0
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with load(path, **{"plan": plan(1), "deterministic": True, **options}) as app:
        for batch in batches:
            numbers = {app.engine.submit(PROMPTS[i], params)[0].id: i for i in batch}
            while app.engine.scheduler.busy:
                for row, request in enumerate(app.engine.step()):
                    bits = found.setdefault(numbers[request.id], [])
                    bits.append(app.engine.executor.buffers.logits(row).tobytes())
                    done = len(bits) == max_tokens
                    preempted += request.metrics.preemptions if done else 0
    return found, preempted


ALONE = [[i] for i in range(len(PROMPTS))]
TOGETHER = [list(range(len(PROMPTS)))]
SOME = [[5, 1, 0], [2, 6, 4, 3]]
CASES: dict[str, tuple[int, list[list[int]], dict[str, Any]]] = {
    "batch": (LARGE, TOGETHER, {}),
    "other batches": (LARGE, SOME, {}),
    "chunks": (SMALL, ALONE, {}),
    "chunks in a batch": (SMALL, TOGETHER, {}),
    "threads": (LARGE, SOME, {"plan": plan(1, 2)}),
    "2 processes": (SMALL, TOGETHER, {"plan": plan(2)}),
}


def test_logits_have_the_same_bits(artifacts: dict[int, Path]) -> None:
    alone, _ = logits(artifacts[LARGE], ALONE)
    assert [len(alone[i]) for i in range(len(PROMPTS))] == [TOKENS] * len(PROMPTS)
    for case, (tokens, batches, options) in CASES.items():
        assert logits(artifacts[tokens], batches, **options)[0] == alone, case


def test_kept_prefixes_give_the_same_bits(artifacts: dict[int, Path]) -> None:
    found, _ = logits(artifacts[SMALL], [[0, 5], [5], [0]])
    for i in (0, 5):
        assert found[i][:TOKENS] == found[i][TOKENS:]


def test_preempted_requests_begin_anew_with_the_same_bits(artifacts: dict[int, Path]) -> None:
    """What they had generated goes through the prompt's kernels the second time."""
    few = [4, 3, 6]
    alone, _ = logits(artifacts[LARGE], [[i] for i in few], max_tokens=40)
    found, preempted = logits(artifacts[SMALL], [few], max_tokens=40, kv_blocks=7)
    assert preempted > 0 and found == alone


def test_any_other_number_of_processes(artifacts: dict[int, Path]) -> None:
    kv_heads = 4 if "4kv" in artifacts[LARGE].parent.name else 3
    alone, _ = logits(artifacts[LARGE], ALONE)
    assert logits(artifacts[LARGE], TOGETHER, plan=plan(kv_heads))[0] == alone


def test_the_mode_is_what_makes_them_so(artifacts: dict[int, Path]) -> None:
    """Without it two processes add K in two parts, and so get other bits."""
    options = {"deterministic": False}
    whole, parted = (logits(artifacts[LARGE], TOGETHER, plan=plan(n), **options)[0] for n in (1, 2))
    assert whole != parted


def test_logits_are_those_of_any_load(artifacts: dict[int, Path]) -> None:
    """But for rounding: bfloat16 models round activations in decodes as in prompts."""
    bound = 1e-5 if "f32" in artifacts[LARGE].parent.name else 2e-2
    fixed, plain = (
        logits(artifacts[LARGE], [[0]], deterministic=d)[0][0][0] for d in (True, False)
    )
    a, b = (np.frombuffer(bits, np.float32) for bits in (fixed, plain))
    assert np.abs(a - b).max() <= bound * np.abs(b).max()


def test_an_artifact_without_the_kernels_says_what_to_do(artifacts: dict[int, Path]) -> None:
    artifact = open_artifact(artifacts[SMALL], read_hardware())
    (part,) = artifact.models.values()
    kept = [k for k in artifact.kernels.kernels if k.family != "decode_attention_rows"]
    older = replace(artifact, kernels=structs.replace(artifact.kernels, kernels=tuple(kept)))
    with pytest.raises(ArtifactError, match=r"decode_attention_rows .*run `dovetail compile MODEL"):
        adapt_part(older, part, floats=False, fixed=True)
