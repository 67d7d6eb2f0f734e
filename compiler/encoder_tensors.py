"""Which checkpoint tensors an encoder has, and which packed weight each of them becomes.

In: an EncoderSpec. Out: `WeightSource` rows in the order of weights.bin. The one place that knows
the tensor names of encoders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dovetail.compiler.checkpoint import Checkpoint
from dovetail.compiler.tensors import WeightSource, check_sources
from dovetail.ir.encoder import EncoderSpec

PREFIXES = ("", "bert.", "roberta.")
"""What stands before the names of a model that was saved with a head."""
HEADS = {
    "bert": ("pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
}
"""Family -> the two layers of a classification head; the first of BERT is part of the model."""
_UNUSED = re.compile(
    r"(bert\.|roberta\.)?(pooler\..*|embeddings\.position_ids)|cls\..*|lm_head\..*|classifier\..*"
)


def encoder_sources(spec: EncoderSpec, checkpoint: Checkpoint) -> tuple[WeightSource, ...]:
    """Return every packed weight of an encoder, in the order in which a pass reads them."""
    word = "embeddings.word_embeddings.weight"
    prefix = next((p for p in PREFIXES if f"{p}{word}" in checkpoint.tensors), "")
    return tuple(_all_sources(spec, prefix))


def check_encoder_tensors(spec: EncoderSpec, checkpoint: Checkpoint) -> None:
    """Compare every tensor with the spec; raises SpecError as `check_sources` does."""
    sources = encoder_sources(spec, checkpoint)
    check_sources(sources, checkpoint, lambda name: bool(_UNUSED.fullmatch(name)))


def encoder_tables(spec: EncoderSpec) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights that no tensor holds, by name."""
    return {"slopes": alibi_slopes(spec.n_heads)} if spec.positions == "alibi" else {}


def alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """Return float32 [heads][1]: a geometric series, filled up with every other one of the next.

    ALiBi §3: for a power of two, 2**(-8 i / heads), i from 1 on.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    between = [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * whole, 2)]
    return np.array((slopes + between)[:heads], np.float32)[:, None]


def _all_sources(spec: EncoderSpec, prefix: str) -> Iterator[WeightSource]:
    hidden, there = spec.hidden_size, f"{prefix}embeddings"
    tables = {
        "words": ("word_embeddings", spec.vocab_size),
        "places": ("position_embeddings", spec.n_positions if spec.positions == "learned" else 0),
        "kinds": ("token_type_embeddings", spec.token_types),
    }
    for name, (tensor, rows) in tables.items():
        if rows:
            yield WeightSource(name, "rows", rows, hidden, (f"{there}.{tensor}.weight",), (rows,))
    if spec.positions == "alibi":
        yield WeightSource("slopes", "rows", spec.n_heads, 1)
    yield from _norm("embed_norm", f"{there}.LayerNorm", hidden)
    for layer in range(spec.n_layers):
        yield from _layer_sources(spec, layer, prefix)
    if spec.labels:
        first, second = HEADS[spec.family]
        inside = prefix if first.startswith("pooler") else ""
        yield from _linear("pooler", (inside + first,), (hidden,), hidden)
        yield from _linear("classifier", (second,), (spec.labels,), hidden)


def _layer_sources(spec: EncoderSpec, layer: int, prefix: str) -> Iterator[WeightSource]:
    """Yield one layer's weights in the order of its tape."""
    here, there = f"layers.{layer}", f"{prefix}encoder.layer.{layer}"
    hidden, heads, inner = spec.hidden_size, spec.n_heads * spec.head_dim, spec.intermediate_size
    qkv = tuple(f"{there}.attention.self.{part}" for part in ("query", "key", "value"))
    yield from _linear(f"{here}.qkv", qkv, (heads,) * 3, hidden)
    yield from _linear(f"{here}.o", (f"{there}.attention.output.dense",), (hidden,), heads)
    yield from _norm(f"{here}.attention_norm", f"{there}.attention.output.LayerNorm", hidden)
    yield from _linear(f"{here}.up", (f"{there}.intermediate.dense",), (inner,), hidden)
    yield from _linear(f"{here}.down", (f"{there}.output.dense",), (hidden,), inner)
    yield from _norm(f"{here}.output_norm", f"{there}.output.LayerNorm", hidden)


def _linear(
    name: str, modules: tuple[str, ...], rows: tuple[int, ...], k: int
) -> Iterator[WeightSource]:
    n = sum(rows)
    yield WeightSource(name, "packed", n, k, tuple(f"{m}.weight" for m in modules), rows)
    yield WeightSource(f"{name}_bias", "vector", n, 1, tuple(f"{m}.bias" for m in modules), rows)


def _norm(name: str, module: str, n: int) -> Iterator[WeightSource]:
    yield WeightSource(name, "vector", n, 1, (f"{module}.weight",), (n,))
    yield WeightSource(f"{name}_bias", "vector", n, 1, (f"{module}.bias",), (n,))
