"""The tensors of a GGUF file by their Hugging Face names, with the rows in Hugging Face's order.

In: a GgufFile and its configuration. Out: a `Checkpoint`. Files of some architectures have the rows
of queries and keys as rotated pairs (`pairs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.compiler.checkpoint import Checkpoint
from dovetail.compiler.config import Config
from dovetail.compiler.experts import CHOICE, expert_tensors
from dovetail.compiler.gguf_file import GgufFile
from dovetail.compiler.pairs import pair_heads

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Not weights but divisors of the rope's frequencies, which the configuration tells."""
PAIRED = (
    *("llama", "mistral3", "smollm3", "granite", "granitemoe", "glm4"),
    *("ernie4_5", "ernie4_5-moe", "command-r", "cohere2"),
)
"""Architectures whose ropes turn neighbours, to which the rows of most were reordered."""
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "exp_probs_b": f"mlp.{CHOICE}",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LAST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TURNED = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    **dict.fromkeys(("olmo2", "exaone4"), _LAST_NORMS),
    **dict.fromkeys(("hunyuan-dense", "hunyuan-moe"), _TURNED),
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)")
_EXPERT = re.compile(r"blk\.(\d{1,4})\.ffn_(gate|up|down)\.(\d{1,4})")
"""A matrix of one expert: files of Mixtral had these before they had tensors of all."""


def gguf_checkpoint(file: GgufFile, config: Mapping[str, Any]) -> Checkpoint:
    """Return the tensors of a file; names that are none of ours stay, for the shape check to find.

    Raises SpecError for queries or keys that cannot be cut into heads.
    """
    arch = str(file.values.get("general.architecture"))
    tensors = {}
    for name, info in file.tensors.items():
        if name in FACTORS:
            continue
        found = replace(info, name=translate(name, arch))
        tensors[found.name] = found
    if arch in PAIRED:
        share = config.get("partial_rotary_factor", 1.0)
        tensors = pair_heads(tensors, Config(str(file.path), config), share)
    return expert_tensors(Checkpoint(file.path, tensors))


def translate(name: str, arch: str) -> str:
    """Return what Hugging Face calls a tensor of an architecture, or the name itself."""
    stem, dot, kind = name.rpartition(".")
    if expert := _EXPERT.fullmatch(stem):
        layer, part, number = expert.groups()
        return f"model.layers.{int(layer)}.mlp.experts.{int(number)}.{part}_proj.{kind}"
    found = _LAYER.fullmatch(stem)
    if found is None:
        return _WHOLE.get(stem, stem) + dot + kind
    known = _OF_ARCHITECTURE.get(arch, {}).get(found[2]) or _OF_LAYER.get(found[2])
    if known is None:
        return name
    ending = "" if known.endswith(("sinks", CHOICE)) else f".{kind}"  # a vector without a module
    return f"model.layers.{int(found[1])}.{known}{ending}"
