"""The tensors of a GGUF file by their Hugging Face names, with the rows in Hugging Face's order.

In: a GgufFile and its configuration. Out: a `Checkpoint`. Files of some architectures have the rows
of queries and keys as rotated pairs (`pairs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from dovetail.compiler.families.apertus import told_numbers
from dovetail.compiler.families.experts import CHOICE, expert_tensors
from dovetail.compiler.families.latent import latent_tensors
from dovetail.compiler.families.pairs import pair_heads
from dovetail.compiler.families.recurrent import as_logarithms
from dovetail.compiler.families.score_row import HEAD, SCORE, with_score
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config
from dovetail.compiler.files.gguf_file import GgufFile
from dovetail.compiler.models.gguf_encoder import ANSWERS, DENSE, ENCODERS, names_of, with_rows

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Not weights but divisors of the rope's frequencies, which the configuration tells."""
PAIRED = (
    *("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "glm4"),
    *("ernie4_5", "ernie4_5-moe", "command-r", "cohere2"),
)
"""Architectures whose ropes turn neighbours, to which the rows of most were reordered."""
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
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
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LFM2 = {
    "token_embd_norm": "model.norm",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_QWEN35 = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_SCAN = {
    **{f"ssm_{part}": f"mamba.{part}" for part in ("conv1d", "norm")},
    **{f"ssm_{part}": f"mamba.{part}_proj" for part in ("in", "out")},
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
_FLAT = ("mamba.A_log", "mamba.D", "mamba.norm.weight")
"""Vectors that files have as matrices."""
_OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _LFM2),
    **dict.fromkeys(("qwen35", "qwen35moe"), _QWEN35),
    **dict.fromkeys(("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"), _SCAN),
    "deepseek2": _LATENT,
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    **dict.fromkeys(("olmo2", "exaone4"), _LAST_NORMS),
    **dict.fromkeys(("hunyuan-dense", "hunyuan-moe"), _TURNED),
    "apertus": {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma2", "gemma3", "gemma-embedding"), _GEMMA),
    "gemma4": {
        **_GEMMA,
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
}
_ALONE = {
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "exp_probs_b.bias": f"mlp.{CHOICE}",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_norm": "post_attention_layernorm.weight",
}
"""Vectors of layers that are no module's, or, of Falcon-H1, whose names have no end."""
_LAYER = re.compile(r"blk\.(\d{1,4})\.([\w.]+)")
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
        if found.name.endswith(_FLAT):
            found = replace(found, shape=(prod(found.shape),))
        tensors[found.name] = as_logarithms(found) if found.name.endswith("A_log") else found
    tensors |= {info.name: info for info in told_numbers(file)}
    if arch not in ENCODERS and (rows := tensors.pop(ANSWERS, None)):  # of yes, then of no
        tensors[SCORE] = with_score(Checkpoint(file.path, {HEAD: rows}), (0, 1)).info(SCORE)
    if arch in PAIRED:
        share = config.get("partial_rotary_factor", 1.0)
        tensors = pair_heads(tensors, Config(str(file.path), config), share)
    each = expert_tensors(Checkpoint(file.path, tensors))
    return latent_tensors(each, Config(str(file.path), config))


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
    own = _OF_ARCHITECTURE.get(arch, {})
    found = _LAYER.fullmatch(name)
    if found is None:
        return (own.get(stem) or _WHOLE.get(stem, stem)) + dot + kind
    layer, module = f"model.layers.{int(found[1])}.", found[2].rpartition(".")[0]
    if alone := own.get(found[2]) or _ALONE.get(found[2]):
        return layer + alone
    known = own.get(module) or _OF_LAYER.get(module)
    return name if known is None else f"{layer}{known}.{kind}"
