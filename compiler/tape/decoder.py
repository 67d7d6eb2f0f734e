"""The layers of a decoder as entries of a tape, but for what its rows see of others.

In: a ModelSpec and the weight index. Out: entries, segment by segment. What rows see of others is
apart (`forward.py`): an encoder may have the layers of a decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dovetail.compiler.tape.builder import NO_RESIDUAL, TapeBuilder, Value
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.model import (
    SPLIT_K_ELEMENTS,
    XIELU,
    ExpertSpec,
    MlpPart,
    ModelSpec,
    WeightEntry,
    rope_names,
)
from dovetail.ir.tape import (
    ArgRef,
    BufferRef,
    Groups,
    WeightRef,
)

F32_BYTES = DTYPES["f32"].size
STEP_ROWS, OUT_ROWS = ArgRef(name="n_tokens"), ArgRef(name="n_out")
"""Arguments of a forward tape: all rows of a step, and those that are read later."""
_BRANCH_NORMS = {"o": "attention_norm", "down": "mlp_norm", "input_out": "input_out_norm"}
_INPUTS = ("layer_inputs", "projected_inputs")


class DecoderTape(TapeBuilder):
    """The layers of a decoder, but for what its rows see of others."""

    def __init__(
        self, spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        super().__init__(weights)
        self.spec, self.tokens, self.sequences = spec, tokens, sequences
        layers, hidden = range(spec.n_layers), spec.hidden_size
        inner = max(map(spec.layer_inner, layers))
        self.x = self.padded("x", tokens, hidden)
        self.normed = self.padded("normed", tokens, hidden)
        self.qkv = self.padded("qkv", tokens, spec.qkv_size)
        self.attention = self.padded("attention", tokens, spec.mixed_size)
        each = spec.experts.used if spec.experts else 1
        self.inner = self.padded("inner", tokens * each, inner)
        if spec.experts:
            widest = max(spec.experts.shared, spec.experts.dense, spec.dense_inner)
            self.dense_inner = self.padded("dense_inner", tokens, widest) if widest else self.inner
            self.scores = self.padded("scores", tokens, spec.experts.scores)
            self.mixed = self.padded("mixed", tokens * each, hidden)
            self.starts = self.dense("starts", 1, spec.experts.count + 1)
            self.chosen, self.places, self.sources, self.shares = (
                self.dense(name, tokens, each) for name in ("chosen", "places", "tokens", "shares")
            )
        self.split = (self.dense("split_k", 1, SPLIT_K_ELEMENTS), SPLIT_K_ELEMENTS)
        if spec.ordered:
            widest = max(self.weights[name].k for name in spec.ordered)
            self.padded(self.ordered.name, tokens, widest)
        self.picked = self.padded("picked", sequences, hidden)
        self.picked_attention = self.padded("picked_attention", sequences, spec.mixed_size)
        if spec.dense_inner:
            self.dense_out = self.padded("dense_out", tokens, hidden)
        if spec.layer_inputs:
            every = spec.n_layers * spec.layer_inputs
            self.given, self.projected = (self.padded(n, tokens, every) for n in _INPUTS)
            self.gate = self.padded("gate", tokens, spec.layer_inputs)
            self.first_picked = spec.n_layers - 1
            last = max(1, spec.shared_kv) * spec.layer_inputs
            self.picked_inputs = self.padded("picked_inputs", sequences, last)
        if spec.parallel:
            self.picked_normed = self.padded("picked_normed", sequences, hidden)

    def embed(self) -> None:
        """Token ids to x; a tied model reads the head's packed columns."""
        table = "head" if self.spec.tied_head else "embed"
        values = (STEP_ROWS, self.spec.hidden_size, arg("token_ids"), self.weight(table))
        self.add("embed", "embed", *values, *self.rows(self.x))
        if self.spec.layer_inputs:
            self.embed_layers(self.spec.layer_inputs)

    def embed_layers(self, width: int) -> None:
        """What each layer has of a token: its own embedding, and the normed product of x's.

        Both are kept smaller by sqrt(width / 2), as x is by the stream's scale.
        """
        spec, table = self.spec, self.weight("layer_embed")
        every = spec.n_layers * width
        given = self.rows(self.given)
        self.add("embed_layers", "embed", STEP_ROWS, every, arg("token_ids"), table, *given)
        self.linear("layer_inputs", "embed", STEP_ROWS, "layer_inputs", self.x, self.projected)
        norm = self.weight("layer_inputs_norm"), spec.norm_eps
        rows = self.rows(self.projected)
        self.add("rmsnorm_parts", "embed", STEP_ROWS, spec.n_layers, width, *rows, *norm, *given)

    def pre_attention(self, layer: int, m: ArgRef = STEP_ROWS, x: BufferRef | None = None) -> None:
        """Norm and the fused q, k, v projection of m rows, by default of all."""
        name = f"layers.{layer}.input_norm"
        self.project(layer, m, self.norm_before(f"pre_attn({layer})", name, x or self.x, m))

    def norm_before(self, segment: str, weight: str, x: BufferRef, m: ArgRef) -> BufferRef:
        """Return what a branch reads: m rows of x, normed where norms come first."""
        if not self.spec.pre_norms:
            return x
        self.norm(segment, weight, x, self.normed, m)
        return self.normed

    def project(self, layer: int, m: ArgRef, source: BufferRef) -> None:
        """Append q, k and v: one product, or three side by side, which share no partial sums."""
        if len(parts := self.spec.qkv_parts(layer)) == 1:
            name = f"layers.{layer}.qkv"
            self.linear("qkv", f"pre_attn({layer})", m, name, source, self.qkv)
            return
        bias, column, size = f"layers.{layer}.qkv_bias", 0, DTYPES["f32"].size
        for name in parts:
            n = self.weights[name].n
            segment = f"pre_attn({layer})"
            gemm = self.gemm(name, self.in_order(segment, m, name, source), m)
            added = WeightRef(name=bias if bias in self.weights else None, offset=column * size)
            out = replace(self.qkv, offset=column * size)
            values = (*gemm[:-1], added, *NO_RESIDUAL, out, self.rows(self.qkv)[1])
            self.add("qkv", segment, *values, self.split[0], 0)
            column += n

    def pick(self, layer: int, m: ArgRef, places: str) -> tuple[ArgRef, BufferRef, BufferRef]:
        """Gather the m rows that are read later: behind the last layer's K and V no other is."""
        segment = f"post_attn({layer})"
        picked = self.pick_stream(layer, m, places, segment)
        if self.spec.mixes(layer):
            self.gather(segment, m, places, self.attention, self.picked_attention)
        if self.spec.parallel:
            self.gather(segment, m, places, self.normed, self.picked_normed)
        return picked

    def pick_stream(
        self, layer: int, m: ArgRef, places: str, segment: str
    ) -> tuple[ArgRef, BufferRef, BufferRef]:
        """Gather these rows of x, and of what the layers from `layer` on have of their own."""
        self.gather(segment, m, places, self.x, self.picked)
        if self.spec.layer_inputs:
            self.first_picked = layer
            last = (self.spec.n_layers - layer) * self.spec.layer_inputs
            rows = self.rows(self.input_of(layer)), self.rows(self.picked_inputs)
            self.add("gather_rows", segment, m, last, ArgRef(name=places), *rows[0], *rows[1])
        return m, self.picked, self.picked_attention

    def input_of(self, layer: int, m: ArgRef = STEP_ROWS) -> BufferRef:
        """Return where a layer's own values are, of all tokens or of those that were picked."""
        rows, before = (
            (self.given, 0) if m == STEP_ROWS else (self.picked_inputs, self.first_picked)
        )
        return replace(rows, offset=(layer - before) * self.spec.layer_inputs * DTYPES["f32"].size)

    def post_attention(self, layer: int, m: ArgRef, x: BufferRef, attention: BufferRef) -> None:
        """Output projection and MLP of m rows, each added to x."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        if self.spec.mixes(layer):
            self.branch("o", segment, m, name, attention, x)
        if self.spec.recurrent and self.spec.recurrent.beside:
            mixed, _ = self.mixed_by(layer, attention)
            self.branch(self.spec.recurrent.out, segment, m, name, mixed, x)
        source = self.picked_normed if x == self.picked and self.spec.parallel else self.normed
        if self.spec.mlp_parts(layer) and not self.spec.parallel:
            source = self.norm_before(segment, f"{name}.post_norm", x, m)
        if (experts := self.spec.experts) and self.spec.dense_inner:
            self.mlp_and_experts(experts, layer, m, x)
        else:
            for part in self.spec.mlp_parts(layer):
                if part.experts:
                    self.choose(part.experts, layer, m)
                    self.experts(part.experts, layer, m, x, self.rows(x))
                else:
                    self.mlp(part, layer, m, source, x)
        if self.spec.layer_inputs:
            self.add_input(layer, m, x)

    def mixed_by(self, layer: int, rows: BufferRef) -> tuple[BufferRef, int]:
        """Return where a layer's rule puts what it gives: behind that of attention beside it."""
        before = self.spec.qkv_rows(layer)[0] if self.spec.attends(layer) else 0
        return replace(rows, offset=before * F32_BYTES), self.rows(rows)[1]

    def mlp(self, part: MlpPart, layer: int, m: ArgRef, source: BufferRef, x: BufferRef) -> None:
        """Append what all m rows go through; beside experts the router may gate it."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        inner = self.dense_inner if part.prefix else self.inner
        up = part.prefix + self.spec.up
        if not self.spec.gated:
            self.linear(up, segment, m, f"{name}.{up}", source, inner)
            if self.spec.activation == XIELU:
                numbers = self.weight(f"{name}.xielu")
                self.add("xielu_rows", segment, m, part.columns, *self.rows(inner), numbers)
        else:
            self.product(up, segment, m, f"{name}.{up}", source, *self.rows(inner))
        experts = self.spec.mlp_parts(layer)[0].experts
        if experts and experts.gated:
            gates = replace(self.scores, offset=experts.count * F32_BYTES)
            stride = self.rows(self.scores)[1]
            self.add("row_gate", segment, m, part.columns, gates, stride, *self.rows(inner))
        self.branch(part.prefix + "down", segment, m, name, inner, x)

    def add_input(self, layer: int, m: ArgRef, x: BufferRef) -> None:
        """Add to m rows of x what a layer has of its own of these tokens, gated by x."""
        name, segment, spec = f"layers.{layer}", f"post_attn({layer})", self.spec
        own = self.input_of(layer, m)
        gate = self.rows(self.gate)
        self.linear("input_gate", segment, m, f"{name}.input_gate", x, self.gate)
        scale, stride = spec.stream_scale, self.rows(own)[1]
        self.add("gate_rows", segment, m, spec.layer_inputs, *gate, scale, own, stride)
        self.branch("input_out", segment, m, name, self.gate, x)

    def mlp_and_experts(self, experts: ExpertSpec, layer: int, m: ArgRef, x: BufferRef) -> None:
        """An MLP of m normed rows, experts of others, each normed: their normed sum is added to x.

        Who chooses experts, and these, read x with norms of their own.
        """
        name, segment, spec = f"layers.{layer}", f"post_attn({layer})", self.spec
        normed, dense = self.rows(self.normed), self.rows(self.dense_out)
        inner, rows = self.rows(self.dense_inner), (m, spec.hidden_size, *normed)
        self.product("dense_gate_up", segment, m, f"{name}.dense_gate_up", self.normed, *inner)
        self.linear("dense_down", segment, m, f"{name}.dense_down", self.dense_inner, self.normed)
        norm, eps = self.weight(f"{name}.dense_norm"), spec.norm_eps
        self.add("rmsnorm", segment, *rows, norm, eps, *dense)
        self.norm(segment, f"{name}.router_norm", x, self.normed, m)
        self.choose(experts, layer, m)
        self.norm(segment, f"{name}.experts_norm", x, self.normed, m)
        self.experts(experts, layer, m, self.normed, NO_RESIDUAL)
        norm, none = self.weight(f"{name}.experts_out_norm"), WeightRef(name=None)
        self.add("rmsnorm_add", segment, *rows, norm, eps, none, *dense)
        self.add_normed("down", segment, m, name, self.dense_out, x)

    def choose(self, experts: ExpertSpec, layer: int, m: ArgRef) -> None:
        """Append the choice of experts for m normed rows, and their order."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        self.linear("router", segment, m, f"{name}.router", self.normed, self.scores)
        scores, how = self.rows(self.scores), (int(experts.share), experts.scale)
        choice, factors = (self.weight(f"{name}.{n}") for n in ("choice", "expert_scale"))
        chosen, found = (m, experts.count, experts.used), (self.chosen, self.shares)
        groups = experts.groups, experts.groups_used
        asked = (*chosen, *groups, choice, int(experts.sigmoid), *how, factors, *scores, *found)
        self.add("route", segment, *asked)
        sorted_ = self.starts, self.places, self.sources
        self.add("sort_experts", segment, *chosen, self.chosen, *sorted_)

    def experts(
        self,
        experts: ExpertSpec,
        layer: int,
        m: ArgRef,
        out: BufferRef,
        residual: tuple[Value, int],
    ) -> None:
        """Append the experts of m normed rows: each multiplies those that chose it; out: sums."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        used, normed = experts.used, self.rows(self.normed)
        rows = m, used, self.spec.hidden_size
        self.add("expert_rows", segment, *rows, self.sources, *normed, *self.rows(self.mixed))
        whole = self.split[0], 0  # sums of K are never parted
        inner: tuple[Value, ...] = self.rows(self.inner)
        if not self.spec.gated:
            inner = (*NO_RESIDUAL, *inner, *whole)
        for op, a, rest in (
            (self.spec.up, self.mixed, inner),
            ("down", self.inner, (*NO_RESIDUAL, *self.rows(self.mixed), *whole)),
        ):
            weight, count = self.weights[f"{name}.{op}"], experts.count
            bias = self.weights.get(f"{weight.name}_bias")
            groups = Groups(
                count=count,
                each=used,
                starts=self.starts,
                bytes=weight.bytes // count,
                bias_bytes=bias.bytes // count if bias else 0,
            )
            self.add(op, segment, *self.gemm(weight.name, a, m, count), *rest, groups=groups)
        summed = self.places, self.shares, *self.rows(self.mixed), *residual
        scale = self.spec.branch_scale
        self.add("combine_experts", segment, *rows, *summed, scale, *self.rows(out))

    def branch(
        self, op: str, segment: str, m: ArgRef, layer: str, a: BufferRef, x: BufferRef
    ) -> None:
        """Append the product that ends a branch of a layer; what it gives is added to x."""
        weight = f"{layer}.{op}"
        spec = self.spec
        if not spec.branch_norms and spec.branch_scale == 1.0:
            self.linear(op, segment, m, weight, a, x, residual=x)
            return
        self.linear(op, segment, m, weight, a, self.normed)
        if spec.branch_norms:
            self.add_normed(op, segment, m, layer, self.normed, x)
        else:
            rows = (m, spec.hidden_size, *self.rows(self.normed))
            self.add("scaled_add", segment, *rows, spec.branch_scale, *self.rows(x))

    def add_normed(
        self, op: str, segment: str, m: ArgRef, layer: str, a: BufferRef, x: BufferRef
    ) -> None:
        """Append what adds a branch to x: its norm, and behind a layer's last one x's scale."""
        spec = self.spec
        ends = op == ("input_out" if spec.layer_inputs else "down")
        eps = spec.norm_eps * (2 / spec.layer_inputs if op == "input_out" else 1)
        scale = self.weight(f"{layer}.scale") if ends else WeightRef(name=None)
        norm = self.weight(f"{layer}.{_BRANCH_NORMS[op]}")
        rows = (m, spec.hidden_size, *self.rows(a))
        self.add("rmsnorm_add", segment, *rows, norm, eps, scale, *self.rows(x))

    # ---- groups of slots ----

    def norm(
        self, segment: str, weight: str, x: BufferRef, out: BufferRef, m: ArgRef = STEP_ROWS
    ) -> None:
        """Append a norm of the first m rows."""
        spec = self.spec
        rows, end = (m, spec.hidden_size, *self.rows(x)), (spec.stream_eps, *self.rows(out))
        if spec.layer_norm:
            bias = WeightRef(name=None)
            self.add("layernorm", segment, *rows, self.weight(weight), bias, *end)
        else:
            self.add("rmsnorm", segment, *rows, self.weight(weight), *end)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.spec.attention_scale or self.spec.head_dim**-0.5

    def turns(self, layer: int, positions: str = "positions") -> tuple[Value, ...]:
        """Return how q and k of a layer are normed and rotated."""
        rope, _ = self.spec.layer_rope(layer)
        norms = (self.weight(f"layers.{layer}.{part}_norm") for part in "qk")
        tables = map(self.weight, rope_names(rope))
        return arg(positions), *tables, *norms, self.spec.norm_eps

    def stored_heads(self, layer: int) -> tuple[int, int, int]:
        """Return query heads, KV heads that are a layer's own, and head_dim."""
        heads, kv_heads, size = self.spec.layer_heads(layer)
        return heads, kv_heads if self.spec.kv_values(layer) else 0, size


def arg(name: str) -> ArgRef:
    """Return an argument of the tape."""
    return ArgRef(name=name)
