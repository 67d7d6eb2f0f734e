"""Lowers one pass of an encoder to a tape: packed texts in, one row for each text out.

In: EncoderSpec, the weight index and the largest pass. Out: a Tape, verified as all are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.compiler.tapes import TapeBuilder, Value
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import SPLIT_K_ELEMENTS, WeightEntry
from dovetail.ir.tape import ENCODE_ARGS, ArgRef, BufferRef, Tape, WeightRef


def build_encode_tape(
    spec: EncoderSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
) -> Tape:
    """Return the tape of one pass over at most so many token rows and texts."""
    return _Encode(spec, weights, tokens, sequences).build()


class _Encode:
    """The encode tape, one method per segment."""

    def __init__(
        self, spec: EncoderSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        self.spec, self.tokens, self.sequences = spec, tokens, sequences
        self.weights: Mapping[str, WeightEntry] = {entry.name: entry for entry in weights}
        self.tape = tape = TapeBuilder()
        hidden = spec.hidden_size
        self.x = tape.padded("x", tokens, hidden)
        self.qkv = tape.padded("qkv", tokens, spec.qkv_size)
        self.attention = tape.padded("attention", tokens, spec.n_heads * spec.head_dim)
        self.inner = tape.padded("inner", tokens, spec.intermediate_size)
        self.sums = tape.dense("split_k", 1, SPLIT_K_ELEMENTS)
        self.picked = tape.padded("picked", sequences, hidden)
        self.hidden = tape.padded("hidden", sequences, hidden)

    def build(self) -> Tape:
        """Return the finished tape."""
        self.embed()
        for layer in range(self.spec.n_layers):
            self.attend(layer)
            self.transform(layer)
        if self.spec.labels:
            self.classify()
        else:
            self.pool()
        return self.tape.finish("encode", ENCODE_ARGS, self.tokens, self.sequences)

    def embed(self) -> None:
        """Token ids, positions and types to x."""
        tables: list[Value] = []
        for ids, table in (("token_ids", "words"), ("positions", "places"), ("type_ids", "kinds")):
            tables += [ArgRef(name=ids), self.weight(table)]
        norm = (self.weight("embed_norm"), self.weight("embed_norm_bias"), self.spec.norm_eps)
        values = (_T, self.spec.hidden_size, *tables, *norm, *self.rows(self.x))
        self.tape.add("embed_sum", "embed", "n_tokens", *values)

    def attend(self, layer: int) -> None:
        """X = norm(x + attention), each text within itself."""
        spec, name, segment = self.spec, f"layers.{layer}", f"attn({layer})"
        self.linear("qkv", segment, f"{name}.qkv", self.x, self.qkv)
        heads: tuple[Value, ...] = (spec.n_heads, spec.head_dim, spec.head_dim**-0.5, 0)
        where = (self.weight("slopes"), *self.rows(self.qkv), ArgRef(name="seq_starts"))
        self.tape.add(
            "packed_attention", segment, "n_sequences",
            _S, *heads, *where, *self.rows(self.attention),
        )  # fmt: skip
        self.linear("o", segment, f"{name}.o", self.attention, self.x, residual=self.x)
        self.norm(segment, f"{name}.attention_norm")

    def transform(self, layer: int) -> None:
        """X = norm(x + MLP)."""
        name, segment = f"layers.{layer}", f"mlp({layer})"
        self.linear("up", segment, f"{name}.up", self.x, self.inner)
        self.linear("down", segment, f"{name}.down", self.inner, self.x, residual=self.x)
        self.norm(segment, f"{name}.output_norm")

    def pool(self) -> None:
        """One row for each text, of length 1 where the model says so."""
        hidden = self.spec.hidden_size
        end: tuple[Value, int] = (ArgRef(name="out"), hidden)
        pooled = self.rows(self.picked) if self.spec.unit else end
        if self.spec.pooling == "mean":
            starts = ArgRef(name="seq_starts")
            values = (_S, hidden, starts, *self.rows(self.x), *pooled)
            self.tape.add("mean_rows", "pool", "n_sequences", *values)
        else:
            self.pick(pooled)
        if self.spec.unit:
            picked = self.rows(self.picked)
            self.tape.add("unit_rows", "pool", "n_sequences", _S, hidden, *picked, *end)

    def classify(self) -> None:
        """Logits of each text's first row: a layer with tanh, and one without."""
        self.pick(self.rows(self.picked))
        self.linear("pooler", "head", "pooler", self.picked, self.hidden, m=_S)
        rows = self.rows(self.hidden)
        self.tape.add("tanh_rows", "head", "n_sequences", _S, self.spec.hidden_size, *rows, *rows)
        out = (ArgRef(name="out"), self.spec.labels)
        self.gemm("classifier", "head", "classifier", self.hidden, _S, *_NO_RESIDUAL, *out)

    def pick(self, out: tuple[Value, int]) -> None:
        """Append a copy of the row that stands for each text."""
        values = (_S, self.spec.hidden_size, ArgRef(name="picked_rows"), *self.rows(self.x), *out)
        self.tape.add("gather_rows", "pool", "n_sequences", *values)

    # ---- groups of slots ----

    def norm(self, segment: str, weight: str) -> None:
        """Append x = LayerNorm(x)."""
        x, spec = self.rows(self.x), self.spec
        scale = (self.weight(weight), self.weight(f"{weight}_bias"), spec.norm_eps)
        self.tape.add("layernorm", segment, "n_tokens", _T, spec.hidden_size, *x, *scale, *x)

    def linear(
        self,
        op: str,
        segment: str,
        weight: str,
        a: BufferRef,
        c: BufferRef,
        *,
        residual: BufferRef | None = None,
        m: ArgRef | None = None,
    ) -> None:
        """Append c = a W^T + bias + residual over all rows."""
        added = self.rows(residual) if residual else _NO_RESIDUAL
        self.gemm(op, segment, weight, a, m or _T, *added, *self.rows(c))

    def gemm(
        self, op: str, segment: str, weight: str, a: BufferRef, m: ArgRef, *rest: Value
    ) -> None:
        """Append a product; `rest` are residual and output."""
        entry = self.weights[weight]
        stride = FORMATS[entry.dtype].panel_elements(entry.k)
        given = (self.weight(weight), stride, self.weight(f"{weight}_bias"))
        values = (m, entry.n, entry.k, *self.rows(a), *given, *rest, self.sums, SPLIT_K_ELEMENTS)
        self.tape.add(op, segment, m.name, *values)

    def rows(self, buffer: BufferRef) -> tuple[BufferRef, int]:
        """Return a buffer and its stride."""
        return buffer, self.tape.stride(buffer)

    def weight(self, name: str) -> WeightRef:
        """Return a weight, or null where this encoder has none of that name."""
        return WeightRef(name=name if name in self.weights else None)


_T, _S = ArgRef(name="n_tokens"), ArgRef(name="n_sequences")
_NO_RESIDUAL: tuple[Value, int] = (WeightRef(name=None), 0)
