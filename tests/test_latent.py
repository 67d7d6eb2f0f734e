"""Latent attention in whole models: logits, prefixes, widths, a kept file of KV, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dovetail.runtime.app import load
from tests.models import LATENT, save_model
from tests.test_experts import compiled, logits
from tests.test_fidelity import load_exact, reference_logits

PROMPT = list(range(3, 90))


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
