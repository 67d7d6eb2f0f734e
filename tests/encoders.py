"""Small random encoders, written by transformers' own save_pretrained, and their reference rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
}
STEMS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}


def make_encoder(
    family: str, *, seed: int = 0, head: str = "Model", dtype: str = "float32", **overrides: Any
) -> Any:
    """Return a transformers model: seeded weights of std 0.1, norms near 1, biases not zero."""
    import torch
    import transformers

    config = getattr(transformers, f"{STEMS[family]}Config")(**{**SMALL, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{STEMS[family]}{head}")(config)
        for name, parameter in model.named_parameters():
            center = 1.0 if "LayerNorm.weight" in name else 0.0
            torch.nn.init.normal_(parameter, center, 0.1)
    return model.to(getattr(torch, dtype)).eval()


def save_encoder(directory: Path, family: str, *, modules: bool = False, **options: Any) -> Any:
    """Write an encoder and return it; `modules`: with mean pooling and unit length named."""
    model = make_encoder(family, **options)
    model.save_pretrained(directory)
    if modules:
        write_modules(directory, {"pooling_mode_mean_tokens": True})
    return model


def write_modules(directory: Path, pooling: dict[str, Any], *, unit: bool = True) -> None:
    """Write the files of sentence-transformers."""
    kinds = ("Transformer", "Pooling", "Normalize")[: 3 if unit else 2]
    paths = ("", "1_Pooling", "2_Normalize")
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))


def last_rows(model: Any, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return float64 [tokens][hidden] of each text: the last hidden states, each text alone."""
    import torch

    with torch.inference_mode():
        return [
            model(torch.tensor(text.astype(np.int64))[None]).last_hidden_state[0].double().numpy()
            for text in texts
        ]


def random_texts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Return random token ids, none of which stands for padding."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, SMALL["vocab_size"], n).astype(np.int32) for n in lengths]


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of `a` with that of `b`."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
