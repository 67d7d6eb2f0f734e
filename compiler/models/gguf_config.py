"""The metadata of a GGUF file as the config.json that the model had.

In: a GgufFile. Out: the keys that `spec.py` reads, so that both kinds of model take the same
checks. What would change the arithmetic and has no place there is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.decoders import FAMILIES, GRANITE_PARTED, Family, no_ropes
from dovetail.compiler.families.falcon import FALCON, read_beside
from dovetail.compiler.families.latent import LOG_MULTIPLIER, gguf_latent
from dovetail.compiler.families.mixtures import MAX_INNER, Mixture
from dovetail.compiler.families.nemotron import MLP, MOE, NEMOTRON
from dovetail.compiler.families.recurrent import (
    LINEAR,
    TILED,
    read_delta,
    read_granite,
    read_scans,
    read_short_conv,
)
from dovetail.compiler.families.rope import FULL, SCORES_GROW, SLIDING, inverse_frequencies
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config
from dovetail.compiler.files.gguf_file import GgufFile
from dovetail.compiler.models.gguf_encoder import (
    ENCODERS,
    NEUTRAL,
    encoder_config,
    pools,
    ranking_config,
)
from dovetail.compiler.models.gguf_gemma import (
    CAPS,
    PER_LAYER,
    WIDTHS_SCALE,
    first_values,
    gemma4_config,
    gemma_config,
)
from dovetail.compiler.models.gguf_tensors import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from dovetail.ir.errors import SpecError
from dovetail.ir.model import RopeSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma-embedding": "Gemma3TextModel",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitehybrid": GRANITE_PARTED,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), NEMOTRON),
    "falcon-h1": FALCON,
    "gpt-oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "command-r": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
}
"""general.architecture -> that of config.json; files of Llama and of Mistral models say llama."""
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}
ATTENTION_FACTOR = "rope.scaling.attn_factor"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("expert_gating_func", "interleave_moe_layer_step"), (0, 1)),
    **dict.fromkeys(("nextn_predict_layers", "leading_dense_block_count"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0.0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length"), (0.0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0,)),
    **dict.fromkeys(("attention.scale", LOG_MULTIPLIER), (0.0,)),
    **dict.fromkeys(("expert_weights_scale", "logit_scale"), (0.0, 1.0)),
    **dict.fromkeys(("residual_scale", "embedding_scale"), (0.0, 1.0)),
    **dict.fromkeys((ATTENTION_FACTOR, "rope.scaling.yarn_attn_factor"), (1.0,)),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
"""Keys of other models' arithmetic, with the values that change nothing."""
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
"""Of these, what families with multipliers have a place for."""
_SECTIONS = "rope.dimension_sections"
"""Which dimensions turn by place in time, height, width of a picture: of texts all are alike."""
_LAYERED = ("olmo2", "exaone4", "cohere2")
"""Architectures that may have windows on some layers, which `_PATTERN` names."""
_PATTERN = "attention.sliding_window_pattern"
_GROWING = ("attention.temperature_scale", "attention.temperature_length", LOG_MULTIPLIER)
_MIXTURES = (
    *("expert_shared_count", "expert_shared_feed_forward_length"),
    *("leading_dense_block_count", "interleave_moe_layer_step"),
)
"""What mixtures with dense layers or an MLP beside experts have a place for."""
_GROUPS = ("expert_group_count", "expert_group_used_count")
_DRAFTING = "nextn_predict_layers"
_SIGMOIDS = ("expert_gating_func", "expert_weights_scale", _DRAFTING)
"""What those have besides whose scores are sigmoids."""
_OWN = {
    "mistral3": _GROWING,
    "gemma4": CAPS,
    "olmo2": (ATTENTION_FACTOR,),
    "deepseek2": (*_SIGMOIDS, *_GROUPS, LOG_MULTIPLIER),
}
"""What these architectures have a place for."""
_LLAMA3_BANDS, _LLAMA3_POSITIONS = (1.0, 4.0), 8192
"""Of all Llama 3.1, 3.2 and 3.3 models; their files have the divisors that come of it."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return a config.json for a file.

    Raises SpecError for architectures and arithmetic that are not supported.
    """
    arch = file.values.get("general.architecture")
    if not isinstance(arch, str) or arch not in {**ARCHITECTURES, **ENCODERS}:
        raise SpecError(
            f"{file.path}: the architecture {arch!r} is not supported; supported: "
            f"{', '.join((*ARCHITECTURES, *ENCODERS))}"
        )
    family = FAMILIES.get(ARCHITECTURES.get(arch, ""), Family(arch))
    own = {
        key.removeprefix(arch + "."): value
        for key, value in file.values.items()
        if key.startswith(arch + ".") and not key.endswith(_SECTIONS)
    }
    kinds = _pick_layers(own, family, file)
    layers: dict[str, npt.NDArray[Any]] = {}
    if arch == "gemma4":
        layers = {k: v for k in PER_LAYER if isinstance(v := own.get(k), np.ndarray)}
        own |= first_values(layers)
    metadata = Config(f"{file.path}: {arch}", {k: _one(k, v, file) for k, v in own.items()})
    placed = _placed(arch, family, file)
    _check_neutral(metadata, placed)
    if arch in ENCODERS:
        return encoder_config(metadata, arch, file, _vocabulary(file))
    heads = metadata.integer("attention.head_count", 1, 4096)
    head_dim = _head_dim(metadata, heads, family)
    found: dict[str, Any] = {theirs: metadata.values.get(key) for key, theirs in _KEYS.items()}
    if _DRAFTING in placed:  # what drafts tokens counts as a layer
        drafts = metadata.integer(_DRAFTING, 0, 1, 0)
        found["num_hidden_layers"] = metadata.integer("block_count", 1, 1 << 16) - drafts
    found |= {
        "architectures": [ARCHITECTURES[arch]],
        "head_dim": head_dim,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", 1, heads, heads),
        "intermediate_size": metadata.integer(
            "feed_forward_length", 1, 1 << 20, 1 if arch == "qwen35moe" else None
        ),
        "vocab_size": _vocabulary(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "rope_parameters": {} if arch == "gemma4" else _rope(metadata, file, head_dim),
        "original_max_position_embeddings": None,  # the rope has it: of Phi-3 it is not the usual
    }
    if family.partial is not None:
        turned = metadata.integer("rope.dimension_count", 2, head_dim, head_dim)
        found["partial_rotary_factor"] = turned / head_dim
    if arch == "gpt-oss":
        found["rope_parameters"]["truncate"] = False  # of all models; files do not tell
    if arch == "mistral3":
        found["rope_parameters"] |= _growing(metadata)
    if family.logit_scale is not None:
        found["logit_scale"] = metadata.values.get("logit_scale")
    if family.multipliers:
        found |= {theirs: metadata.values.get(key) for key, theirs in _MULTIPLIERS.items()}
    if arch == "gemma4":
        found |= gemma4_config(metadata, file, layers, found)
    elif arch in WIDTHS_SCALE:
        found |= gemma_config(metadata, arch, found)
    elif arch in _LAYERED and metadata.has("attention.sliding_window"):
        found |= _layer_windows(metadata, arch, found)
    else:
        found |= _window(metadata, arch)
    found |= kinds
    if read := _STATES.get(family.recurrent):
        found |= read(metadata, file)
    if family.latent:
        found |= gguf_latent(metadata, found["rope_parameters"], file.tensors)
    if arch != "gemma4":
        found |= _experts(metadata, arch, family, file)
    if pools(file):
        found["is_causal"] = metadata.flag("attention.causal", True)
    found |= ranking_config(file, ARCHITECTURES[arch])
    found["_name_or_path"] = file.values.get("general.name")
    for theirs in ("bos_token_id", "eos_token_id"):
        found[theirs] = file.values.get(f"tokenizer.ggml.{theirs}")
    return found


def _one(key: str, value: Any, file: GgufFile) -> Any:
    """Return a value, of an array with one per layer the one that all layers share.

    Which layers have windows may differ.
    """
    if not isinstance(value, np.ndarray):
        return value
    if key == _PATTERN:
        return value.tolist()
    if value.size == 0 or (value != value.flat[0]).any():
        raise SpecError(f"{file.path}: {key} differs between layers, which is not supported")
    return value.flat[0].item()


def _placed(arch: str, family: Family, file: GgufFile) -> tuple[str, ...]:
    """Return those of `_NEUTRAL` that a configuration of this architecture has a place for."""
    if arch in ENCODERS or pools(file):
        return NEUTRAL
    mixture, longs = family.experts, arch == "phi3" and LONG_FACTORS in file.tensors
    return (
        *(_MULTIPLIERS if family.multipliers else ()),
        *(_MIXTURES if mixture else ()),
        *(_SIGMOIDS if mixture and mixture.sigmoid else ()),
        *((_DRAFTING,) if family.recurrent else ()),
        *(CAPS if family.caps else ()),
        *(("logit_scale",) if family.logit_scale is not None else ()),
        *((ATTENTION_FACTOR,) if longs else ()),
        *_OWN.get(arch, ()),
    )


def _check_neutral(metadata: Config, placed: tuple[str, ...]) -> None:
    for key, harmless in _NEUTRAL.items():
        if key in placed:
            continue
        if metadata.has(key) and metadata.values[key] not in harmless:
            raise metadata.fail(key, "but this is not supported")


def _experts(metadata: Config, arch: str, family: Family, file: GgufFile) -> dict[str, Any]:
    """Return the keys of experts; files of Mixtral say llama.

    As in llama.cpp, weights sum to 1 in most architectures.
    """
    count, mixture = metadata.integer("expert_count", 0, 1 << 16, 0), family.experts
    if not count and arch == "granitehybrid":
        return {"shared_intermediate_size": metadata.values.get("feed_forward_length")}
    if not count and (mixture is None or mixture.optional or family.latent):
        return {}
    found: dict[str, Any] = {
        "num_experts": count or None,
        "num_experts_per_tok": metadata.values.get("expert_used_count"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", arch not in _UNSHARED),
    }
    if arch == "llama":
        found["architectures"] = ["MixtralForCausalLM"]
        mixture = FAMILIES["MixtralForCausalLM"].experts
    if mixture is None:
        raise metadata.fail("expert_count", "but experts of this architecture are not supported")
    if metadata.has(key := "expert_feed_forward_length"):
        found[mixture.inner] = metadata.values[key]
    return found | _beside_experts(metadata, mixture, file)


def _pick_layers(own: dict[str, Any], family: Family, file: GgufFile) -> dict[str, Any]:
    """Return layer_types where layers without KV heads are told, and keep the others' number.

    So with MLPs that some layers alone have.
    """
    heads, inner = (own.get(key) for key in _PER_KIND)
    if not family.recurrent or not isinstance(heads, np.ndarray) or heads.all():
        return {}
    own[_PER_KIND[0]] = heads[heads > 0]
    other = "conv" if family.recurrent is read_short_conv else LINEAR
    kinds = [FULL if count else other for count in heads]
    if isinstance(inner, np.ndarray) and len(inner) == len(heads) and not inner.all():
        own[_PER_KIND[1]] = inner[inner > 0]
        for i in np.flatnonzero(inner):
            kinds[i] = MOE if f"blk.{i}.ffn_gate_inp.weight" in file.tensors else MLP
    return {"layer_types": kinds}


_PER_KIND = ("attention.head_count_kv", "feed_forward_length")


def _convolutions(metadata: Config, _file: GgufFile) -> dict[str, Any]:
    return {"conv_L_cache": metadata.values.get("shortconv.l_cache")}


def _deltas(metadata: Config, _file: GgufFile) -> dict[str, Any]:
    """Return the keys of the delta rule; norms are stored as they multiply."""
    heads = metadata.integer("ssm.time_step_rank", 1, 1 << 16)
    return {
        "linear_num_key_heads": metadata.values.get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.values.get("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size", 1, 1 << 24) // heads,
        "linear_conv_kernel_dim": metadata.values.get("ssm.conv_kernel"),
        "full_attention_interval": metadata.values.get("full_attention_interval"),
        "norm_offset": 0.0,
        TILED: True,
    }


def _scans(metadata: Config, file: GgufFile) -> dict[str, Any]:
    """Return the keys of Mamba-2, whether attention has a rope, and the norms' epsilon."""
    found = {theirs: metadata.values.get(f"ssm.{key}") for key, theirs in _SSM.items()}
    for theirs, name in {"mamba_proj_bias": "ssm_in", "mamba_conv_bias": "ssm_conv1d"}.items():
        found[theirs] = any(tensor.endswith(f".{name}.bias") for tensor in file.tensors)
    if metadata.has(key := "attention.layer_norm_epsilon"):
        found["rms_norm_eps"] = metadata.values[key]
    turned = metadata.flag("rope.scaling.finetuned", True)
    return {
        **found,
        "position_embedding_type": "rope" if turned else None,
        "mamba_rms_norm": any(tensor.endswith(".ssm_norm.weight") for tensor in file.tensors),
        "mamba_norm_before_gate": False,
    }


_SSM = {
    "time_step_rank": "mamba_n_heads",
    "group_count": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "inner_size": "mamba_d_ssm",
    "conv_kernel": "mamba_d_conv",
}
_STATES: dict[object, Callable[[Config, GgufFile], dict[str, Any]]] = {
    read_short_conv: _convolutions,
    read_delta: _deltas,
    **dict.fromkeys((read_granite, read_scans, read_beside), _scans),
}
"""What reads layers without keys from config.json, to what gives its keys."""


def _beside_experts(metadata: Config, mixture: Mixture, file: GgufFile) -> dict[str, Any]:
    """Return the keys of dense layers and shared experts, by what each family calls them."""
    if mixture.sigmoid and metadata.integer(_SIGMOIDS[0], 0, 2, 2) == 1:
        raise metadata.fail(_SIGMOIDS[0], "but only sigmoids are supported")
    first = metadata.integer("leading_dense_block_count", 0, 1 << 16, 0)
    shared = [t for name, t in file.tensors.items() if name.endswith(".ffn_up_shexp.weight")]
    width = shared[0].height if shared else 0
    count = width // metadata.integer("expert_feed_forward_length", 1, MAX_INNER, max(1, width))
    return {
        **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), first),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 0, 1 << 16, 1) or 1,
        **dict.fromkeys(_SHARED_WIDTHS, width),
        **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), count),
        "routed_scaling_factor": metadata.number(_SIGMOIDS[1], 0.0, 1e6, 1.0) or 1.0,
    }


_SHARED_WIDTHS = (
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
    "moe_shared_expert_intermediate_size",
)
_UNSHARED = ("qwen2moe", "olmoe", "glm4moe", "dots1", "deepseek2")
"""Architectures whose weights of a token's experts do not sum to 1 unless a file says so."""


def _head_dim(metadata: Config, heads: int, family: Family) -> int:
    width = metadata.integer("embedding_length", 1, 1 << 17)
    key = metadata.integer("attention.key_length", 1, 1 << 17, max(1, width // heads))
    if family.latent:
        return key
    whole = family.partial is None and family.rope_layers is not no_ropes
    for name in ("attention.value_length", *(["rope.dimension_count"] if whole else [])):
        if metadata.integer(name, 1, 1 << 17, key) != key:
            raise metadata.fail(name, f"but only the {key} values of a head are supported")
    return key


def _vocabulary(file: GgufFile) -> int:
    """Return the rows of the embedding, which are as many as the tokens where these are listed."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise SpecError(f"{file.path} has no tensor token_embd.weight; it is not a language model")
    tokens = file.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != embedding.height:
        raise SpecError(
            f"{file.path} has {len(tokens)} tokens, but an embedding of {embedding.height} rows"
        )
    return embedding.height


def _window(metadata: Config, arch: str) -> dict[str, Any]:
    """Return the keys of a sliding window, where the family tells in which layers it is."""
    window = metadata.integer("attention.sliding_window", 0, 1 << 31, 0)
    if window == 0 or window >= metadata.integer("context_length", 1, 1 << 31):
        return {"sliding_window": None}
    if arch in ("phi3", "gpt-oss"):
        return {"sliding_window": window}
    if arch != "llama":
        raise metadata.fail("attention.sliding_window", "but it is not told in which layers")
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


def _layer_windows(metadata: Config, arch: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of windows on the layers that a list names, or on all but each fourth.

    Files of OLMo 3 say olmo2. Of its layers with windows nothing of the rope is scaled.
    """
    pattern, keys = metadata.values.get(_PATTERN), dict[str, Any]()
    if isinstance(pattern, list):
        keys["layer_types"] = [SLIDING if windowed else FULL for windowed in pattern]
    if arch == "olmo2":
        whole = found["rope_parameters"]
        local = {"rope_type": "default", "rope_theta": whole["rope_theta"]}
        scaled = {**whole, "attention_factor": metadata.values.get(ATTENTION_FACTOR)}
        keys["rope_parameters"] = {FULL: scaled, SLIDING: local}
        keys["architectures"] = ["Olmo3ForCausalLM"]
    return {"sliding_window": metadata.values["attention.sliding_window"], **keys}


# ---- rope ----


def _rope(metadata: Config, file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", 1.001, 1e12, 10000.0)
    kind = metadata.text("rope.scaling.type", "linear")  # as in llama.cpp
    if LONG_FACTORS in file.tensors:
        return {"rope_theta": theta, **_longrope(metadata, file, head_dim)}
    if ROPE_FACTORS in file.tensors:
        return {"rope_theta": theta, **_llama3(metadata, file, theta, head_dim)}
    if kind not in _SCALINGS:
        raise metadata.fail("rope.scaling.type", f"but supported are {', '.join(_SCALINGS)}")
    return {"rope_theta": theta, **_SCALINGS[kind](metadata)}


def _linear(metadata: Config) -> dict[str, Any]:
    factor = metadata.number("rope.scaling.factor", 0.0, 1e6, 0.0)  # 0 stands for none
    old = metadata.number("rope.scale_linear", 0.0, 1e6, 1.0)
    scale = factor or old or 1.0
    return {"rope_type": "default" if scale == 1.0 else "linear", "factor": scale}


def _yarn(metadata: Config) -> dict[str, Any]:
    given = {theirs: metadata.values[key] for key, theirs in _YARN.items() if metadata.has(key)}
    return {"rope_type": "yarn", **given}


def _growing(metadata: Config) -> dict[str, Any]:
    """Return the keys of Ministral 3's rope."""
    length, original = _GROWING[1], "rope.scaling.original_context_length"
    if metadata.values.get(length) not in (None, 0, metadata.values.get(original)):
        raise metadata.fail(length, f"but only what {original} says is supported")
    scale = metadata.number(_GROWING[0], 0.0, 1.0, 0.0)
    return {
        SCORES_GROW: scale,
        "mscale": 1.0,
        "mscale_all_dim": metadata.number(LOG_MULTIPLIER, 1e-6, 1e6, 1.0),
    }


_YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


_SCALINGS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "none": lambda _metadata: {"rope_type": "default"},
    "linear": _linear,
    "yarn": _yarn,
}


def _longrope(metadata: Config, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return the two lists of divisors of Phi-3."""
    turned = metadata.integer("rope.dimension_count", 2, head_dim, head_dim)
    return {
        "rope_type": "longrope",
        "short_factor": _read_factors(file, SHORT_FACTORS, turned).tolist(),
        "long_factor": _read_factors(file, LONG_FACTORS, turned).tolist(),
        "attention_factor": metadata.values.get(ATTENTION_FACTOR),
        "original_max_position_embeddings": metadata.values.get(
            "rope.scaling.original_context_length"
        ),
    }


def _llama3(metadata: Config, file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the scaling that divides the frequencies as the file says; SpecError if there is none.

    A file tells only the divisors; the largest is the factor of slow frequencies.
    """
    factors = _read_factors(file, ROPE_FACTORS, head_dim)
    factor = float(str(factors.max()))
    if (factors == 1.0).all():
        return {"rope_type": "default"}
    low, high = _LLAMA3_BANDS
    plain = RopeSpec(kind="default", theta=theta, rotary_dim=head_dim)
    tried = metadata.integer("rope.scaling.original_context_length", 1, 1 << 27, _LLAMA3_POSITIONS)
    scaled = RopeSpec(
        kind="llama3",
        theta=theta,
        rotary_dim=head_dim,
        factor=factor,
        original_max_position=tried,
        low_freq_factor=low,
        high_freq_factor=high,
    )
    wanted = inverse_frequencies(plain) / factors
    if not np.allclose(inverse_frequencies(scaled), wanted, rtol=1e-4, atol=0.0):
        raise SpecError(
            f"{file.path}: the divisors of {ROPE_FACTORS} are not those of Llama 3, which alone "
            "are supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": tried,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _read_factors(file: GgufFile, name: str, turned: int) -> npt.NDArray[np.float32]:
    info = file.tensors.get(name)
    if info is None or info.shape != (turned // 2,) or info.kind != "F32":
        raise SpecError(f"{file.path}: {name} is no vector of {turned // 2} values of type F32")
    factors = Checkpoint(file.path, {name: info}).load(name)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise SpecError(f"{file.path}: {name} has values that are no divisors")
    return factors
