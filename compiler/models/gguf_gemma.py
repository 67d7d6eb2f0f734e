"""Gemma 2 to 4 in GGUF files: what their metadata tell, as keys of config.json.

In: metadata and, of Gemma 4, arrays with a value for each layer. Out: keys that `decoders.py` and
`gemma4.py` read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.rope import FULL, SLIDING
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config
from dovetail.compiler.files.gguf_file import GgufFile
from dovetail.compiler.models.gguf_tensors import ROPE_FACTORS

WINDOWS, KV_HEADS = "attention.sliding_window_pattern", "attention.head_count_kv"
INNER = "feed_forward_length"
PER_LAYER = (WINDOWS, KV_HEADS, INNER)
"""Keys whose values may differ between layers."""
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
WIDTHS_SCALE = {"gemma2": 46, "gemma3": 62, "gemma-embedding": 0}
"""Architectures to the layers of the model in which the width of the stream scales queries, by
heads; in others that of heads does. As in llama.cpp: files do not tell."""
FIXED = 1e30
"""Divisor of the frequencies of pairs that are not turned."""

Layers = Mapping[str, npt.NDArray[Any]]


def first_values(layers: Layers) -> dict[str, Any]:
    """Return a value of each key, that of the first layer: others are told by `gemma4_config`."""
    return {key: values.flat[0].item() for key, values in layers.items() if values.size}


def gemma_config(metadata: Config, arch: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the own keys of Gemma 2 and 3, whose files have norms as they multiply."""
    window, width = "attention.sliding_window", found["hidden_size"]
    whole = found["num_hidden_layers"] == WIDTHS_SCALE[arch]
    scalar = width // found["num_attention_heads"] if whole else found["head_dim"]
    keys = {"query_pre_attn_scalar": scalar, "norm_offset": 0.0}
    if arch == "gemma2":
        keys |= {key: metadata.values[key] or None for key in CAPS if metadata.has(key)}
        return {**keys, "sliding_window": metadata.integer(window, 0, 1 << 31, 4096) or None}
    local = metadata.number("rope.freq_base_swa", 1.001, 1e12, 10000.0)
    return {
        **keys,
        "sliding_window": metadata.values.get(window),
        "sliding_window_pattern": metadata.values.get(WINDOWS),
        "rope_parameters": {FULL: found["rope_parameters"], SLIDING: {"rope_theta": local}},
        "use_bidirectional_attention": arch == "gemma-embedding",
    }


def gemma4_config(
    metadata: Config, file: GgufFile, layers: Layers, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Return Gemma 4's own keys; found: those of other families."""
    count, full_size = found["num_hidden_layers"], found["head_dim"]
    size = metadata.integer("attention.key_length_swa", 1, 1 << 17, full_size)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.integer(key, 1, 1 << 17, size) != size:
            raise metadata.fail(key, f"but only the {size} values of a head are supported")
    local = [bool(each) for each in _listed(metadata, layers, WINDOWS, count)]
    heads = _listed(metadata, layers, KV_HEADS, count)
    inner = _listed(metadata, layers, INNER, count)
    shared = metadata.integer("attention.shared_kv_layers", 0, count, 0)
    own, last = inner[: count - shared], inner[count - shared :]
    if len(set(own)) > 1 or set(last) - {own[0], 2 * own[0]} or len(set(last)) > 1:
        raise metadata.fail(INNER, "but only layers that share K and V may be twice as wide")
    windowed = [n for n, each in zip(heads, local, strict=True) if each]
    if len(set(windowed)) > 1:
        raise metadata.fail(KV_HEADS, "but layers with a window must have as many")
    full = [i for i, each in enumerate(local) if not each]
    experts = metadata.integer("expert_count", 0, 1 << 16, 0)
    return {
        "head_dim": size,
        "num_key_value_heads": windowed[0] if windowed else heads[0],
        "layer_types": [SLIDING if each else FULL for each in local],
        "per_layer_config": {
            str(i): {"head_dim": full_size, "num_key_value_heads": heads[i]} for i in full
        },
        "attention_k_eq_v": not _has_values(file, full),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": bool(last) and last[0] != own[0],
        "intermediate_size": own[0],
        "sliding_window": metadata.values.get("attention.sliding_window"),
        "hidden_size_per_layer_input": metadata.integer(
            "embedding_length_per_layer_input", 0, 1 << 16, 0
        ),
        "vocab_size_per_layer_input": found["vocab_size"],
        "final_logit_softcapping": metadata.values.get("final_logit_softcapping"),
        "rope_parameters": _ropes(metadata, file),
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": metadata.values.get("expert_used_count"),
        "moe_intermediate_size": metadata.values.get("expert_feed_forward_length"),
    }


def _listed(metadata: Config, layers: Layers, key: str, count: int) -> list[int]:
    """Return the value of each layer."""
    if key not in layers:
        return [metadata.integer(key, 0, 1 << 20)] * count
    if len(layers[key]) != count:
        raise metadata.fail(key, f"but must have a value for each of {count} layers")
    return [int(value) for value in layers[key]]


def _has_values(file: GgufFile, layers: Iterable[int]) -> bool:
    """Tell whether any of these layers has weights of V."""
    return any(f"blk.{layer}.attn_v.weight" in file.tensors for layer in layers)


def _ropes(metadata: Config, file: GgufFile) -> dict[str, Any]:
    """Return the two ropes; of layers without a window divisors tell which pairs are turned."""
    theta, local = (
        metadata.number(key, 1.001, 1e12, usual)
        for key, usual in (("rope.freq_base", 1e6), ("rope.freq_base_swa", 10000.0))
    )
    share, info = 1.0, file.tensors.get(ROPE_FACTORS)
    if info is not None:
        factors = Checkpoint(file.path, {ROPE_FACTORS: info}).load(ROPE_FACTORS)
        turned = int((factors == 1.0).sum())
        if not turned or (factors[turned:] < np.float32(FIXED)).any():
            raise metadata.fail("rope.freq_base", f"but {ROPE_FACTORS} are not those of Gemma 4")
        share = turned / factors.size
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}}
