"""EncoderSpec: the architecture of one text encoder, and what is done with its last rows.

These are the contents of `models/<name>/encoder.json` in an artifact. Weights and their index are
as in `dovetail.ir.model`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dovetail.ir.model import ModelSpec, WeightEntry

POOLINGS = ("mean", "cls", "last")
"""How the rows of a text become one: their mean, the first, the last."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A bidirectional transformer: layers that norm after each sum, as BERT's do.

    activation: `gelu` or `gelu_tanh`. positions: `learned` (a table), `alibi` (slopes per head).
    first_position: row of the table that a text's first token takes. max_tokens: of one text, its
    special tokens included. labels: columns of a classification head, 0 without one; then there is
    no pooling. sigmoid: a pair's score is that of its logit. unit: vectors are of length 1.
    prompts: texts put before others, by name.
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
    positions: str
    n_positions: int = 0
    first_position: int = 0
    token_types: int = 0
    pooling: str = "mean"
    unit: bool = False
    labels: int = 0
    sigmoid: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    weight_dtype: str
    checkpoint_dtype: str

    @property
    def qkv_size(self) -> int:
        """Columns of the fused q, k, v projection."""
        return 3 * self.n_heads * self.head_dim

    @property
    def dim(self) -> int:
        """Values that come out for each text."""
        return self.labels or self.hidden_size


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
    shapes = {"words": (spec.vocab_size, hidden), "embed_norm": (hidden, 1)}
    if spec.positions == "learned":
        shapes["places"] = (spec.n_positions, hidden)
    if spec.positions == "alibi":
        shapes["slopes"] = (spec.n_heads, 1)
    if spec.token_types:
        shapes["kinds"] = (spec.token_types, hidden)
    if spec.labels:
        shapes |= {"pooler": (hidden, hidden), "classifier": (spec.labels, hidden)}
    layer = {
        "qkv": (spec.qkv_size, hidden),
        "o": (hidden, spec.n_heads * spec.head_dim),
        "attention_norm": (hidden, 1),
        "up": (spec.intermediate_size, hidden),
        "down": (hidden, spec.intermediate_size),
        "output_norm": (hidden, 1),
    }
    return shapes | {
        f"layers.{i}.{name}": shape for i in range(spec.n_layers) for name, shape in layer.items()
    }
