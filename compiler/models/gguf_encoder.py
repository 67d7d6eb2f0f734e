"""Text encoders in GGUF files: their metadata as config.json and as sentence-transformers' files.

In: a GgufFile. Out: the files by name, and the Hugging Face names of tensors. All that llama.cpp
calls `bert` is BERT: files of RoBERTa and XLM-R have their position tables without padding rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.compiler.families.encoder_tensors import NAMES, PARTED
from dovetail.compiler.families.encoders import LABELLED
from dovetail.compiler.files.checkpoint import TensorInfo
from dovetail.compiler.files.config import Config
from dovetail.compiler.files.gguf_file import GgufFile
from dovetail.ir.errors import SpecError

ENCODERS = {
    "bert": ("Bert", "bert"),
    "nomic-bert": ("NomicBert", "nomic"),
    "jina-bert-v2": ("JinaBert", "jina"),
    "modern-bert": ("ModernBert", "modernbert"),
}
"""general.architecture -> the begin of that of config.json, and our family."""
NEUTRAL = ("attention.causal", "attention.max_alibi_bias")
"""Keys that these have a place for; ALiBi's is that of all models."""
_POOLINGS: dict[int | None, str] = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK = 4
"""The pooling of classifiers."""
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.causal": "causal",
    "rope.freq_base": "rope_theta",
}
_MODERN = {
    "rope.freq_base": "global_rope_theta",
    "rope.freq_base_swa": "local_rope_theta",
    "attention.sliding_window": "local_attention",
    "attention.sliding_window_pattern": "global_attn_every_n_layers",
    "hidden_act": "hidden_activation",
}
ANSWERS = "cls.output.weight"
"""A classifier; of Qwen3-Reranker the rows of its head for yes and no."""
_ROWS = ("token_types.weight", ANSWERS)
"""Matrices that files have as vectors where they have one row."""
DENSE = ("dense_2", "dense_3")


def encoder_config(metadata: Config, arch: str, file: GgufFile, vocabulary: int) -> dict[str, Any]:
    """Return config.json of one of ENCODERS; metadata: the keys of its architecture."""
    if metadata.flag("attention.causal"):
        raise metadata.fail("attention.causal", "but rows of encoders see whole texts")
    if metadata.text("rope.scaling.type", "none") != "none":
        raise metadata.fail("rope.scaling.type", "but ropes of encoders are not scaled")
    stem, _ = ENCODERS[arch]
    keys = _KEYS | (_MODERN if arch == "modern-bert" else {})
    found = {theirs: metadata.values.get(key) for key, theirs in keys.items()}
    kinds, labels = (_height(file, name) for name in _ROWS)
    ranks = metadata.integer("pooling_type", 0, 1 << 16, 0) == _RANK
    found |= {
        "architectures": [f"{stem}{LABELLED if ranks else 'Model'}"],
        "vocab_size": vocabulary,
        "type_vocab_size": kinds,
        "num_labels": max(1, labels),
        "_name_or_path": file.values.get("general.name"),
    }
    return {key: value for key, value in found.items() if value is not None}


def with_rows(info: TensorInfo) -> TensorInfo:
    """Return a tensor, as a matrix where it is one whose only row the file has as a vector."""
    alone = info.name in _ROWS and len(info.shape) == 1
    return replace(info, shape=(1, *info.shape)) if alone else info


def _height(file: GgufFile, name: str) -> int:
    info = file.tensors.get(name)
    return with_rows(info).height if info else 0


def names_of(arch: str, parted: bool) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return what our family calls the modules of a file: those outside of layers, and in them.

    parted: gates are tensors of their own.
    """
    names = NAMES[ENCODERS[arch][1]]
    gate, up = (module for module, _ in names.gated or ((names.up, 0),) * 2)
    if parted and gate == up:
        gate, up = PARTED
    parts = ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",)
    outside = {
        "token_embd": names.words,
        "position_embd": names.places,
        "token_types": names.kinds,
        "token_embd_norm": names.embed_norm,
        "output_norm": names.final_norm,
        "cls": names.pooler,
        "cls.norm": names.pooler_norm,
        "cls.output": names.classifier,
    }
    inside = {
        **dict(zip(parts, names.qkv, strict=True)),
        "attn_output": names.o,
        **dict.fromkeys(("attn_output_norm", "attn_norm"), names.attention_norm),
        "ffn_gate": gate,
        "ffn_up": up,
        "ffn_down": names.down,
        **dict.fromkeys(("layer_output_norm", "ffn_norm"), names.mlp_norm),
    }
    return outside, {name: f"{names.layers}.{{}}.{module}" for name, module in inside.items()}


# ---- the files of sentence-transformers ----


def pools(file: GgufFile) -> bool:
    """Tell whether a file says how the rows of a text become one."""
    return _pooling(file) in _POOLINGS


def ranking_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Return the keys of config.json of a decoder that ranks, none for another one.

    Raises SpecError for other answers than yes and no.
    """
    if _pooling(file) != _RANK:
        return {}
    labels = file.values.get(f"{file.values['general.architecture']}.classifier.output_labels")
    if labels != ["yes", "no"]:
        raise SpecError(f"{file.path}: a decoder that classifies as {labels} is not supported")
    classifier = architecture.replace("ForCausalLM", LABELLED)
    return {"architectures": [classifier], "is_original_qwen3_reranker": True}


def _pooling(file: GgufFile) -> int | None:
    found = file.values.get(f"{file.values.get('general.architecture')}.pooling_type")
    return found if isinstance(found, int) else None


def modules(file: GgufFile) -> list[dict[str, str]] | None:
    """Return modules.json, None for a model that generates: vectors are of length 1."""
    if not pools(file):
        return None
    dense = [f"{i}_Dense" for i, name in enumerate(DENSE, 2) if f"{name}.weight" in file.tensors]
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **dict.fromkeys(dense, "Dense")}
    kinds["9_Normalize"] = "Normalize"
    return [{"path": path, "type": kind} for path, kind in kinds.items()]


def pooling(file: GgufFile) -> dict[str, str]:
    """Return the settings of its pooling."""
    kind = _POOLINGS.get(_pooling(file))
    return {"pooling_mode": kind} if kind else {}


def dense(file: GgufFile, name: str) -> dict[str, Any] | None:
    """Return the settings of a layer behind pooling."""
    info = file.tensors.get(f"{name}.weight")
    if info is None or len(info.shape) != 2:
        return None
    sizes = {"out_features": info.shape[0], "in_features": info.shape[1], "bias": False}
    return {**sizes, "activation_function": "Identity"}
