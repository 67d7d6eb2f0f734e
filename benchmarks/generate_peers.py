"""Further peers of `generate.py`: llama.cpp on a GGUF file of the same weights. Each is optional.

In: a checkpoint directory. Out: sides with `settings` and `run`, for `generate_workers.Worker`; a
peer that is not installed has a line that says so in place of its figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import timed_region

Array = npt.NDArray[Any]

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
"""Names of a Llama checkpoint's tensors, and theirs in GGUF."""
PEER_PACKAGES = {"llamacpp": ("llama_cpp", "gguf")}
"""Peer to the modules it needs."""


def missing_packages(peer: str) -> list[str]:
    """Return the modules that `peer` needs and that are not installed."""
    return [name for name in PEER_PACKAGES[peer] if find_spec(name) is None]


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Write the checkpoint's weights, in their own width, as a GGUF file without a vocabulary."""
    if target.exists():
        return
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[{"float32": "F32", "bfloat16": "BF16"}[config["torch_dtype"]]]
    for name, values in read_tensors(checkpoint):
        form = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(order_for_rope(name, values, config), form)
        writer.add_tensor(gguf_name(name), data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of a checkpoint as float32."""
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name).float().numpy()


def gguf_name(name: str) -> str:
    """Return the GGUF name: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{LAYER_NAMES['.'.join(parts[2:])]}.weight"
    return f"{OUTER_NAMES['.'.join(parts)]}.weight"


def order_for_rope(name: str, values: Array, config: dict[str, Any]) -> Array:
    """Return q and k with each head's rows in pairs (d, d + half), as llama.cpp rotates them."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if part in name:
            split = values.reshape(config[key], 2, -1, values.shape[1])
            return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
    return values


class LlamaCpp:
    """llama.cpp with its own defaults: float16 keys and values, weights as they are in the file."""

    def __init__(self, model: str, context: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._model = llama_cpp.Llama(model, n_ctx=context, n_batch=512, verbose=False)

    def settings(self) -> str:
        """Return what a reader needs to know of this peer."""
        return f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}), float16 KV, mmap"

    def run(self, prompt: list[int], new_tokens: int, threads: int) -> dict[str, Any]:
        """Generate greedily; return seconds to the first token and per further one, and the ids."""
        self._api.llama_set_n_threads(self._model.ctx, threads, threads)
        self._model.reset()
        self._api.llama_memory_clear(self._api.llama_get_memory(self._model.ctx), False)
        with timed_region() as region:
            start = time.perf_counter()
            self._model.eval(prompt)
            ids = [self._best()]
            first = time.perf_counter()
            for _ in range(new_tokens - 1):
                self._model.eval(ids[-1:])
                ids.append(self._best())
            last = time.perf_counter()
        return {
            "prefill": first - start,
            "decode": (last - first) / (new_tokens - 1),
            "ids": ids,
            "others": region.others,
        }

    def _best(self) -> int:
        """Return the id of the largest logit of the last token."""
        logits = self._api.llama_get_logits_ith(self._model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self._model.n_vocab(),)).argmax())
