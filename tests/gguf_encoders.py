"""Encoders in GGUF files, written with the package `gguf` as llama.cpp lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.gguf_files import HALVES, arch_of, draw_blocks, read_state

ARCHITECTURES = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), "bert"),
    "nomic_bert": "nomic-bert",
    "modernbert": "modern-bert",
    "jina": "jina-bert-v2",
}
POOLINGS = {"mean": 1, "cls": 2, "last": 3, "rank": 4}
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def save_gguf_encoder(
    path: Path,
    directory: Path,
    kind: Any = "F32",
    *,
    pooling: str = "mean",
    arch: str | None = None,
    tokens: Path | None = None,
    state: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a saved encoder, its matrices in `kind`, or what it returns for a file's name of one.

    tokens: a tokenizer.json of WordPiece. state: its tensors, where they are not in the directory.
    """
    kind_of = kind if callable(kind) else lambda _name: kind
    config = json.loads((directory / "config.json").read_text())
    arch = arch or ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    layers, table = config["num_hidden_layers"], config["max_position_embeddings"]
    first = config["pad_token_id"] + 1 if "roberta" in config.get("model_type", "") else 0
    writer.add_block_count(layers)
    writer.add_context_length(table - first)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("layer_norm_eps", config.get("norm_eps")))
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(POOLINGS[pooling]))
    if arch != "modern-bert":
        writer.add_token_type_count(config.get("type_vocab_size", 2))
    if arch == "nomic-bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if arch == "modern-bert":
        ropes = config["rope_parameters"]
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(3)
    (add_wordpiece(writer, tokens) if tokens else writer.add_tokenizer_model("no_vocab"))
    names = gguf.get_tensor_name_map(arch_of(arch), layers)
    for name, values in (state or read_state(directory)).items():
        if name.startswith("pooler."):
            continue
        bare = name.removeprefix("roberta.").removeprefix("model.")
        known = names.get_name(bare, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        rows = values[first if known == "position_embd.weight" else 0 :]
        rows = rows.squeeze() if rows.ndim > 1 else rows
        plain = rows.ndim == 1 or known in ("position_embd.weight", "token_types.weight")
        form = gguf.GGMLQuantizationType["F32" if plain else kind_of(known)]
        drawn = form.name in HALVES
        stored = draw_blocks(rows.shape, form) if drawn else gguf.quants.quantize(rows, form)
        writer.add_tensor(known, np.ascontiguousarray(stored), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_wordpiece(writer: gguf.GGUFWriter, file: Path) -> None:
    """Write a tokenizer.json of WordPiece as the converter does."""
    data = json.loads(file.read_text())
    ids: dict[str, int] = data["model"]["vocab"]
    special = {token["content"] for token in data["added_tokens"]}

    def spell(token: str) -> str:
        if token in special:
            return token
        return token[2:] if token.startswith("##") else SPACE + token

    texts = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([spell(text) for text in texts])
    writer.add_token_types([3 if text in special else 1 for text in texts])
    writer.add_bos_token_id(ids["[CLS]"])
    writer.add_sep_token_id(ids["[SEP]"])
    writer.add_unk_token_id(ids["[UNK]"])
    writer.add_pad_token_id(ids["[PAD]"])
