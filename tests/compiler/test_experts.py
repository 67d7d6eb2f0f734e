"""Experts of checkpoints that are not what they say."""

from pathlib import Path

import pytest

from dovetail.compiler.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.experts import MOST_EXPERTS, expert_tensors
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError


@pytest.mark.parametrize("shape", [(1 << 60, 0, 9), (MOST_EXPERTS + 1, 2, 1), (0, 2, 1), (4, 3, 1)])
def test_no_header_makes_more_experts_than_there_may_be(shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    info = TensorInfo(name, Path("m.safetensors"), DTYPES["f32"], shape, 0, 0, "F32")
    with pytest.raises(SpecError, match=r"gate_up_proj of shape .* is no experts"):
        expert_tensors(Checkpoint(Path("m"), {name: info}))
