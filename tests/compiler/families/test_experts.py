"""Experts of checkpoints that are not what they say, and of those that others quantised."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dovetail.compiler.families.experts import MOST_EXPERTS, expert_tensors
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_model_spec
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from tests.models import save_model
from tests.packed_files import save_mxfp4, save_packed
from tests.test_experts import SHAPE


@pytest.mark.parametrize("shape", [(1 << 60, 0, 9), (MOST_EXPERTS + 1, 2, 1), (0, 2, 1), (4, 3, 1)])
def test_no_header_makes_more_experts_than_there_may_be(shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    info = TensorInfo(name, Path("m.safetensors"), DTYPES["f32"], shape, 0, 0, "F32")
    with pytest.raises(SpecError, match=r"gate_up_proj of shape .* is no experts"):
        expert_tensors(Checkpoint(Path("m"), {name: info}))


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    for family, change in (("glm4_moe", {"num_hidden_layers": 2}), ("ernie4_5_moe", {})):
        folder = save_model(tmp_path / family, family)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        if not change:
            state = load_file(folder / "model.safetensors")
            state["model.mtp_block.0.mlp.up_proj.weight"] = state["model.norm.weight"]
            save_file(state, folder / "model.safetensors")
        assert read_model_spec(folder).n_layers == 2


def test_a_router_beside_packed_experts_keeps_its_values(tmp_path: Path) -> None:
    save_packed(save_model(tmp_path / "m", "qwen3_moe", **SHAPE), tmp_path / "q", "gptq")
    spec = read_model_spec(tmp_path / "q")
    formats = [spec.weight_format(f"layers.1.{name}") for name in ("router", "gate_up", "down")]
    assert formats == ["f32", "q4_32", "q4_32"]


def test_rows_of_gpt_oss_are_those_of_its_experts(tmp_path: Path) -> None:
    exact = save_mxfp4(save_model(tmp_path / "m", "gpt_oss", **OSS), tmp_path / "q")
    checkpoint = open_model(tmp_path / "q").checkpoint()
    layer, own = "model.layers.1.mlp", "model.layers.1.mlp.experts.4"
    whole, down = exact[f"{layer}.experts.gate_up_proj"], exact[f"{layer}.experts.down_proj"]
    biases = exact[f"{layer}.experts.gate_up_proj_bias"]
    wanted = {
        f"{own}.gate_proj.weight": whole[4, :, ::2].T,
        f"{own}.up_proj.weight": whole[4, :, 1::2].T,
        f"{own}.down_proj.weight": down[4].T,
        f"{own}.gate_proj.bias": biases[4, ::2],
        f"{own}.up_proj.bias": biases[4, 1::2],
        f"{layer}.gate.bias": exact[f"{layer}.router.bias"],
    }
    for name, values in wanted.items():
        info = checkpoint.info(name)
        np.testing.assert_array_equal(info.dtype.widen(checkpoint.load(name)), values)
        part = info.dtype.widen(checkpoint.rows(name, 2, 5))
        np.testing.assert_array_equal(part, values[2:5])


OSS = {"hidden_size": 64, "intermediate_size": 32}
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"
DAMAGES: dict[str, tuple[str, Any]] = {
    "no scales": (BLOCKS.replace("blocks", "scales"), lambda _: None),
    "fewer scales": (BLOCKS.replace("blocks", "scales"), lambda v: v[:, :, :0]),
    "type": (BLOCKS, lambda v: v.astype(np.int32)),
    "halves of blocks": (BLOCKS, lambda v: v[..., :8]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_blocks_without_their_scales_are_refused(damage: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch
    from safetensors.torch import load_file, save_file

    save_mxfp4(save_model(tmp_path / "m", "gpt_oss", **OSS), tmp_path / "q")
    path, (name, change) = tmp_path / "q" / "model.safetensors", DAMAGES[damage]
    tensors = load_file(path)
    changed = change(tensors.pop(name).numpy())
    if changed is not None:
        tensors[name] = torch.from_numpy(np.ascontiguousarray(changed))
    save_file(tensors, path)
    with pytest.raises(SpecError, match=r"down_proj_blocks and .* are no blocks of MXFP4"):
        read_model_spec(tmp_path / "q")
