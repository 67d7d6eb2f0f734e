"""MiniCPM3: latent attention, and multipliers by keys of its own.

In: config.json. Out: the same with the keys that other families have for that.
"""

from __future__ import annotations

import math

from dovetail.compiler.families.latent import INTERLEAVED
from dovetail.compiler.files.config import Config

MINICPM = "MiniCPM3ForCausalLM"


def minicpm_config(config: Config) -> Config:
    """Return a configuration of MiniCPM3 with Granite's multipliers; others pass unchanged."""
    if MINICPM not in config.texts("architectures"):
        return config
    hidden = config.integer("hidden_size", 1, 1 << 17)
    layers = config.integer("num_hidden_layers", 1, 1024)
    heads = config.integer("num_attention_heads", 1, 4096)
    told = {key: value for key, value in config.values.items() if value is not None}
    given = {
        INTERLEAVED: False,
        "v_head_dim": hidden // heads,
        **told,
        "embedding_multiplier": config.number("scale_emb", 1e-6, 1e6, 12.0),
        "residual_multiplier": _number(config, "scale_depth", 1.4, math.sqrt(layers))
        / math.sqrt(layers),
        "logits_scaling": hidden / _number(config, "dim_model_base", 256.0, hidden),
    }
    return Config(config.name, given)


def _number(config: Config, key: str, usual: float, without: float) -> float:
    """Return a number, or what null stands for."""
    if key in config.values and not config.has(key):
        return without
    return config.number(key, 1e-6, 1e6, usual)
