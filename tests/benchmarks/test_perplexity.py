"""The rotated copy of a model has its logits; ratios are what they are said to be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.compiler.models.source import ModelDirectory
from tests.models import make_model, save_model
from tests.repository import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "benchmarks"))

import off_grid
import perplexity


@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_off_the_grid_has_the_logits_of_the_model(tied: bool, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "llama", tie_word_embeddings=tied)
    import torch

    model = make_model("llama", tie_word_embeddings=tied).double()
    copy = make_model("llama", tie_word_embeddings=False).double()
    tensors = dict(off_grid.rotate(ModelDirectory(path), seed=3))
    copy.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()})
    ids = torch.arange(2, 60)[None]
    with torch.no_grad():
        wanted, found = model(ids).logits.numpy(), copy(ids).logits.numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
    stored = model.state_dict()
    assert all(
        np.abs(values - stored[name].numpy()).max() > 1e-3
        for name, values in tensors.items()
        if name in stored and values.ndim == 2
    )


def cell(
    side: str, weights: str, activations: str, perplexity: float, **more: Any
) -> dict[str, Any]:
    found = {"side": side, "weights": weights, "activations": activations, "calibrated": False}
    return found | {"perplexity": perplexity, "bytes": 100} | more


def test_losses_are_over_each_sides_own_float() -> None:
    rows = [
        cell("llama.cpp", "F32", "own", 10.0),
        cell("llama.cpp", "Q4_0", "own", 12.0),
        cell("dovetail", "f32", "float", 20.0),
        cell("dovetail", "int4", "float", 21.0),
        cell("dovetail", "int4", "integer", 22.0, bytes=98),
    ]
    assert perplexity.summarise(rows) == pytest.approx(
        {
            "perplexity_vs_llamacpp_int4": 1.1 / 1.2,
            "increase_int4": 10.0,
            "increase_Q4_0": 20.0,
            "integer_activations_int4": 22 / 21,
            "bytes_vs_llamacpp_int4": 0.98,
        }
    )


def test_estimates_are_read_as_llamacpp_prints_them() -> None:
    found = perplexity._ESTIMATE.search(
        "x\n11.07.797.255 I Final estimate: PPL = 17.3305 +/- 0.51401\n"
    )
    assert found and (found[1], found[2]) == ("17.3305", "0.51401")
