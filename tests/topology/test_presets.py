from __future__ import annotations

import pytest

from dovetail.ir.errors import SpecError
from dovetail.topology.contention import matrix_elements
from dovetail.topology.presets import PRESETS, preset_model


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3-8b", 8.03e9), ("tinyllama", 1.10e9), ("llama-160m", 162e6), ("llama-2-7b", 6.74e9)],
)
def test_parameters_are_those_of_the_model_cards(name: str, parameters: float) -> None:
    model = preset_model(name)
    embedding = model.vocab_size * model.hidden_size
    assert matrix_elements(model) + embedding == pytest.approx(parameters, rel=0.01)


def test_names_and_dtypes() -> None:
    assert all(preset_model(name.upper()).n_heads for name in PRESETS)
    assert preset_model("tinyllama", weight_dtype="f32").weight_dtype == "f32"
    with pytest.raises(SpecError, match="known without files: llama-160m"):
        preset_model("gpt")
    with pytest.raises(SpecError, match="choose f32 or bf16"):
        preset_model("tinyllama", weight_dtype="i8")
