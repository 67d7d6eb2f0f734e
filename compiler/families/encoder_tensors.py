"""Which checkpoint tensors an encoder has, and which packed weight each of them becomes.

In: an EncoderSpec. Out: `WeightSource` rows in the order of weights.bin. The one place that knows
the tensor names of encoders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.rope import named_tables
from dovetail.compiler.families.score_row import SCORE
from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.families.tensors import UNUSED_TIED, check_sources, weight_sources
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.model import ModelSpec

_MODELS = ("bert", "roberta", "mpnet", "nomic_bert", "model", "new", "gte")
PREFIXES = ("", *(f"{name}." for name in _MODELS))
"""What stands before the names of a model that was saved with a head."""
BUCKETS = 32
"""Of distances, half of them for keys that follow a row."""
_UNUSED = re.compile(
    rf"({'|'.join(map(re.escape, PREFIXES))})(pooler\..*|embeddings\.position_ids)"
    r"|(cls|lm_head|classifier|head|decoder)\..*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a family calls its modules; those from `qkv` on lie under `layers`.{number}.

    up: one module. gated: the gate and what it is multiplied by, each a module without bias and the
    half of it. buckets: biases of each head for distances. skips_first_norm: layer 0 reads what the
    norm of the embeddings wrote. biased: which weights have a bias, as a pattern.
    """

    words: str = "embeddings.word_embeddings"
    places: str = "embeddings.position_embeddings"
    kinds: str = "embeddings.token_type_embeddings"
    buckets: str = "encoder.relative_attention_bias"
    embed_norm: str = "embeddings.LayerNorm"
    layers: str = "encoder.layer"
    qkv: tuple[str, ...]
    o: str
    attention_norm: str
    up: str = ""
    gated: tuple[tuple[str, int], ...] = ()
    down: str
    mlp_norm: str
    final_norm: str = ""
    pooler: str = "pooler.dense"
    pooler_norm: str = ""
    classifier: str = "classifier"
    skips_first_norm: bool = False
    biased: str = ".*"


_BERT = Names(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    o="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_ROBERTA = replace(_BERT, pooler="classifier.dense", classifier="classifier.out_proj")
NAMES: dict[str, Names] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "mpnet": replace(
        _ROBERTA,
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        o="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    "jina": replace(
        _BERT,
        gated=(("mlp.gated_layers", 0), ("mlp.gated_layers", 1)),
        down="mlp.wo",
        mlp_norm="mlp.layernorm",
    ),
    "gte": Names(
        qkv=("attention.qkv_proj",),
        o="attention.o_proj",
        attention_norm="attn_ln",
        gated=(("mlp.up_gate_proj", 1), ("mlp.up_gate_proj", 0)),
        down="mlp.down_proj",
        mlp_norm="mlp_ln",
    ),
    "nomic": Names(
        embed_norm="emb_ln",
        layers="encoder.layers",
        qkv=("attn.Wqkv",),
        o="attn.out_proj",
        attention_norm="norm1",
        gated=(("mlp.fc12", 0), ("mlp.fc11", 0)),
        down="mlp.fc2",
        mlp_norm="norm2",
        biased=".*norm|pooler|classifier",
    ),
    "modernbert": Names(
        words="embeddings.tok_embeddings",
        embed_norm="embeddings.norm",
        layers="layers",
        qkv=("attn.Wqkv",),
        o="attn.Wo",
        attention_norm="attn_norm",
        gated=(("mlp.Wi", 0), ("mlp.Wi", 1)),
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        final_norm="final_norm",
        pooler="head.dense",
        pooler_norm="head.norm",
        skips_first_norm=True,
        biased="classifier",
    ),
}
"""Family -> the names that its checkpoints have."""
PARTED = "mlp.gated_layers_w", "mlp.gated_layers_v"
"""Jina's gate and values as older GGUF files have them, apart."""


def encoder_sources(spec: EncoderSpec, checkpoint: Checkpoint) -> tuple[WeightSource, ...]:
    """Return every packed weight of an encoder, in the order in which a pass reads them."""
    if not spec.decoder:
        return (*_open_sources(spec, checkpoint).every(), *_dense_sources(spec))
    score = "classifier", "packed", spec.labels, spec.hidden_size, (SCORE,), (spec.labels,)
    ends = (WeightSource(*score),) if spec.labels else _dense_sources(spec)
    return (*_decoder_sources(spec.decoder, checkpoint), *ends)


def check_encoder_tensors(spec: EncoderSpec, checkpoint: Checkpoint) -> None:
    """Compare every tensor with the spec; raises SpecError as `check_sources` does."""
    sources = (*encoder_sources(spec, checkpoint), *_buckets(spec, checkpoint))
    check_sources(sources, checkpoint, UNUSED_TIED if spec.decoder else _UNUSED)


def encoder_tables(spec: EncoderSpec, checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights that no tensor holds, by name."""
    tables, distances = {}, range(-spec.span, spec.span)
    if spec.positions == "alibi":
        tables["bias"] = alibi_slopes(spec.n_heads) * -np.abs(np.array(distances, np.float32))
    for source in _buckets(spec, checkpoint):
        (name,) = source.tensors
        tables["bias"] = checkpoint.floats(name)[[find_bucket(d) for d in distances]].T
    return tables | named_tables(spec.ropes, spec.max_tokens)


def _decoder_sources(decoder: ModelSpec, checkpoint: Checkpoint) -> Iterator[WeightSource]:
    """Yield the weights of a decoder without a head; names are as the checkpoint has them."""
    bare = "embed_tokens.weight" in checkpoint.tensors
    for source in weight_sources(decoder):
        if source.name != "head":
            tensors = (name.removeprefix("model.") if bare else name for name in source.tensors)
            yield replace(source, tensors=tuple(tensors))


def _dense_sources(spec: EncoderSpec) -> Iterator[WeightSource]:
    for i, layer in enumerate(spec.dense):
        name, rows = f"dense.{i}", (layer.n,)
        yield WeightSource(name, "packed", layer.n, layer.k, (f"{name}.linear.weight",), rows)
        if layer.bias:
            yield WeightSource(f"{name}_bias", "vector", layer.n, 1, (f"{name}.linear.bias",), rows)


def find_bucket(distance: int) -> int:
    """Return the bucket of a row's distance from a key (T5, 1910.10683 §2.1).

    Of 16, eight have one distance each, the others reach from one power of sqrt(2) to the next, the
    last has all from 90.5 on.
    """
    far = abs(distance)
    bucket = far if far < 8 else min((far * far).bit_length() + 1, BUCKETS // 2 - 1)
    return bucket + BUCKETS // 2 * (distance < 0)


def alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """Return float32 [heads][1]: a geometric series, filled up with every other one of the next.

    ALiBi §3: for a power of two, 2**(-8 i / heads), i from 1 on.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    between = [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * whole, 2)]
    return np.array((slopes + between)[:heads], np.float32)[:, None]


def _buckets(spec: EncoderSpec, checkpoint: Checkpoint) -> Iterator[WeightSource]:
    """Yield what the table of biases is made of, where it is learned."""
    if spec.relative:
        opened = _open_sources(spec, checkpoint)
        tensors = (f"{opened.prefix}{opened.names.buckets}.weight",)
        yield WeightSource("", "rows", BUCKETS, spec.n_heads, tensors, (BUCKETS,))


def _open_sources(spec: EncoderSpec, checkpoint: Checkpoint) -> _Sources:
    names = NAMES[spec.family]
    prefix = next((p for p in PREFIXES if f"{p}{names.words}.weight" in checkpoint.tensors), "")
    if f"{names.layers}.0.{PARTED[0]}.weight" in checkpoint.tensors:
        names = replace(names, gated=tuple((module, 0) for module in PARTED))
    return _Sources(spec, names, prefix)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The weights of one encoder; `prefix` stands before the names of its modules."""

    spec: EncoderSpec
    names: Names
    prefix: str

    def every(self) -> Iterator[WeightSource]:
        spec, names, hidden = self.spec, self.names, self.spec.hidden_size
        yield from self.table("words", names.words, spec.vocab_size)
        if spec.positions == "learned":
            yield from self.table("places", names.places, spec.n_positions)
        if spec.token_types:
            yield from self.table("kinds", names.kinds, spec.token_types)
        for name, shape in spec.tables.items():
            yield WeightSource(name, "rows", *shape)
        yield from self.norm("embed_norm", self.prefix + names.embed_norm)
        for layer in range(spec.n_layers):
            yield from self.layer(layer)
        if names.final_norm:
            yield from self.norm("final_norm", self.prefix + names.final_norm)
        if spec.labels:
            inside = self.prefix if names.pooler.startswith("pooler") else ""
            yield from self.linear("pooler", (inside + names.pooler,), (hidden,), hidden)
            if names.pooler_norm:
                yield from self.norm("pooler_norm", names.pooler_norm)
            yield from self.linear("classifier", (names.classifier,), (spec.labels,), hidden)

    def layer(self, layer: int) -> Iterator[WeightSource]:
        """Yield one layer's weights in the order of its tape."""
        spec, names = self.spec, self.names
        here, there = f"layers.{layer}", f"{self.prefix}{names.layers}.{layer}"
        hidden, inner = spec.hidden_size, spec.intermediate_size
        qkv = tuple(f"{there}.{part}" for part in names.qkv)
        heads = spec.n_heads * spec.head_dim
        if layer or not names.skips_first_norm:
            yield from self.norm(f"{here}.attention_norm", f"{there}.{names.attention_norm}")
        yield from self.linear(f"{here}.qkv", qkv, (spec.qkv_size // len(qkv),) * len(qkv), hidden)
        yield from self.linear(f"{here}.o", (f"{there}.{names.o}",), (hidden,), heads)
        yield from self.norm(f"{here}.mlp_norm", f"{there}.{names.mlp_norm}")
        if spec.gated:
            halves = [(f"{there}.{module}.weight", half) for module, half in names.gated]
            yield WeightSource(
                f"{here}.gate_up",
                "packed_pair",
                2 * inner,
                hidden,
                tuple(tensor for tensor, _ in halves),
                (inner, inner),
                tuple(half * inner for _, half in halves),
            )
        else:
            yield from self.linear(f"{here}.up", (f"{there}.{names.up}",), (inner,), hidden)
        yield from self.linear(f"{here}.down", (f"{there}.{names.down}",), (hidden,), inner)

    def table(self, name: str, module: str, rows: int) -> Iterator[WeightSource]:
        tensors = (f"{self.prefix}{module}.weight",)
        yield WeightSource(name, "rows", rows, self.spec.hidden_size, tensors, (rows,))

    def linear(
        self, name: str, modules: tuple[str, ...], rows: tuple[int, ...], k: int
    ) -> Iterator[WeightSource]:
        n = sum(rows)
        yield WeightSource(name, "packed", n, k, tuple(f"{m}.weight" for m in modules), rows)
        yield from self.bias(name, modules, rows)

    def norm(self, name: str, module: str) -> Iterator[WeightSource]:
        n = self.spec.hidden_size
        yield WeightSource(name, "vector", n, 1, (f"{module}.weight",), (n,))
        yield from self.bias(name, (module,), (n,))

    def bias(
        self, name: str, modules: tuple[str, ...], rows: tuple[int, ...]
    ) -> Iterator[WeightSource]:
        if re.fullmatch(self.names.biased, name):
            tensors = tuple(f"{module}.bias" for module in modules)
            yield WeightSource(f"{name}_bias", "vector", sum(rows), 1, tensors, rows)
