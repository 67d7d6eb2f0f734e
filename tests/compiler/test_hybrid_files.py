"""Files of hybrids and of latent attention as they are published: what is read, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dovetail.codegen.targets import get_target
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_dimensions, read_model_spec, stored_dtype
from dovetail.ir.errors import SpecError
from dovetail.ir.model import weight_shapes
from dovetail.topology.contention import matrix_elements
from tests.compiler.models.test_merged_adapter import save_adapter
from tests.gguf_files import read_state, save_gguf
from tests.models import save_model
from tests.packed_files import save_packed

WIDE = {"hidden_size": 128, "intermediate_size": 256, "mamba_n_heads": 8, "mamba_d_ssm": 128}


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "int8"])
def test_codes_of_what_is_multiplied_are_refused(name: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", "falcon_h1", **WIDE)
    save_packed(source, tmp_path / "packed", name)
    with pytest.raises(SpecError, match="quantised checkpoints of Falcon-H1"):
        open_model(tmp_path / "packed").checkpoint()


def test_rows_of_fp8_are_multiplied(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", "falcon_h1", **WIDE)
    exact = save_packed(source, tmp_path / "packed", "fp8-rows")
    plain, name = open_model(source).checkpoint(), "model.layers.0.mlp.down_proj.weight"
    stored = exact[name.replace("mlp", "feed_forward")]
    factors = plain.floats(name) / read_state(source)[name.replace("mlp", "feed_forward")]
    found = open_model(tmp_path / "packed").checkpoint().floats(name)
    np.testing.assert_allclose(found, stored * factors, rtol=1e-2)


@pytest.mark.parametrize(
    ("family", "module", "message"),
    [
        ("falcon_h1", "layers.0.self_attn.o_proj", "merge this adapter"),
        ("youtu", "layers.0.self_attn.v_b_proj", "merge this adapter"),
    ],
)
def test_sums_are_not_added_to_what_is_changed_when_read(
    family: str, module: str, message: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "model", family)
    n, k = open_model(base).checkpoint().info(f"model.{module}.weight").shape
    name = f"base_model.model.model.{module}"
    pair = {f"{name}.lora_A.weight": np.ones((4, k), np.float32)}
    pair[f"{name}.lora_B.weight"] = np.ones((n, 4), np.float32)
    with pytest.raises(SpecError, match=message):
        open_model(save_adapter(tmp_path / "adapter", base, pair)).checkpoint()


@pytest.mark.parametrize("family", ["nemotron_h", "lfm2", "falcon_h1", "youtu"])
def test_a_configuration_alone_is_that_of_its_directory(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", family)
    alone = replace(read_dimensions(folder / "config.json"), eos_token_ids=(2,))
    assert alone == read_dimensions(folder)


@pytest.mark.parametrize("family", ["youtu", "falcon_h1", "llama"])
def test_float16_is_kept_where_nothing_is_quantised(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", family, dtype="float16")
    assert stored_dtype(open_model(folder).checkpoint()) == "f16"


@pytest.mark.parametrize("family", ["granite4_h", "glm4_lite"])
def test_files_of_bfloat16_stay_so_beside_parts_in_float32(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", family)

    def kind(name: str) -> str:
        return "F32" if name.endswith("mlp.gate.weight") else "BF16"

    file = save_gguf(tmp_path / "m.gguf", folder, kind)
    spec = read_model_spec(file, target=get_target("x86-64-avx2"))
    assert (spec.checkpoint_dtype, spec.weight_dtype) == ("bf16", "bf16")


def test_files_that_do_not_tell_of_sigmoids_have_them_by_their_tensors(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "glm4_lite")
    key = "deepseek2.expert_gating_func"
    file = save_gguf(tmp_path / "m.gguf", folder, change=lambda w: w.kv_data[0].pop(key))
    spec = read_model_spec(file)
    assert spec.experts is not None and spec.experts.sigmoid


def test_files_with_k_and_v_together_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "youtu")
    key = "deepseek2.attention.key_length_mla"
    file = save_gguf(tmp_path / "m.gguf", folder, change=lambda w: w.kv_data[0].pop(key))
    with pytest.raises(SpecError, match="take a newer file of this model"):
        read_model_spec(file)


def test_a_wrong_letter_of_nemotron_is_told_where_it_stands(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "nemotron_h")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("layers_block_type", "layer_types"):
        config.pop(key, None)
    path.write_text(json.dumps({**config, "hybrid_override_pattern": "M-X*M"}))
    with pytest.raises(SpecError, match="hybrid_override_pattern is"):
        read_dimensions(folder)


def test_plans_count_the_matrices_of_latent_attention(tmp_path: Path) -> None:
    spec = read_dimensions(save_model(tmp_path / "model", "youtu"))
    beside = ("embed", "norm", "cos", "sin")
    shapes = {n: s for n, s in weight_shapes(spec).items() if not n.endswith(beside)}
    assert matrix_elements(spec) == sum(n * k for n, k in shapes.values())
