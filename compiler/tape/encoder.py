"""Lowers one pass of an encoder to a tape: packed texts in, one row for each text out.

In: EncoderSpec, the weight index and the largest pass. Out: a Tape, verified as all are.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.compiler.tape.builder import NO_RESIDUAL, TapeBuilder, Value
from dovetail.compiler.tape.decoder import DecoderTape
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.model import SPLIT_K_ELEMENTS, WeightEntry, rope_names
from dovetail.ir.tape import ENCODE_ARGS, ArgRef, BufferRef, Tape, WeightRef


def build_encode_tape(
    spec: EncoderSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
) -> Tape:
    """Return the tape of one pass over at most so many token rows and texts."""
    if spec.decoder:
        return _EncodeDecoder(spec, weights, tokens, sequences).build()
    return _Encode(spec, weights, tokens, sequences).build()


class _Packed(TapeBuilder):
    """What tapes of packed texts share: texts apart from one another, and one row of each at last.

    x, attention, count: what is computed with from here on: a row of each token, then of each text.
    """

    encoder: EncoderSpec
    sequences: int
    x: BufferRef
    qkv: BufferRef
    attention: BufferRef
    picked: BufferRef
    count: ArgRef

    def see(self, segment: str, heads: tuple[int, int, int], scale: float, local: bool) -> None:
        """Append attention, each text within itself; heads: of queries, of keys, their values."""
        spec = self.encoder
        how: tuple[Value, ...] = (*heads, scale, spec.reach if local else 0, int(spec.causal))
        where = (*self.rows(self.qkv), ArgRef(name="seq_starts"), *self.rows(self.attention))
        self.add("packed_attention", segment, _S, *how, self.weight("bias"), spec.span, *where)

    @property
    def picks_early(self) -> bool:
        """Whether one row stands for a text, and something follows that reads it."""
        spec = self.encoder
        return spec.pooling != "mean" and bool(spec.unit or spec.labels or spec.dense)

    def embed_texts(self) -> None:
        """One row for each text, through its dense layers, of length 1 where the model says so."""
        spec, end = self.encoder, (ArgRef(name="out"), self.encoder.dim)
        wide = [self.padded(f"dense.{i}", self.sequences, d.n) for i, d in enumerate(spec.dense)]
        rows = [self.x if self.picks_early else self.picked, *wide]
        targets: list[tuple[Value, int]] = [self.rows(each) for each in rows]
        if not spec.unit:
            targets[-1] = end
        self.pool(targets[0])
        for i, layer in enumerate(spec.dense):
            rest = (*NO_RESIDUAL, *targets[i + 1], *self.split)
            self.product("dense", "pool", _S, f"dense.{i}", rows[i], *rest)
            if layer.tanh:
                self.add("activate_rows", "pool", _S, layer.n, *targets[i + 1], *targets[i + 1])
        if spec.unit:
            self.add("unit_rows", "pool", _S, spec.dim, *self.rows(rows[-1]), *end)

    def score_texts(self, rows: BufferRef) -> None:
        """Logits of each text's row."""
        rest = (*NO_RESIDUAL, ArgRef(name="out"), self.encoder.labels, *self.split)
        self.product("classifier", "head", _S, "classifier", rows, *rest)

    def pool(self, out: tuple[Value, int]) -> None:
        """Append the mean of each text's rows, or a copy of the one that stands for it."""
        if self.picks_early:
            return
        mean = self.encoder.pooling == "mean"
        where = ArgRef(name="seq_starts" if mean else "picked_rows")
        values = (_S, self.encoder.hidden_size, where, *self.rows(self.x), *out)
        self.add("mean_rows" if mean else "gather_rows", "pool", *values)
        self.count = _S


class _Encode(_Packed):
    """The encode tape, one method per segment."""

    def __init__(
        self, spec: EncoderSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        super().__init__(weights)
        self.spec = self.encoder = spec
        self.tokens, self.sequences = tokens, sequences
        hidden = spec.hidden_size
        self.x = self.padded("x", tokens, hidden)
        self.normed = self.padded("normed", tokens, hidden)
        self.qkv = self.padded("qkv", tokens, spec.qkv_size)
        heads = spec.n_heads * spec.head_dim
        self.attention = self.padded("attention", tokens, heads)
        self.picked_attention = self.padded("picked_attention", sequences, heads)
        self.inner = self.padded("inner", tokens, spec.intermediate_size)
        self.split = (self.dense("split_k", 1, SPLIT_K_ELEMENTS), SPLIT_K_ELEMENTS)
        self.picked = self.padded("picked", sequences, hidden)
        self.hidden = self.padded("hidden", sequences, hidden)
        self.count = _T

    def build(self) -> Tape:
        """Return the finished tape."""
        self.embed()
        for layer in range(self.spec.n_layers):
            self.attend(layer)
            if layer + 1 == self.spec.n_layers and self.picks_early:
                self.pick(f"attn({layer})")
            self.add_attention(layer)
            self.transform(layer)
        self.norm("final", "final_norm", self.x, self.x)
        if self.spec.labels:
            self.classify()
        else:
            self.embed_texts()
        return self.finish("encode", ENCODE_ARGS, self.tokens, self.sequences)

    def embed(self) -> None:
        """Token ids, positions and types to x."""
        tables: list[Value] = []
        for ids, table in (("token_ids", "words"), ("positions", "places"), ("type_ids", "kinds")):
            tables += [ArgRef(name=ids), self.weight(table)]
        norm = (self.weight("embed_norm"), self.weight("embed_norm_bias"), self.spec.norm_eps)
        values = (self.count, self.spec.hidden_size, *tables, *norm, *self.rows(self.x))
        self.add("embed_sum", "embed", *values)

    def attend(self, layer: int) -> None:
        """Attention of x, normed where norms come first, each text within itself."""
        spec, name, segment = self.spec, f"layers.{layer}", f"attn({layer})"
        source = self.norm_before(segment, f"{name}.attention_norm")
        self.linear("qkv", segment, self.count, f"{name}.qkv", source, self.qkv)
        local = spec.is_local(layer)
        self.rotate(segment, "local_rope" if local else "rope")
        heads = (spec.n_heads, spec.n_heads, spec.head_dim)
        self.see(segment, heads, spec.head_dim**-0.5, local)

    def pick(self, segment: str) -> None:
        """Go on with the rows that stand for their texts: nobody reads the others any more."""
        for source, target in ((self.x, self.picked), (self.attention, self.picked_attention)):
            self.gather(segment, _S, "picked_rows", source, target)
        self.x, self.attention, self.count = self.picked, self.picked_attention, _S

    def add_attention(self, layer: int) -> None:
        """X = x + attention, normed where norms come last."""
        segment, name = f"attn({layer})", f"layers.{layer}"
        self.linear("o", segment, self.count, f"{name}.o", self.attention, self.x, residual=self.x)
        self.norm_after(segment, f"{name}.attention_norm")

    def transform(self, layer: int) -> None:
        """X = x + MLP, normed before or after."""
        name, segment = f"layers.{layer}", f"mlp({layer})"
        source = self.norm_before(segment, f"{name}.mlp_norm")
        if self.spec.gated:
            inner = self.rows(self.inner)
            self.product("gate_up", segment, self.count, f"{name}.gate_up", source, *inner)
        else:
            self.linear("up", segment, self.count, f"{name}.up", source, self.inner)
        self.linear(
            "down", segment, self.count, f"{name}.down", self.inner, self.x, residual=self.x
        )
        self.norm_after(segment, f"{name}.mlp_norm")

    def classify(self) -> None:
        """Logits of each text's pooled row: a layer with an activation, and one without."""
        self.pool(self.rows(self.picked))
        self.linear("pooler", "head", self.count, "pooler", self.picked, self.hidden)
        if self.spec.head == "tanh":
            rows, hidden = self.rows(self.hidden), self.spec.hidden_size
            self.add("activate_rows", "head", _S, hidden, *rows, *rows)
        self.norm("head", "pooler_norm", self.hidden, self.hidden)
        self.score_texts(self.hidden)

    # ---- groups of slots ----

    def norm_before(self, segment: str, weight: str) -> BufferRef:
        """Return what half of a layer reads: x, normed where norms come first and there is one."""
        if not self.spec.norm_first or weight not in self.weights:
            return self.x
        self.norm(segment, weight, self.x, self.normed)
        return self.normed

    def norm_after(self, segment: str, weight: str) -> None:
        """Append x = norm(x) where norms come last."""
        if not self.spec.norm_first:
            self.norm(segment, weight, self.x, self.x)

    def norm(self, segment: str, weight: str, x: BufferRef, out: BufferRef) -> None:
        """Append out = LayerNorm(x), if this encoder has a norm of that name."""
        if weight not in self.weights:
            return
        spec = self.spec
        scale = (self.weight(weight), self.weight(f"{weight}_bias"), spec.norm_eps)
        rows = (*self.rows(x), *scale, *self.rows(out))
        self.add("layernorm", segment, self.count, spec.hidden_size, *rows)

    def rotate(self, segment: str, table: str) -> None:
        """Append the rotation of q and k, if this encoder has that table."""
        spec = self.spec
        if table not in spec.ropes:
            return
        tables = map(self.weight, rope_names(table))
        heads = (*self.rows(self.qkv), spec.n_heads, spec.n_heads, spec.head_dim)
        norms = (WeightRef(name=None), WeightRef(name=None), spec.norm_eps)
        self.add("rope_rows", segment, _T, *heads, ArgRef(name="positions"), *tables, *norms)


class _EncodeDecoder(DecoderTape, _Packed):
    """The encode tape of a decoder's layers: nothing is kept of a text."""

    def __init__(
        self, encoder: EncoderSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        assert encoder.decoder is not None
        super().__init__(encoder.decoder, weights, tokens, sequences)
        self.encoder, self.count = encoder, _T

    def build(self) -> Tape:
        """Return the finished tape."""
        self.embed()
        for layer in range(self.spec.n_layers):
            self.pre_attention(layer)
            heads = (*self.rows(self.qkv), *self.spec.layer_heads(layer))
            self.add("rope_rows", f"pre_attn({layer})", _T, *heads, *self.turns(layer))
            local = self.encoder.is_local(layer)
            self.see(f"attn({layer})", self.spec.layer_heads(layer), self.scale, local)
            if layer + 1 == self.spec.n_layers and self.picks_early:
                self.count, self.x, self.attention = self.pick(layer, _S, "picked_rows")
            self.post_attention(layer, self.count, self.x, self.attention)
        self.norm("final", "final_norm", self.x, self.normed, self.count)
        self.x = self.normed
        if self.encoder.labels:
            self.score_texts(self.x)
        else:
            self.embed_texts()
        return self.finish("encode", ENCODE_ARGS, self.tokens, self.sequences)


_T, _S = ArgRef(name="n_tokens"), ArgRef(name="n_sequences")
