"""The language model inside a model of pictures and text, as if it had been saved alone.

In: config.json and tensors of the whole. Out: those of its text part; others pass unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError

_PARTS: Mapping[str, Mapping[str, str]] = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
}
"""Architecture to those of its text part by model_type, the one where none is told first."""
_GEMMA: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {**_GEMMA, "vocab_size": 262208},
    "gemma4_text": {**_GEMMA, "vocab_size": 262144},
    "gemma4_unified_text": {**_GEMMA, "vocab_size": 262144, "max_position_embeddings": 262144},
}
"""What a text part may leave out."""
_OF_WHOLE = ("bos_token_id", "eos_token_id", "quantization_config")
"""Keys of the whole that stand for its text part."""
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings")
"""Keys of the whole where the text part has none of its own."""
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Where tensors of the text part lie, by version of transformers."""
_OTHERS = (
    *("vision_tower.", "multi_modal_projector.", "vision_embedder.", "visual."),
    *("audio_tower.", "embed_vision.", "embed_audio."),
)


def text_config(config: Config) -> Config:
    """Return the configuration of a text part, or `config` where it is of text alone."""
    known = [_PARTS[name] for name in config.texts("architectures") if name in _PARTS]
    if not known:
        return config
    names, part = known[0], config.section("text_config")
    kind = part.text("model_type", next(iter(names)))
    if kind not in names:
        said = f"model_type {kind!r} is not supported, only {' and '.join(names)}"
        raise SpecError(f"{part.name}: {said}")
    given = {key: value for key, value in part.values.items() if value is not None}
    shared = {key: config.values[key] for key in _SHARED if config.has(key)}
    of_whole = {key: config.values[key] for key in _OF_WHOLE if config.has(key)}
    merged = {**_LEFT_OUT.get(kind, {}), **shared, **given, **of_whole}
    merged["architectures"] = [names[kind]]
    return Config(part.name, merged)


def text_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the tensors of a text part, by the names that they would have alone."""
    if not any(name.startswith(tuple(_PREFIXES)) for name in checkpoint.tensors):
        return checkpoint
    tensors = {}
    for name, info in checkpoint.tensors.items():
        if not is_text(name):
            continue
        own = text_name(name)
        tensors[own] = replace(info, name=own)
    return replace(checkpoint, tensors=tensors)


def is_text(name: str) -> bool:
    """Tell whether a tensor is of no part that sees or hears."""
    return not name.removeprefix("model.").startswith(_OTHERS)


def text_name(name: str) -> str:
    """Return what a tensor of a text part would be called alone."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
