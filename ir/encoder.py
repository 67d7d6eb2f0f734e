"""EncoderSpec: the architecture of one text encoder, and what is done with its last rows.

These are the contents of `models/<name>/encoder.json` in an artifact. Weights and their index are
as in `dovetail.ir.model`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from dovetail.ir.model import ModelSpec, RopeSpec, WeightEntry, rope_names, weight_shapes


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer [n][k] that the rows of texts go through; tanh: it ends with one."""

    n: int
    k: int
    bias: bool = False
    tanh: bool = False


SPARE_ROWS = 64
"""Rows that attention may compute beyond a text, to fill its vectors up."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer of packed texts: layers that norm after each sum, as BERT's do, or before.

    activation: `gelu`, `gelu_tanh` or `silu`; gated: of one half of the MLP, times the other.
    norm_first: each half of a layer norms what it reads, and the last rows are normed.
    positions: `learned` (a table), `alibi` (slopes per head), `rotary` (by `rope`). relative: a
    learned bias of a row's distance from a key, too, is added to scores.
    first_position: row of the table that a text's first token takes. local_layers: in which layers
    a row sees no more than the `reach` rows on both sides of it, and rotates by `local_rope`;
    () = in none. causal: a row sees none of the later ones. decoder: the layers are this decoder's;
    what both tell is the same. max_tokens: of one text, its special tokens included. labels:
    columns of a classification head, 0 without one. head: what it does to the pooled row: `tanh` of
    a layer, or `gelu` of one without bias, and a norm. sigmoid: a pair's score is that of its
    logit. unit: vectors are of length 1. pooling: a text's row is the `mean` of its rows, the first
    (`cls`) or the `last`; it goes through the layers `dense`. prompts: texts put before others, by
    name. template: the text that a pair becomes, with {query}, {document} and {instruction}, which
    is a prompt; "": the tokenizer joins pairs.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    head_dim: int
    max_tokens: int
    norm_eps: float
    activation: str
    gated: bool = False
    norm_first: bool = False
    positions: str
    n_positions: int = 0
    first_position: int = 0
    relative: bool = False
    rope: RopeSpec | None = None
    local_rope: RopeSpec | None = None
    local_layers: tuple[bool, ...] = ()
    reach: int = 0
    causal: bool = False
    decoder: ModelSpec | None = None
    token_types: int = 0
    pooling: str = "mean"
    dense: tuple[DenseSpec, ...] = ()
    unit: bool = False
    labels: int = 0
    head: str = "tanh"
    sigmoid: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    template: str = ""
    weight_dtype: str
    formats: tuple[tuple[str, str], ...] = ()  # (weight, its format) of those stored otherwise
    checkpoint_dtype: str

    @property
    def qkv_size(self) -> int:
        """Columns of the fused q, k, v projection."""
        return 3 * self.n_heads * self.head_dim

    def weight_format(self, weight: str) -> str:
        """Return the format of a weight by its name in the index."""
        return next((form for name, form in self.formats if name == weight), self.weight_dtype)

    def is_local(self, layer: int) -> bool:
        """Tell whether the rows of a layer see only those near them."""
        return bool(self.local_layers) and self.local_layers[layer]

    @property
    def ropes(self) -> dict[str, RopeSpec]:
        """Return the rotary embeddings by the names of their tables."""
        found = {"rope": self.rope, "local_rope": self.local_rope}
        return {name: rope for name, rope in found.items() if rope}

    @property
    def span(self) -> int:
        """Distances to each side that the table of biases has."""
        return self.max_tokens + SPARE_ROWS

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """Return (n, k) of the weights that no tensor holds, by name."""
        found = {}
        if self.relative or self.positions == "alibi":
            found["bias"] = (self.n_heads, 2 * self.span)
        for name, rope in self.ropes.items():
            found |= dict.fromkeys(rope_names(name), (self.max_tokens, rope.rotary_dim // 2))
        return found

    @property
    def dim(self) -> int:
        """Values that come out for each text."""
        return self.labels or (self.dense[-1].n if self.dense else self.hidden_size)

    def with_formats(self, formats: dict[str, str]) -> EncoderSpec:
        """Return the spec with what is not stored as `weight_dtype` listed."""
        listed = tuple((name, form) for name, form in formats.items() if form != self.weight_dtype)
        decoder = self.decoder and replace(self.decoder, formats=listed)
        return replace(self, formats=listed, decoder=decoder)


Spec: TypeAlias = ModelSpec | EncoderSpec
"""What kernels and schedules are chosen for."""


class EncoderFile(msgspec.Struct, frozen=True, kw_only=True):
    """`models/<name>/encoder.json`."""

    schema: int = 1
    name: str
    spec: EncoderSpec
    weights: tuple[WeightEntry, ...]
    tokenizer: str | None = None  # file beside encoder.json


def encoder_shapes(spec: EncoderSpec) -> dict[str, tuple[int, int]]:
    """Return (n, k) of every weight that an encoder of this spec has, biases apart."""
    hidden = spec.hidden_size
    dense = {f"dense.{i}": (layer.n, layer.k) for i, layer in enumerate(spec.dense)}
    if spec.decoder:
        scores = {"classifier": (spec.labels, hidden)} if spec.labels else {}
        return weight_shapes(spec.decoder) | dense | scores
    shapes = {**dense, "words": (spec.vocab_size, hidden), "embed_norm": (hidden, 1), **spec.tables}
    if spec.positions == "learned":
        shapes["places"] = (spec.n_positions, hidden)
    if spec.token_types:
        shapes["kinds"] = (spec.token_types, hidden)
    if spec.labels:
        shapes |= {"pooler": (hidden, hidden), "classifier": (spec.labels, hidden)}
    layer = {
        "qkv": (spec.qkv_size, hidden),
        "o": (hidden, spec.n_heads * spec.head_dim),
        "attention_norm": (hidden, 1),
        "down": (hidden, spec.intermediate_size),
        "mlp_norm": (hidden, 1),
    }
    if spec.gated:
        layer["gate_up"] = (2 * spec.intermediate_size, hidden)
    else:
        layer["up"] = (spec.intermediate_size, hidden)
    return shapes | {
        f"layers.{i}.{name}": shape for i in range(spec.n_layers) for name, shape in layer.items()
    }
