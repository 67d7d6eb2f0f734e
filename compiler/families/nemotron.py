"""Nemotron-H: layers of one kind each, a state, attention or an MLP, by the names of most families.

In: config.json and tensors. Out: the same with other keys and names; others pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dovetail.compiler.families.gemma4 import Fields
from dovetail.compiler.families.recurrent import LINEAR, OLD_KINDS
from dovetail.compiler.families.rope import FULL
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config

NEMOTRON = "NemotronHForCausalLM"
MLP, MOE = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
_KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "mlp_hidden_act": "hidden_act",
    "attention_head_dim": "head_dim",
    "layer_norm_epsilon": "rms_norm_eps",
}
_MODULES = {LINEAR: "mamba", FULL: "self_attn", MLP: "mlp", MOE: "mlp"}
"""Kind of a layer to what most families call its module; its norm is the first one's."""
_WHOLE = {"embeddings.weight": "embed_tokens.weight", "norm_f.weight": "norm.weight"}
_NAME = re.compile(r"(?:backbone|model)\.(?:layers\.(\d+)\.(norm|mixer)\.)?(.+)")


def nemotron_config(config: Config) -> Config:
    """Return a configuration of Nemotron-H with the keys of most families."""
    if NEMOTRON not in config.texts("architectures"):
        return config
    kinds = _kinds(config)
    given = {ours: config.values[key] for key, ours in _KEYS.items() if config.has(key)}
    heads = config.integer("mamba_num_heads", 1, 4096, 128)
    given["mamba_d_ssm"] = heads * config.integer("mamba_head_dim", 1, 1 << 12, 64)
    given |= {"num_hidden_layers": len(kinds), "layer_types": kinds}
    if MOE not in kinds:
        given["n_routed_experts"] = 0
    return Config(config.name, {**config.values, **given})


def read_alone(config: Config, _kv_heads: int, _head_dim: int, _windows: Sequence[bool]) -> Fields:
    """Return which layers are MLPs alone; the others have none."""
    return {"mlp_alone": tuple(kind in (MLP, MOE) for kind in config.texts("layer_types"))}


def nemotron_dense(config: Config, _n_layers: int) -> tuple[bool, ...]:
    """Return which layers have no experts."""
    return tuple(kind != MOE for kind in config.texts("layer_types"))


def nemotron_tensors(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Return the tensors of Nemotron-H by the names of most families."""
    if NEMOTRON not in config.texts("architectures"):
        return checkpoint
    kinds, found = config.texts("layer_types"), {}
    for name, info in checkpoint.tensors.items():
        own = _name(name, kinds)
        found[own] = replace(info, name=own)
    return replace(checkpoint, tensors=found)


def _name(name: str, kinds: Sequence[str]) -> str:
    parts = _NAME.fullmatch(name)
    if parts is None or (parts[1] and int(parts[1]) >= len(kinds)):
        return name
    if parts[1] is None:
        return f"model.{_WHOLE.get(parts[3], parts[3])}"
    module = _MODULES[kinds[int(parts[1])]] if parts[2] == "mixer" else "input_layernorm"
    return f"model.layers.{parts[1]}.{module}.{parts[3]}"


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer: a list, or a letter for each."""
    letters, lists = "hybrid_override_pattern", ("layers_block_type", "layer_types")
    key = next((key for key in (*lists, letters) if config.has(key)), lists[0])
    listed = config.text(key) if key == letters else config.texts(key)
    found = [OLD_KINDS.get(name, _LETTERS.get(name, name)) for name in listed]
    if not found or not set(found) <= set(_MODULES):
        raise config.fail(key, f"but must name {', '.join(_MODULES)}")
    return found
