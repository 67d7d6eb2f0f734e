"""Gemma 4 in whole models: capped logits, files as published, quantised, on devices, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dovetail.compiler.input_powers import run_windows
from dovetail.compiler.models.spec import read_dimensions, read_model_spec
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import SpecError
from dovetail.runtime.app import App, load
from tests.gguf_files import save_gguf
from tests.models import make_model, save_model
from tests.runtime.accel.engines import ASKED, PROMPTS, make_artifact, two_pools
from tests.test_experts import compiled, logits
from tests.test_fidelity import BESIDE, ONE_PROJECTION, load_exact, reference_logits

PROMPT = list(range(3, 90))
KINDS = {"inputs": {}, "projection": ONE_PROJECTION, "experts": BESIDE}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_reference(kind: str, deterministic: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "gemma4", **KINDS[kind])
    wanted = reference_logits(load_exact(folder), PROMPT)[-1]
    with load(compiled(folder, tmp_path, weight_dtype="f32"), deterministic=deterministic) as app:
        (got,) = logits(app, PROMPT)
    assert np.abs(wanted).max() < 5
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_every_row_of_prompts_beside_decodes_is_scored(tmp_path: Path) -> None:
    """Layers without K and V compute only these rows, each like a decode of its own length."""
    folder = save_model(tmp_path / "model", "gemma4")
    exact, prompts = load_exact(folder), [PROMPT, PROMPT[30:], PROMPT[5:27]]
    steps = {"max_step_tokens": 48, "max_step_sequences": 8}
    path = compiled(folder, tmp_path, weight_dtype="f32", **steps)
    with load(path) as app:
        check_rows(app, exact, prompts)


def check_rows(app: App, exact: Any, prompts: Sequence[list[int]]) -> None:
    """Compare the scores of all rows of prompts, and six tokens behind each, with a reference."""
    jobs = app.submit_all(prompts, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
    found = [job.result() for job in jobs]
    for prompt, done in zip(prompts, found, strict=True):
        wanted = reference_logits(exact, [*prompt, *done.token_ids])
        wanted -= np.log(np.exp(wanted).sum(-1, keepdims=True))
        scores = [wanted[at - 1, prompt[at]] for at in range(1, len(prompt))]
        got = [one.logprob for one in done.prompt_logprobs if one]
        np.testing.assert_allclose(got, scores, rtol=0, atol=2e-5)
        assert list(done.token_ids) == list(wanted[len(prompt) - 1 : -1].argmax(-1))


def test_quantised_and_narrow_weights_stay_near(tmp_path: Path) -> None:
    width = {"hidden_size": 128, "intermediate_size": 256, "hidden_size_per_layer_input": 32}
    folder = save_model(tmp_path / "model", "gemma4", dtype="bfloat16", **width)
    wanted = reference_logits(load_exact(folder), PROMPT)[-1]
    for form, near in (("bf16", 0.05), ("int8", 0.15)):
        with load(compiled(folder, tmp_path, form, weight_dtype=form)) as app:
            (got,) = logits(app, PROMPT)
        assert np.linalg.norm(got - wanted) < near * np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", ["projection", "experts"])
def test_a_device_gives_the_tokens_of_the_cpu(kind: str, tmp_path: Path) -> None:
    path = make_artifact(tmp_path, "gemma4", **KINDS[kind])
    with load(path, kv_blocks=200) as app:
        wanted = [done.token_ids for done in app.generate(PROMPTS, **ASKED)]
    with two_pools(path, 200, 200, offload="full") as (app, _):
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == wanted


def test_a_file_keeps_kv_of_layers_of_several_sizes(tmp_path: Path) -> None:
    path = make_artifact(tmp_path, "gemma4")
    answers, given = [], {"kv_file": str(tmp_path / "kv"), "kv_blocks": 64}
    for cached in (0, 80):
        with load(path, **given) as app:
            (done,) = app.generate([PROMPT], **ASKED)
            answers.append(done.token_ids)
            assert done.metrics.cached_tokens == cached
    assert answers[0] == answers[1]


def test_processes_cannot_share_its_layers(tmp_path: Path) -> None:
    phase = PhasePlan(threads=1, cpus=())
    plan = ServicePlan(processes=2, prefill=phase, decode=phase)
    with pytest.raises(SpecError, match="one process"):
        load(make_artifact(tmp_path, "gemma4"), plan=plan)


# ---- files ----


def edit(folder: Path, values: Mapping[str, Any]) -> Path:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_files_may_tell_heads_as_published_ones_do(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    folder = save_model(tmp_path / "m", "gemma4", **ONE_PROJECTION)
    spec = read_model_spec(folder)
    assert spec.full_heads == (1, 512) and spec.qkv_rows(1) == (4 * 512, 512, 512)
    told = {"per_layer_config": None, "global_head_dim": 512, "num_global_key_value_heads": 1}
    assert read_model_spec(edit(folder, told)) == spec

    folder = save_model(tmp_path / "n", "gemma4")
    spec, file = read_model_spec(folder), folder / "model.safetensors"
    assert [spec.kv_layer(i) for i in range(5)] == [0, 1, 2, 2, 1]
    assert [spec.layer_inner(i) for i in range(5)] == [120, 120, 120, 240, 240]
    state = safetensors.load_file(file)
    for name in ("k_proj", "v_proj", "k_norm"):  # layers that share have them, and use them not
        at = "model.layers.{}.self_attn." + name + ".weight"
        state[at.format(3)] = state[at.format(2)].clone()
    safetensors.save_file(state, file, {"format": "pt"})
    assert read_model_spec(folder) == spec


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_is_the_same_model(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "gemma4", **KINDS[kind])
    file = save_gguf(tmp_path / "m.gguf", folder)
    ours, wanted = read_model_spec(file), read_model_spec(folder)
    assert replace(ours, eos_token_ids=(), bos_token_id=None) == replace(
        wanted, eos_token_ids=(), bos_token_id=None
    )
    answers = []
    for name, source in (("a", folder), ("b", file)):
        with load(compiled(source, tmp_path, name, weight_dtype="f32")) as app:
            answers.append(logits(app, PROMPT)[0])
    np.testing.assert_array_equal(answers[0], answers[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "layers without a window"),
        (
            {"per_layer_config": {"1": {"head_dim": 32}, "4": {"head_dim": 64}}},
            "only equal heads",
        ),
        ({"per_layer_config": {"1": {"rms": 1}, "4": {"rms": 1}}}, "only equal heads"),
        ({"per_layer_config": {"1": {"head_dim": 1024}, "4": {"head_dim": 1024}}}, "up to 576"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input must be vocab_size"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"enable_moe_block": True}, "use_double_wide_mlp"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"rope_parameters": None}, "rope_parameters"),
    ],
)
def test_what_is_not_computed_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = edit(save_model(tmp_path / "m", "gemma4"), values)
    with pytest.raises(SpecError, match=message):
        read_dimensions(folder / "config.json")


@pytest.mark.parametrize(("of", "window"), [("Gemma4", 512), ("Gemma4Unified", 1024)])
def test_a_window_that_is_not_told(of: str, window: int, tmp_path: Path) -> None:
    told = {"architectures": [f"{of}ForCausalLM"], "sliding_window": None}
    folder = edit(save_model(tmp_path / "m", "gemma4"), told)
    assert read_dimensions(folder / "config.json").sliding_window == window
    transformers = pytest.importorskip("transformers")
    assert getattr(transformers, f"{of}TextConfig")().sliding_window == window


@pytest.mark.parametrize("whole", ["Gemma4", "Gemma4Unified"])
def test_the_text_part_of_a_model_of_pictures(whole: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import transformers

    inputs = KINDS["inputs"] if whole == "Gemma4" else ONE_PROJECTION
    text = make_model("gemma4", seed=5, **inputs)
    config = getattr(transformers, f"{whole}TextConfig")(**text.config.to_dict())
    make = getattr(transformers, f"{whole}ForConditionalGeneration")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    parts = {"vision_config": vision if whole == "Gemma4" else None, "audio_config": None}
    model = make(getattr(transformers, f"{whole}Config")(text_config=config, **parts)).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path / "whole")
    wanted = reference_logits(text.double(), PROMPT)[-1]
    report = compile_model(
        tmp_path / "whole", output=tmp_path / "app.dove", effort="none", weight_dtype="f32"
    )
    with load(report.path) as app:
        (got,) = logits(app, PROMPT)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_calibration_sees_every_row_of_layers_without_keys(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = save_model(tmp_path / "model", "gemma4")
    powers = run_windows(compiled(folder, tmp_path, weight_dtype="f32"), [PROMPT], lambda *_: None)
    exact, seen = load_exact(folder), list[Any]()
    exact.model.layers[3].mlp.down_proj.register_forward_pre_hook(
        lambda _, given: seen.append(given[0][0])
    )
    with torch.no_grad():
        exact(torch.tensor([PROMPT]), use_cache=False)
    wanted = seen[0][:-1].square().mean(0).numpy()  # the last row scores no token
    np.testing.assert_allclose(powers["layers.3.down"], wanted, rtol=1e-3)
