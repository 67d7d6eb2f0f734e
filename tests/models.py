"""Small random checkpoints of every family, written by transformers' own save_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma3", "granite")
FAMILIES += ("ministral3", "granite4", "glm4", "ernie4_5")
RECURRENT = ("lfm2", "qwen3_5", "granite4_h", "lfm2_moe", "qwen3_5_moe", "granite4_h_moe")
RECURRENT += ("nemotron_h", "nemotron_h_moe", "falcon_h1")
"""Families with layers without keys."""
UNEVEN = ("gemma4",)
"""Families whose layers differ in heads."""
LATENT = ("deepseek2", "deepseek3", "glm4_lite", "youtu")
"""Families of latent attention."""
FAMILIES += ("gemma2",)
UNGATED = ("apertus",)
"""Families whose MLPs have no gates."""
FAMILIES += ("olmo2", "olmo3", "exaone4", "seed_oss", "hunyuan", "cohere", "cohere2")
EXPERTS = ("qwen3_moe", "mixtral", "granitemoe", "gpt_oss")
EXPERTS += ("qwen2_moe", "glm4_moe", "dots1", "ernie4_5_moe", "granitemoeshared", "granite4_moe")
EXPERTS += ("olmoe", "hunyuan_moe")
"""Families of experts."""

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
SIGMOIDS = {
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
}
HEADS = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Of latent attention."""
SCANS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "shared_intermediate_size": 120,
}
ONE_KIND = {
    "layers_block_type": ["linear_attention", "mlp", "mlp", "full_attention", "linear_attention"],
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 48,
    "n_groups": 2,
    "ssm_state_size": 24,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 72,
    "n_routed_experts": 6,
    "routed_scaling_factor": 2.5,
}
OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "mamba_n_heads": 6,
        "mamba_d_ssm": 96,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 5.5,
        "lm_head_multiplier": 0.25,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 2.5,
        "ssm_multipliers": [0.8, 1.25, 0.6, 1.4, 0.7],
        "mlp_multipliers": [1.6, 0.75],
    },
    "nemotron_h": ONE_KIND,
    "nemotron_h_moe": {
        **ONE_KIND,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
    },
    "deepseek2": {
        **{**SIGMOIDS, **HEADS},
        **{"q_lora_rank": None, "norm_topk_prob": False},
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
            **{"mscale": 0.707, "mscale_all_dim": 0.707, "rope_theta": 10000.0},
        },
    },
    "deepseek3": {**SIGMOIDS, **HEADS, "q_lora_rank": 32, "n_group": 1, "topk_group": 1},
    "glm4_lite": {
        **{**SIGMOIDS, **HEADS, "q_lora_rank": 32},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rms_norm_eps": 1e-5,
    },
    "youtu": {**HEADS, "q_lora_rank": 48},
    "minicpm3": {
        **{**HEADS, "q_lora_rank": 48, "rms_norm_eps": 1e-6, "dim_model_base": 24},
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10000.0},
            **{"short_factor": [1.0 + i / 8 for i in range(8)], "factor": 1.0},
            **{"long_factor": [1.0 + i / 8 for i in range(8)]},
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {"head_dim": 16},
    "phi3": {"pad_token_id": 2, "rms_norm_eps": 1e-6},
    "granite": MULTIPLIERS,
    "glm4": {"head_dim": 32, "rms_norm_eps": 1e-6, "pad_token_id": 2},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "block_multiple_of": 16,
        "norm_eps": 1e-6,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_eps": 1e-6,
    },
    "qwen3_5_moe": {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "qwen3_5": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "ernie4_5": {"head_dim": 16, "rms_norm_eps": 1e-6},
    "granite4": {
        **MULTIPLIERS,
        "shared_intermediate_size": 120,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 2,
    },
    "granite4_h": {**MULTIPLIERS, **SCANS, "num_local_experts": 0, "num_experts_per_tok": 0},
    "granite4_h_moe": {
        **MULTIPLIERS,
        **SCANS,
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "ministral3": {
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 96, "num_local_experts": 5},
    "granitemoe": {"intermediate_size": 48, "num_local_experts": 6, **MULTIPLIERS},
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "qwen2_moe": {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 72,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "glm4_moe": {**SIGMOIDS, "use_qk_norm": True, "attention_bias": True},
    "dots1": {**SIGMOIDS, "n_shared_experts": 1, "sliding_window": None},
    "ernie4_5_moe": {
        "moe_intermediate_size": 48,
        "moe_num_experts": 8,
        "moe_k": 3,
        "tie_word_embeddings": False,
    },
    "granitemoeshared": {
        "intermediate_size": 48,
        "num_local_experts": 6,
        "shared_intermediate_size": 72,
        **MULTIPLIERS,
    },
    "granite4_moe": {
        **MULTIPLIERS,
        "intermediate_size": 48,
        "shared_intermediate_size": 56,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 2,
    },
    "apertus": {
        **{"rms_norm_eps": 1e-6, "pad_token_id": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 12e6},
    },
    "olmo2": {"rms_norm_eps": 1e-6, "pad_token_id": 2},
    "olmo3": {"rms_norm_eps": 1e-6, "pad_token_id": 2, "sliding_window": 24},
    "olmoe": {
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 2,
    },
    "cohere": {"layer_norm_eps": 1e-6, "pad_token_id": 2, "logit_scale": 0.25},
    "cohere2": {"layer_norm_eps": 1e-6, "pad_token_id": 2, "sliding_window": 24},
    "exaone4": {"rms_norm_eps": 1e-6, "head_dim": 16, "sliding_window": 24},
    "seed_oss": {"head_dim": 32, "pad_token_id": 2},
    "hunyuan": {"head_dim": 16, "rms_norm_eps": 1e-6},
    "hunyuan_moe": {
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 48,
        "num_experts": 6,
        "moe_topk": [2, 2],
    },
    "smollm3": {"pad_token_id": 2},
    "gemma2": {
        **{"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24},
        **{"attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0},
    },
    "gemma3": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24},
    "gemma4": {
        "num_hidden_layers": 5,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "layer_types": [
            f"{kind}_attention" for kind in "sliding full sliding sliding full".split()
        ],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 24,
        "final_logit_softcapping": 5.0,
    },
}
"""What families have beside SMALL."""


def make_model(family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """Return a transformers model: seeded weights of std 0.08, norms near 1, biases not zero."""
    torch = pytest.importorskip("torch")
    import transformers

    granite4 = transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
        "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
        "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM),
        "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
        **dict.fromkeys(("granite4", "granite4_moe", "granite4_h", "granite4_h_moe"), granite4),
        "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
        "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
        "lfm2_moe": (transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM),
        "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "granitemoe": (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
        "apertus": (transformers.ApertusConfig, transformers.ApertusForCausalLM),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
        "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
        "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
        "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
        "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM),
        "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM),
        "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
        "hunyuan": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM),
        "hunyuan_moe": (transformers.HunYuanMoEV1Config, transformers.HunYuanMoEV1ForCausalLM),
        "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
        "deepseek2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
        "deepseek3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "glm4_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
        "minicpm3": (transformers.MiniCPM3Config, transformers.MiniCPM3ForCausalLM),
        "youtu": (transformers.YoutuConfig, transformers.YoutuForCausalLM),
        "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
        "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
        "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
        "granitemoeshared": (
            transformers.GraniteMoeSharedConfig,
            transformers.GraniteMoeSharedForCausalLM,
        ),
        **dict.fromkeys(
            ("nemotron_h", "nemotron_h_moe"),
            (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
        ),
        "falcon_h1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    }
    make_config, make = classes[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(make_config(**{**SMALL, **OWN.get(family, {}), **overrides}))
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name and family not in ("gemma2", "gemma3") else 0.0
            center = 1.0 if name.endswith("scale") else center
            torch.nn.init.normal_(parameter, center, 2.0 if name.endswith("sinks") else 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                torch.nn.init.normal_(buffer, 0.0, 0.08)
    model.config._experts_implementation = "eager"  # the others know no float64
    return model.to(getattr(torch, dtype)).eval()


def save_model(directory: Path, family: str, **options: Any) -> Path:
    """Write `make_model(family, **options)` as a model directory; `shard` is a max_shard_size."""
    shard = options.pop("shard", "5GB")
    make_model(family, **options).save_pretrained(directory, max_shard_size=shard)
    return directory
