"""Families whose layers differ from Llama's give the same tokens on torch's CPU device."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from dovetail.runtime.app import load
from tests.runtime.accel.engines import ASKED, PROMPTS, TwoPools, make_artifact


@pytest.mark.parametrize(
    "family",
    [
        *("phi3", "smollm3", "gemma3", "gemma4", "granite", "qwen3_moe", "granitemoe", "gpt_oss"),
        *("qwen2_moe", "glm4_moe", "ernie4_5_moe", "olmo3", "exaone4", "hunyuan", "cohere2"),
        *("gemma2", "apertus"),
    ],
)
def test_a_device_gives_the_tokens_of_the_cpu(
    family: str, tmp_path: Path, two_pools: TwoPools
) -> None:
    compare(make_artifact(tmp_path, family), two_pools)


def test_experts_of_the_best_groups_are_those_of_the_cpu(
    tmp_path: Path, two_pools: TwoPools
) -> None:
    compare(make_artifact(tmp_path, "glm4_moe", n_group=4, topk_group=2), two_pools)


def compare(path: Path, two_pools: TwoPools) -> None:
    """Generate on the CPU and on a device."""
    with load(path, kv_blocks=200) as app:
        wanted = [done.token_ids for done in app.generate(PROMPTS, **ASKED)]
    for offload in ("off", "full"):
        with two_pools(path, 200, 200, offload=offload) as (app, plans):
            assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == wanted
            assert plans
