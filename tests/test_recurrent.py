"""Models with layers without keys: their files, states that prompts share, and limits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_model_spec
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import DovetailError, RequestError, SpecError
from dovetail.runtime.app import App, load
from dovetail.runtime.engine.executor import count_states
from dovetail.runtime.native.shard import split_model
from dovetail.runtime.schedule.device_limits import MemoryNeed
from dovetail.topology.configuration import allows_processes
from tests.dovetail.commands import dovetail
from tests.gguf_files import save_gguf
from tests.models import RECURRENT, save_model
from tests.runtime.schedule.integrity import check_integrity

GREEDY = {"max_tokens": 24, "ignore_eos": True}
WIDE = {
    "lfm2": {"hidden_size": 128, "block_multiple_of": 32, "num_attention_heads": 4},
    "lfm2_moe": {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4},
    "qwen3_5_moe": {"hidden_size": 128, "linear_num_value_heads": 6},
    "qwen3_5": {"hidden_size": 128, "intermediate_size": 192, "linear_num_value_heads": 6},
    "granite4_h": {"hidden_size": 128, "intermediate_size": 96, "shared_intermediate_size": 96},
    "granite4_h_moe": {"hidden_size": 128},
    "nemotron_h": {"hidden_size": 128},
    "falcon_h1": {"hidden_size": 128},
    "nemotron_h_moe": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
}


def made(folder: Path, family: str, **options: Any) -> Path:
    """Return a compiled model of random weights."""
    model = save_model(folder / "model", family, **WIDE[family])
    options = {"weight_dtype": "f32", "effort": "none", "max_step_tokens": 64, **options}
    return Path(compile_model(model, output=folder / "app.dove", **options).path)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 100) for _ in range(length)] for length in lengths]


def tokens(app: App, *asked: list[int], **options: Any) -> list[tuple[int, ...]]:
    return [done.token_ids for done in app.generate(list(asked), **{**GREEDY, **options})]


@pytest.fixture(scope="module", params=RECURRENT[:3])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("family", RECURRENT)
def test_a_gguf_file_gives_the_tokens_of_its_directory(family: str, tmp_path: Path) -> None:
    """Its converter stores value heads in another order, and what A_log stands for."""
    whole = made(tmp_path, family)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "model")
    other = compile_model(
        file, output=tmp_path / "gguf.dove", weight_dtype="f32", effort="none", max_step_tokens=64
    )
    asked = prompts(3, 50, 130)
    with load(whole) as app, load(other.path) as from_file:
        assert tokens(app, *asked) == tokens(from_file, *asked)


def test_a_layer_that_drafts_tokens_is_left_out(tmp_path: Path) -> None:
    """Files of Qwen3.5 may have one behind the others (MTP)."""
    folder = save_model(tmp_path / "model", "qwen3_5", **WIDE["qwen3_5"])

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.kv_data[0]["qwen35.block_count"].value += 1
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((8, 8), np.float32))
        writer.add_tensor("blk.4.attn_norm.weight", np.zeros(128, np.float32))

    source = open_model(save_gguf(tmp_path / "model.gguf", folder, change=change))
    spec = read_model_spec(source)
    assert spec.n_layers == 4 and spec.recurrent is not None
    assert spec.recurrent.layers == (True, True, True, False)


@pytest.mark.parametrize("family", RECURRENT[:3])
def test_a_quantised_file_keeps_its_formats(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", family, **WIDE[family])
    kinds = {"q_proj": "Q8_0", "v_proj": "Q4_0", "in_proj_z": "Q4_0", "in_proj_a": "F32"}

    def kind(name: str) -> str:
        return next((form for part, form in kinds.items() if part in name), "Q8_0")

    file = save_gguf(tmp_path / "model.gguf", folder, kind)
    spec = read_model_spec(open_model(file))
    assert spec.weight_dtype == "q8_32" and ("layers.0.rates" in dict(spec.formats)) == (
        family == "qwen3_5"
    )
    scores = []
    for form in ("f32", "auto"):
        out, how = tmp_path / f"{form}.dove", {"weight_dtype": form, "kv_dtype": "f32"}
        compile_model(file, output=out, effort="none", max_step_tokens=64, **how)
        with load(out, activations="float") as app:
            (score,) = app.score(prompts(90))
            scores.append([one for one in score.logprobs if one is not None])
    whole, kept = map(np.array, scores)
    np.testing.assert_allclose(kept, whole, atol=2e-3)


def test_a_prompt_goes_on_from_the_state_of_one_that_began_alike(artifact: Path) -> None:
    """Turns of a chat: behind the first prompt, and behind its answer."""
    (first, more, other) = prompts(100, 40, 30)
    with load(artifact, deterministic=True) as app:
        (answer,) = app.generate(first, **{**GREEDY, "max_tokens": 50})
        second = [*first, *answer.token_ids, *more]
        (again,) = app.generate(second, **GREEDY)
        assert again.metrics.cached_tokens == 144  # of 149 that were stored
        (branch,) = app.generate([*first, *other], **GREEDY)
        assert branch.metrics.cached_tokens == 64  # where the first step of the prompt ended
        check_integrity(app.engine.scheduler.pool)
    for asked, known in ((second, again), ([*first, *other], branch)):
        with load(artifact, deterministic=True) as app:
            (fresh,) = app.generate(asked, **GREEDY)
            assert fresh.metrics.cached_tokens == 0 and fresh.token_ids == known.token_ids


def test_samples_of_a_prompt_share_its_state(artifact: Path) -> None:
    (asked,) = prompts(90)
    with load(artifact, deterministic=True) as app:
        alone = tokens(app, asked)
    with load(artifact, deterministic=True) as app:
        found = app.generate(asked, n=3, **GREEDY)
        assert [one.token_ids for one in found] == alone * 3
        assert [one.metrics.cached_tokens for one in found] == [0, 48, 48]


def test_a_request_that_gave_way_is_computed_anew(artifact: Path) -> None:
    asked = prompts(40, 33, 64, 20, 90)
    with load(artifact, deterministic=True) as app:
        alone = [tokens(app, one, max_tokens=60)[0] for one in asked]
    with load(artifact, deterministic=True, kv_blocks=16) as app:
        found = app.generate(asked, **{**GREEDY, "max_tokens": 60})
        assert [one.token_ids for one in found] == alone
        assert any(one.metrics.preemptions for one in found)
        check_integrity(app.engine.scheduler)


def test_requests_wait_for_a_state(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "dovetail.runtime.engine.executor.count_states"
    asked = prompts(40, 33, 64, 20, 90)
    with load(artifact, deterministic=True) as app:
        alone = [tokens(app, one)[0] for one in asked]
    monkeypatch.setattr(where, lambda *_: 2)
    with load(artifact, deterministic=True) as app:
        assert app.engine.scheduler.pool.states.count == 2
        assert tokens(app, *asked) == alone
        check_integrity(app.engine.scheduler)


def test_states_take_a_part_of_the_memory() -> None:
    need = MemoryNeed(weights=100, block=1, activations=10, context=16)
    assert count_states(0, need, 10**6, 8) == 0
    assert count_states(10, need, 10**6, 8) == 16  # of all sequences, and as many prefixes
    assert count_states(10, need, need.total + 200, 8) == 6
    assert count_states(10, need, need.total - 5, 8) == 1


def test_what_goes_back_or_elsewhere_is_refused(artifact: Path, tmp_path: Path) -> None:
    for options in (
        {"speculative_config": {"num_speculative_tokens": 3}},
        {"draft": str(artifact)},
    ):
        with pytest.raises(RequestError, match="nothing can be drafted"):
            load(artifact, **options)
    with pytest.raises(RequestError, match="recurrent layers"):
        load(artifact, kv_file=str(tmp_path / "kv"))
    with pytest.raises(DovetailError, match="the CPU alone"):
        load(artifact, device="torch:cpu")
    spec = read_model_spec(artifact.parent / "model")
    assert allows_processes(spec, 1) and not allows_processes(spec, 2)
    with pytest.raises(SpecError, match="cannot be shared by processes"):
        split_model(spec, 0, 2)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("lfm2", {"layer_types": ["conv"]}, "layer_types"),
        ("lfm2", {"conv_L_cache": 99}, "conv_L_cache"),
        ("qwen3_5", {"linear_value_head_dim": 40}, "multiple of 32"),
        ("qwen3_5", {"linear_key_head_dim": 512}, "between 16 and 256"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "multiple of 2"),
        ("granite4_h", {"mamba_d_head": 8}, "a multiple of 16"),
        ("granite4_h", {"mamba_n_groups": 3}, "must divide the 8 heads"),
        ("granite4_h", {"time_step_limit": [0.0, 0.1]}, "steps without limits"),
    ],
)
def test_shapes_that_are_not_computed_are_refused(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(SpecError, match=message):
        read_model_spec(folder)


def test_inspect_tells_of_states(artifact: Path) -> None:
    (line,) = (
        x for x in dovetail("inspect", artifact, "--all").out.splitlines() if "a sequence" in x
    )
    rules = {"qwen3_5": "the gated delta rule", "granite4_h": "the scan of Mamba-2"}
    family = artifact.parent.name.rstrip("0")
    assert "states" in line and rules.get(family, "a gated convolution") in line
