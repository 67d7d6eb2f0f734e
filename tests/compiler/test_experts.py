"""Experts of checkpoints that are not what they say, and of those that others quantised."""

from pathlib import Path

import pytest

from dovetail.compiler.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.experts import MOST_EXPERTS, expert_tensors
from dovetail.compiler.model_spec import read_model_spec
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from tests.models import save_model
from tests.packed_files import save_packed
from tests.test_experts import SHAPE


@pytest.mark.parametrize("shape", [(1 << 60, 0, 9), (MOST_EXPERTS + 1, 2, 1), (0, 2, 1), (4, 3, 1)])
def test_no_header_makes_more_experts_than_there_may_be(shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    info = TensorInfo(name, Path("m.safetensors"), DTYPES["f32"], shape, 0, 0, "F32")
    with pytest.raises(SpecError, match=r"gate_up_proj of shape .* is no experts"):
        expert_tensors(Checkpoint(Path("m"), {name: info}))


def test_a_router_beside_packed_experts_keeps_its_values(tmp_path: Path) -> None:
    save_packed(save_model(tmp_path / "m", "qwen3_moe", **SHAPE), tmp_path / "q", "gptq")
    spec = read_model_spec(tmp_path / "q")
    formats = [spec.weight_format(f"layers.1.{name}") for name in ("router", "gate_up", "down")]
    assert formats == ["f32", "q4_32", "q4_32"]
