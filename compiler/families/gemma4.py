"""What the text part of Gemma 4 has beside other families: its own keys of config.json.

In: a config.json, KV heads, layers and which of them have a window. Out: fields of a ModelSpec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dovetail.compiler.families.mixtures import Mixture, read_experts
from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError

Fields = dict[str, Any]
"""Fields of a ModelSpec."""
UNIFIED = "Gemma4UnifiedForCausalLM"
"""The one whose layers have nothing of their own of a token."""
WIDTH = 256
"""Values that each layer has of its own of a token, where config.json does not tell."""
_OF_LAYER = {"head_dim", "num_key_value_heads"}
"""Keys that a layer may have of its own in per_layer_config."""


def read_gemma4(config: Config, kv_heads: int, head_dim: int, local: Sequence[bool]) -> Fields:
    """Return the fields; local: of each layer, whether it has a window."""
    shared = config.integer("num_kv_shared_layers", 0, len(local) - 1, 0)
    own = local[: len(local) - shared]
    if set(own) != set(local):
        raise config.fail("num_kv_shared_layers", "but leaves no layer of a kind K and V to share")
    wide = config.flag("use_double_wide_mlp") and shared
    if wide and config.flag("enable_moe_block"):
        raise config.fail("use_double_wide_mlp", "but only false is supported beside experts")
    full = _full_heads(config, kv_heads, local)
    return {
        "full_heads": None if full == (kv_heads, head_dim) else full,
        "shared_kv": shared,
        "shared_inner": 2 * config.integer("intermediate_size", 1, 1 << 20) if wide else 0,
        "keys_as_values": config.flag("attention_k_eq_v"),
        "v_norm": True,
        "layer_inputs": _width(config),
        "layer_scale": True,
        "logits_cap": config.number("final_logit_softcapping", 0.0, 1e6, 0.0),
        "attention_scale": 1.0,
        "stream_scale": math.sqrt(config.integer("hidden_size", 1, 1 << 17)),
        **(_experts(config) if config.flag("enable_moe_block") else {}),
    }


def _experts(config: Config) -> Fields:
    """Return the fields of experts beside an MLP."""
    inner = config.integer("moe_intermediate_size", 1, 1 << 20)
    named = replace(config, aliases={"num_experts_per_tok": "top_k_experts"})
    hidden = config.integer("hidden_size", 1, 1 << 17)
    given = {"hidden": hidden, "inner": inner, "n_layers": 0}
    return {
        "experts": read_experts(named, Mixture(), dense="intermediate_size", **given),
        "intermediate_size": inner,
        "dense_inner": config.integer("intermediate_size", 1, 1 << 20),
    }


def _full_heads(config: Config, kv_heads: int, local: Sequence[bool]) -> tuple[int, int]:
    """Return KV heads and head_dim of layers without a window.

    Newer files tell them layer by layer in per_layer_config.
    """
    given = config.values.get("per_layer_config")
    if given is None:
        own = config.flag("attention_k_eq_v")
        others = config.integer("num_global_key_value_heads", 1, 4096, kv_heads)
        return (others if own else kv_heads), config.integer("global_head_dim", 1, 1 << 17, 512)
    layers = {str(layer) for layer, windowed in enumerate(local) if not windowed}
    numbers = [key.lstrip("0") or "0" for key in given] if isinstance(given, dict) else []
    if len(numbers) != len(layers) or set(numbers) != layers:
        raise config.fail("per_layer_config", "but must be of the layers without a window alone")
    kinds = [config.section("per_layer_config").section(layer) for layer in given]
    if any(kind.values != kinds[0].values or set(kind.values) - _OF_LAYER for kind in kinds):
        raise config.fail("per_layer_config", "but only equal heads in all its layers are read")
    if not kinds:
        return kv_heads, config.integer("head_dim", 1, 1 << 17, 256)
    heads = kinds[0].integer("num_key_value_heads", 1, 4096, kv_heads)
    return heads, kinds[0].integer("head_dim", 1, 1 << 17, config.integer("head_dim", 1, 1 << 17))


def _width(config: Config) -> int:
    """Return the values that each layer has of its own of a token."""
    key = "hidden_size_per_layer_input"
    plain = UNIFIED in config.texts("architectures")
    told = key in config.values and config.values[key] is None
    width = 0 if plain or told else config.integer(key, 0, 1 << 16, WIDTH)
    rows, key = config.integer("vocab_size", 1, 1 << 24), "vocab_size_per_layer_input"
    if width and config.integer(key, 1, 1 << 24, 262144) != rows:
        raise SpecError(f"{config.name}: {key} must be vocab_size, {rows}")
    return width
