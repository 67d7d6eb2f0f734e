"""Small random encoders, written by transformers' own save_pretrained, and their reference rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.native.encoder import Encoder
from dovetail.topology.hardware import read_hardware
from tests.models import make_model
from tests.tapes import verify_tapes

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
}
MODERN = {
    "norm_eps": 1e-5,
    "num_hidden_layers": 5,  # global, local, local, global, local
    "local_attention": 40,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}
"""ModernBERT of the small size."""
GEMMA = {"use_bidirectional_attention": True, "num_hidden_layers": 7, "sliding_window": 24}
"""EmbeddingGemma of the small size: its sixth layer sees whole texts."""
PADDED = {"max_position_embeddings": 514}
"""Room for 512 tokens after the padding row."""
NOMIC_WORDS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""Keys of transformers -> those of the files of nomic-embed-text."""
STEMS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "modernbert": "ModernBert",
    "gte": "Gte",
    "mpnet": "MPNet",
    "nomic": "NomicBert",
}


def make_encoder(
    family: str, *, seed: int = 0, head: str = "Model", dtype: str = "float32", **overrides: Any
) -> Any:
    """Return a transformers model: seeded weights of std 0.1, norms near 1, biases not zero."""
    torch = pytest.importorskip("torch")
    import transformers

    config = getattr(transformers, f"{STEMS[family]}Config")(**{**SMALL, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{STEMS[family]}{head}")(config)
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            torch.nn.init.normal_(parameter, center, 0.1)
    return model.to(getattr(torch, dtype)).eval()


def save_encoder(directory: Path, family: str, *, modules: bool = False, **options: Any) -> Any:
    """Write an encoder and return it; `modules`: with mean pooling and unit length named."""
    model = make_encoder(family, **options)
    model.save_pretrained(directory)
    if modules:
        write_modules(directory, {"pooling_mode_mean_tokens": True})
    return model


def write_nomic_words(directory: Path, **changes: Any) -> None:
    """Put config.json in the words that the authors' files have."""
    path = directory / "config.json"
    found = json.loads(path.read_text())
    config = {ours: found[key] for key, ours in NOMIC_WORDS.items()} | {
        "architectures": found["architectures"],
        "vocab_size": found["vocab_size"],
        "type_vocab_size": found["type_vocab_size"],
        "activation_function": "swiglu",
        "rotary_emb_base": found["rope_parameters"]["rope_theta"],
        "rotary_emb_fraction": 1.0,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "max_trained_positions": 2048,
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
        **dict.fromkeys(("prenorm", "use_rms_norm", "causal"), False),
    }
    path.write_text(json.dumps(config | changes))


def save_decoder(
    directory: Path,
    family: str,
    *,
    architecture: str | None = None,
    pooling: str = "lasttoken",
    unit: bool = True,
    dense: Sequence[Dense] = (),
    **options: Any,
) -> Any:
    """Write a decoder that embeds as it is published, without a head, and return it."""
    model = make_model(family, **{"vocab_size": SMALL["vocab_size"], **options}).model
    model.save_pretrained(directory)
    file = directory / "config.json"
    if architecture:
        config = json.loads(file.read_text()) | {"architectures": [architecture]}
        file.write_text(json.dumps(config))
    write_modules(directory, {f"pooling_mode_{pooling}": True}, unit=unit, dense=dense)
    return model


@dataclass
class Dense:
    """A layer [n][k] behind pooling, of seeded weights."""

    n: int
    k: int
    bias: bool = False
    activation: str = "linear.Identity"

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.n)
        found = {"linear.weight": rng.normal(0, self.k**-0.5, (self.n, self.k))}
        found |= {"linear.bias": rng.normal(0, 0.5, self.n)} if self.bias else {}
        return {name: array.astype(np.float32) for name, array in found.items()}

    def save(self, directory: Path) -> None:
        from safetensors.numpy import save_file

        directory.mkdir(exist_ok=True)
        save_file(self.tensors, directory / "model.safetensors")
        activation = f"torch.nn.modules.{self.activation}"
        shape = {"in_features": self.k, "out_features": self.n, "bias": self.bias}
        config = shape | {"activation_function": activation}
        (directory / "config.json").write_text(json.dumps(config))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        made = rows @ self.tensors["linear.weight"].T + self.tensors.get("linear.bias", 0.0)
        return np.tanh(made) if self.activation.endswith("Tanh") else made


def write_modules(
    directory: Path, pooling: dict[str, Any], *, unit: bool = True, dense: Sequence[Dense] = ()
) -> None:
    """Write the files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * unit]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))
    for layer, path in zip(dense, paths[2:], strict=False):
        layer.save(directory / path)


def compiled(folder: Path, output: Path, **options: Any) -> Path:
    """Compile an encoder by rules."""
    options = {"weight_dtype": "f32", **options}
    compile_model(folder, output=output, effort="none", threads=2, **options)
    verify_tapes(output)
    return output


def load_encoder(path: Path, threads: int = 1) -> Encoder:
    """Open the encoder of an artifact in this process."""
    artifact = open_artifact(path, read_hardware())
    (part,) = artifact.encoders.values()
    return Encoder(artifact, part, PhasePlan(threads=threads, cpus=()))


def last_rows(model: Any, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return float64 [tokens][hidden] of each text: the last hidden states, each text alone.

    On one thread: these models are so small that others would only wait for each other.
    """
    torch = pytest.importorskip("torch")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [
                model(torch.tensor(text.astype(np.int64))[None])
                .last_hidden_state[0]
                .double()
                .numpy()
                for text in texts
            ]
    finally:
        torch.set_num_threads(threads)


def random_texts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Return random token ids, none of which stands for padding."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, SMALL["vocab_size"], n).astype(np.int32) for n in lengths]


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of `a` with that of `b`."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


class Jina:
    """jina-embeddings-v2 in float64: BERT with ALiBi on both sides, and GELU as a gate.

    Günther et al. 2023 (2310.19923) §3: the bias of a head is -slope |i - j|; the MLP is
    GELU(x V) * (x W), then a layer, and norms come after sums.
    """

    def __init__(self, seed: int = 0, layers: int = 2, heads: int = 4, **sizes: int) -> None:
        self.layers, self.heads = layers, heads
        self.hidden, self.inner = sizes.get("hidden", 64), sizes.get("inner", 120)
        rng = np.random.default_rng(seed)
        self.tensors = {
            name: (rng.normal(float("orm.weight" in name), 0.1, shape)).astype(np.float32)
            for name, shape in self.shapes().items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner, found = self.hidden, self.inner, {}
        found["embeddings.word_embeddings.weight"] = (SMALL["vocab_size"], hidden)
        found["embeddings.token_type_embeddings.weight"] = (2, hidden)
        linear = {f"attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
        linear |= {"attention.output.dense": (hidden, hidden), "mlp.wo": (hidden, inner)}
        norms = ["embeddings.LayerNorm"]
        for i in range(self.layers):
            here = f"encoder.layer.{i}"
            for name, shape in linear.items():
                found |= {f"{here}.{name}.weight": shape, f"{here}.{name}.bias": shape[:1]}
            found[f"{here}.mlp.gated_layers.weight"] = (2 * inner, hidden)
            norms += [f"{here}.attention.output.LayerNorm", f"{here}.mlp.layernorm"]
        for norm in norms:
            found |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
        return found

    def save(self, directory: Path) -> None:
        """Write the directory as the authors' does."""
        from safetensors.numpy import save_file

        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, directory / "model.safetensors")
        config = {
            **SMALL,
            "architectures": ["JinaBertForMaskedLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu",
            "hidden_act": "gelu",
            "max_position_embeddings": 8192,
        }
        (directory / "config.json").write_text(json.dumps(config))

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return float64 [tokens][hidden]: the last rows of a text."""
        x = self.get("embeddings.word_embeddings.weight")[ids]
        x = self.norm(
            "embeddings.LayerNorm", x + self.get("embeddings.token_type_embeddings.weight")[0]
        )
        for i in range(self.layers):
            here = f"encoder.layer.{i}"
            parts = (
                self.linear(f"{here}.attention.self.{p}", x) for p in ("query", "key", "value")
            )
            attended = self.attend(*parts)
            x = x + self.linear(f"{here}.attention.output.dense", attended)
            x = self.norm(f"{here}.attention.output.LayerNorm", x)
            pair = x @ self.get(f"{here}.mlp.gated_layers.weight").T
            gate, value = pair[:, : self.inner], pair[:, self.inner :]
            inner = gate * ndtr(gate) * value
            x = self.norm(f"{here}.mlp.layernorm", x + self.linear(f"{here}.mlp.wo", inner))
        return x

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        places, size = np.arange(len(q)), self.hidden // self.heads
        far = np.abs(places[:, None] - places)
        out = np.empty_like(q)
        for head in range(self.heads):  # a power of two
            at = slice(head * size, (head + 1) * size)
            scores = q[:, at] @ k[:, at].T / np.sqrt(size)
            scores -= 2.0 ** (-8 * (head + 1) / self.heads) * far
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, at] = weights @ v[:, at] / weights.sum(1, keepdims=True)
        return out

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.get(f"{name}.weight").T + self.get(f"{name}.bias")

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(1, keepdims=True)
        x /= np.sqrt((x * x).mean(1, keepdims=True) + SMALL["layer_norm_eps"])
        return x * self.get(f"{name}.weight") + self.get(f"{name}.bias")

    def get(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float64)
