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
from dovetail.compiler.experts import expert_tensors
from dovetail.compiler.gguf_encoder import ANSWERS, DENSE, ENCODERS, names_of, with_rows
from dovetail.compiler.gguf_file import GgufFile
from dovetail.compiler.pairs import pair_heads
from dovetail.compiler.score_row import HEAD, SCORE, with_score

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Not weights but divisors of the rope's frequencies, which the configuration tells."""
PAIRED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "glm4", "ernie4_5")
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
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
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
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma3", "gemma-embedding"), _GEMMA),
}
_LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)")
_EXPERT = re.compile(r"blk\.(\d{1,4})\.ffn_(gate|up|down)\.(\d{1,4})")
"""A matrix of one expert: files of Mixtral had these before they had tensors of all."""


def gguf_checkpoint(file: GgufFile, config: Mapping[str, Any]) -> Checkpoint:
    """Return the tensors of a file; names that are none of ours stay, for the shape check to find.

    Raises SpecError for queries or keys that cannot be cut into heads.
    """
    arch = str(file.values.get("general.architecture"))
    tensors, parted = {}, "blk.0.ffn_gate.weight" in file.tensors
    for name, info in file.tensors.items():
        if name in FACTORS:
            continue
        found = replace(with_rows(info), name=translate(name, arch, parted))
        tensors[found.name] = found
    if arch not in ENCODERS and (rows := tensors.pop(ANSWERS, None)):  # of yes, then of no
        tensors[SCORE] = with_score(Checkpoint(file.path, {HEAD: rows}), (0, 1)).info(SCORE)
    if arch in PAIRED:
        share = config.get("partial_rotary_factor", 1.0)
        tensors = pair_heads(tensors, Config(str(file.path), config), share)
    return expert_tensors(Checkpoint(file.path, tensors))


def _translate_encoder(name: str, arch: str, parted: bool) -> str:
    outside, inside = names_of(arch, parted)
    stem, dot, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    known = inside.get(layer[2], "").format(int(layer[1])) if layer else outside.get(stem)
    return known + dot + kind if known else name


def translate(name: str, arch: str, parted: bool = False) -> str:
    """Return what Hugging Face calls a tensor of an architecture, or the name itself.

    parted: gates are tensors of their own.
    """
    stem, dot, kind = name.rpartition(".")
    if stem in DENSE:
        return f"dense.{DENSE.index(stem)}.linear.{kind}"
    if arch in ENCODERS:
        return _translate_encoder(name, arch, parted)
    if expert := _EXPERT.fullmatch(stem):
        layer, part, number = expert.groups()
        return f"model.layers.{int(layer)}.mlp.experts.{int(number)}.{part}_proj.{kind}"
    found = _LAYER.fullmatch(stem)
    if found is None:
        return _WHOLE.get(stem, stem) + dot + kind
    known = _OF_ARCHITECTURE.get(arch, {}).get(found[2]) or _OF_LAYER.get(found[2])
    if known is None:
        return name
    ending = "" if known.endswith("sinks") else f".{kind}"  # a vector without a module
    return f"model.layers.{int(found[1])}.{known}{ending}"
