"""Random checkpoints of Llama shapes, and their artifacts, for `generate.py`.

In: a shape and a dtype. Out: a Hugging Face directory, and an artifact compiled from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {  # for trying the script out
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    },
    "160m": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "1b": {  # TinyLlama 1.1B
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
}
TORCH_NAMES = {"f32": "float32", "bf16": "bfloat16"}
STD = 0.02


def write_checkpoint(directory: Path, shape: str, dtype: str, seed: int) -> None:
    """Write config.json and model.safetensors with normal weights; nothing where they exist.

    float16 holds those of float32, so that a peer may read them from such a file.
    """
    if (directory / "config.json").exists():
        return
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, TORCH_NAMES[dtype])
    tensors = {}
    for name, size in tensor_sizes(SHAPES[shape]).items():
        if len(size) == 1:
            tensors[name] = torch.ones(size, dtype=kind)
        else:
            values = torch.empty(size).normal_(0.0, STD, generator=generator)
            tensors[name] = values.half().to(kind)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": TORCH_NAMES[dtype],
        **SHAPES[shape],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def tensor_sizes(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the name and size of every tensor of an untied Llama checkpoint."""
    hidden, inner, vocab = (
        shape[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head = shape.get("head_dim", hidden // shape["num_attention_heads"])
    heads, kv = (head * shape[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(shape["num_hidden_layers"]):
        sizes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return sizes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def compile_model(model: str, artifact: str, **options: Any) -> dict[str, Any]:
    """Compile `model` for this machine into `artifact`; return the seconds it took."""
    import time

    import dovetail

    start = time.perf_counter()
    dovetail.compile(model, output=artifact, **options)
    return {"compile_seconds": time.perf_counter() - start}
