"""Rope tables against transformers' own, for every supported kind."""

import numpy as np
import pytest

from dovetail.compiler.families.rope import inverse_frequencies, read_rope, rope_tables
from dovetail.compiler.files.config import Config, parse_json_object
from dovetail.compiler.models.spec import read_model_spec
from dovetail.errors import SpecError
from tests.models import save_model

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, **LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn scaled": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn of zeros": {
        **{"factor": 4.0, "original_max_position_embeddings": 128},
        **{"mscale": 1.2, "mscale_all_dim": 0.0},
    },
    "yarn given": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 16), (500000.0, 80)])
def test_tables_equal_transformers(kind, theta, head_dim, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": kind.split()[0], "rope_theta": theta, **KINDS[kind]}
    path = save_model(tmp_path / "m", "llama", head_dim=head_dim, rope_parameters=rope)
    spec = read_model_spec(path)
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path))
    np.testing.assert_allclose(inverse_frequencies(spec.rope), reference.inv_freq, rtol=3e-7)
    positions = torch.arange(512)[None]
    wanted = [t[0, :, : head_dim // 2].numpy() for t in reference(torch.zeros(1), positions)]
    for got, want in zip(rope_tables(spec.rope, 512), wanted, strict=True):
        assert got.dtype == np.float32
        assert got.shape == (512, head_dim // 2)
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("context", [64, 200])
def test_longrope_has_divisors_of_the_context(context, tmp_path):
    """Those of training up to its length, as transformers has them for texts as long."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + i / 7 for i in range(24)],
        "long_factor": [1.5 + i for i in range(24)],
    }
    shape = {"hidden_size": 256, "original_max_position_embeddings": 64}
    path = save_model(tmp_path / "m", "phi3", rope_parameters=rope, **shape)
    spec = read_model_spec(path, max_context=context)
    reference = Phi3RotaryEmbedding(AutoConfig.from_pretrained(path))
    wanted = reference(torch.zeros(1), torch.arange(context)[None])
    for got, want in zip(rope_tables(spec.rope, context), wanted, strict=True):
        assert got.shape == (context, 24)
        np.testing.assert_allclose(got, want[0, :, :24].numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "theta", ["0", "-10000.0", "NaN", "Infinity", "-Infinity", "1" + "0" * 400]
)
@pytest.mark.parametrize(
    "config",
    [
        '{"rope_theta": %s}',
        '{"rope_theta": %s, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}',
        '{"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": %s}}',
    ],
)
def test_a_theta_that_makes_no_angles_is_refused_wherever_it_stands(config, theta):
    values = parse_json_object((config % theta).encode(), "config.json")
    with pytest.raises(SpecError, match=r"rope_theta is .* number between"):
        read_rope(Config("config.json", values), 64, 128)
