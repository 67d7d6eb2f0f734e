"""Latent attention in whole models: logits, prefixes, widths, a kept file of KV, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dovetail.compiler.models.spec import read_model_spec
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.app import load
from tests.dovetail.commands import dovetail
from tests.gguf_files import save_gguf
from tests.models import LATENT, save_model
from tests.packed_files import save_packed
from tests.runtime.accel.engines import ASKED, make_artifact
from tests.test_experts import compiled, logits
from tests.test_fidelity import load_exact, reference_logits
from tests.test_gemma4 import check_rows, edit

PROMPT = list(range(3, 90))
RANKS = ("intermediate_size", "kv_lora_rank", "q_lora_rank")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", LATENT)
def test_logits_are_those_of_the_reference(
    family: str, deterministic: bool, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family)
    wanted = reference_logits(load_exact(folder), PROMPT)[-1]
    with load(compiled(folder, tmp_path, weight_dtype="f32"), deterministic=deterministic) as app:
        (got,) = logits(app, PROMPT)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_minicpm_scales_its_branches_and_need_not_tell_the_width_of_values(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "minicpm3")
    wanted = reference_logits(load_exact(folder), PROMPT)[-1]
    edit(folder, {"v_head_dim": None})
    with load(compiled(folder, tmp_path, weight_dtype="f32")) as app:
        (got,) = logits(app, PROMPT)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)
    edit(folder, {"scale_depth": None, "dim_model_base": None})  # as Hugging Face's defaults
    assert read_model_spec(folder).branch_scale == pytest.approx(1.4 / 2**0.5 / 12)


def test_a_quantised_checkpoint_is_refused_for_what_it_is(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "model", "minicpm3", **dict.fromkeys(RANKS, 64))
    save_packed(plain, tmp_path / "q", "bytes")
    with pytest.raises(SpecError, match="quantised checkpoints of this family are not supported"):
        read_model_spec(tmp_path / "q")


@pytest.mark.parametrize(
    ("family", "method"), [("deepseek2", "group_limited_greedy"), ("deepseek3", "noaux_tc")]
)
def test_experts_of_the_best_groups_compute_a_token(
    family: str, method: str, tmp_path: Path
) -> None:
    groups = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "topk_method": method}
    folder = save_model(tmp_path / "model", family, **groups)
    assert (spec := read_model_spec(folder)).experts is not None
    assert (spec.experts.groups, spec.experts.groups_used) == (4, 2)
    wanted = reference_logits(load_exact(folder), PROMPT)[-1]
    with load(compiled(folder, tmp_path, weight_dtype="f32")) as app:
        (got,) = logits(app, PROMPT)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_rows_of_prompts_in_pieces_beside_decodes_are_those_of_the_reference(
    tmp_path: Path,
) -> None:
    """Heads of 576 values, of which kernels have room for no more, and more rows than a tile."""
    wide = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_attention_heads": 8}
    folder = save_model(tmp_path / "model", "youtu", **wide, num_key_value_heads=8)
    exact, prompts = load_exact(folder), [PROMPT, PROMPT[30:], PROMPT[5:27]]
    steps = {"max_step_tokens": 48, "max_step_sequences": 8}
    with load(compiled(folder, tmp_path, weight_dtype="f32", **steps)) as app:
        check_rows(app, exact, prompts)


def test_quantised_and_narrow_weights_stay_near(tmp_path: Path) -> None:
    width = {"hidden_size": 128, "intermediate_size": 256, "kv_lora_rank": 64, "v_head_dim": 32}
    folder = save_model(tmp_path / "model", "glm4_lite", dtype="bfloat16", **width)
    wanted = reference_logits(load_exact(folder), PROMPT)[-1]
    for form, near in (("bf16", 0.05), ("int8", 0.15)):
        with load(compiled(folder, tmp_path, form, weight_dtype=form)) as app:
            (got,) = logits(app, PROMPT)
        assert np.linalg.norm(got - wanted) < near * np.linalg.norm(wanted)


def test_inspect_tells_over_what_heads_attend(tmp_path: Path) -> None:
    path = make_artifact(tmp_path, "youtu")
    assert "4 query heads over one vector of 64 values" in dovetail("inspect", path, "--all").out


def test_a_token_takes_one_vector_of_memory_and_a_file_keeps_it(tmp_path: Path) -> None:
    path = make_artifact(tmp_path, "deepseek3")
    answers, given = [], {"kv_file": str(tmp_path / "kv"), "kv_blocks": 64}
    for cached in (0, 80):
        with load(path, **given) as app:
            kv = app.engine.executor.model.kv
            assert (kv.k.nbytes, kv.v.nbytes) == (64 * 16 * 3 * (48 + 16) * 4, 0)
            (done,) = app.generate([PROMPT], **ASKED)
            answers.append(done.token_ids)
            assert done.metrics.cached_tokens == cached
    assert answers[0] == answers[1]


def test_processes_and_devices_are_refused(tmp_path: Path) -> None:
    phase, path = PhasePlan(threads=1, cpus=()), make_artifact(tmp_path, "youtu")
    with pytest.raises(SpecError, match="one process"):
        load(path, plan=ServicePlan(processes=2, prefill=phase, decode=phase))
    with pytest.raises(DeviceError, match="use device cpu"):
        load(path, device="torch:cpu")


# ---- files ----


@pytest.mark.parametrize("family", LATENT)
def test_a_gguf_file_gives_the_logits_of_its_model(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", family)
    wanted = reference_logits(load_exact(folder), PROMPT)[-1]
    file = save_gguf(tmp_path / "m.gguf", folder)
    with load(compiled(file, tmp_path, weight_dtype="f32")) as app:
        (got,) = logits(app, PROMPT)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_blocks_of_a_file_are_kept(tmp_path: Path) -> None:
    width = {"hidden_size": 128, "intermediate_size": 256, "v_head_dim": 32, "q_lora_rank": 64}
    width["kv_lora_rank"] = 64
    folder = save_model(tmp_path / "model", "youtu", **width)
    spec = read_model_spec(save_gguf(tmp_path / "m.gguf", folder, "Q4_0"))
    assert spec.weight_format("layers.1.keys") == spec.weight_format("layers.0.values") == "q4_32"
