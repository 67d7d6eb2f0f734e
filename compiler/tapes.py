"""Lowers one model step to a tape: the forward tape (prefill and decode alike) and the sample tape.

In: ModelSpec, the weight index and the largest step. Out: a Tape, verified. Barriers follow from
what entries read and write; buffers are planned by liveness. What rows of a layer see of others is
apart: an encoder may have the layers of a decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dovetail.compiler.tape_builder import NO_RESIDUAL, TapeBuilder, Value
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.model import (
    MAX_KV_SPLITS,
    ROWS,
    SPLIT_K_ELEMENTS,
    TURNED,
    ExpertSpec,
    MlpPart,
    ModelSpec,
    RecurrentSpec,
    WeightEntry,
    rope_names,
)
from dovetail.ir.tape import (
    FORWARD_ARGS,
    OUT_ARGS,
    SAMPLE_ARGS,
    STATE_ARGS,
    WHOLE,
    ArgRef,
    BufferRef,
    Groups,
    KvRef,
    StateRef,
    Tape,
    WeightRef,
)

_BRANCH_NORMS = {"o": "attention_norm", "down": "mlp_norm", "input_out": "input_out_norm"}
_INPUTS = ("layer_inputs", "projected_inputs")
_F32 = DTYPES["f32"].size
_T, _OUT = ArgRef(name="n_tokens"), ArgRef(name="n_out")
_COUNTS = ArgRef(name="n_prefill"), ArgRef(name="n_decode")


def build_forward_tape(
    spec: ModelSpec,
    weights: Sequence[WeightEntry],
    max_step_tokens: int,
    max_step_sequences: int,
    *,
    whole: bool = False,
) -> Tape:
    """Return the tape of one step of at most so many token rows and sequences.

    `kv_splits` of a run may be at most MAX_KV_SPLITS. whole: layers that store no K and V compute
    all rows, too, not only those whose logits are wanted.
    """
    forward = ForwardTape(spec, weights, max_step_tokens, max_step_sequences)
    return forward.build(WHOLE if whole else "forward", spec.n_layers if whole else forward.own)


def build_sample_tape(spec: ModelSpec, max_step_sequences: int) -> Tape:
    """Return the tape that chooses a token for each of up to `max_step_sequences` logits rows."""
    tape = TapeBuilder()
    scratch = tape.dense("scratch", max_step_sequences, spec.vocab_size)
    values: list[Value] = [ArgRef(name=name) for name in SAMPLE_ARGS]
    rows, logits, stride, *rest = values
    tape.add("sample", "sample", rows, spec.vocab_size, logits, stride, *rest, scratch)
    return tape.finish("sample", SAMPLE_ARGS, max_step_sequences, max_step_sequences)


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
        values = (_T, self.spec.hidden_size, _arg("token_ids"), self.weight(table))
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
        self.add("embed_layers", "embed", _T, every, _arg("token_ids"), table, *given)
        self.linear("layer_inputs", "embed", _T, "layer_inputs", self.x, self.projected)
        norm = self.weight("layer_inputs_norm"), spec.norm_eps
        rows = self.rows(self.projected)
        self.add("rmsnorm_parts", "embed", _T, spec.n_layers, width, *rows, *norm, *given)

    def pre_attention(self, layer: int, m: ArgRef = _T, x: BufferRef | None = None) -> None:
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
            gemm = self.gemm(name, source, m)
            added = WeightRef(name=bias if bias in self.weights else None, offset=column * size)
            out = replace(self.qkv, offset=column * size)
            values = (*gemm[:-1], added, *NO_RESIDUAL, out, self.rows(self.qkv)[1])
            self.add("qkv", f"pre_attn({layer})", *values, self.split[0], 0)
            column += n

    def pick(self, layer: int, m: ArgRef, places: str) -> tuple[ArgRef, BufferRef, BufferRef]:
        """Gather the m rows that are read later: behind the last layer's K and V no other is."""
        segment = f"post_attn({layer})"
        picked = self.pick_stream(layer, m, places, segment)
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

    def input_of(self, layer: int, m: ArgRef = _T) -> BufferRef:
        """Return where a layer's own values are, of all tokens or of those that were picked."""
        rows, before = (self.given, 0) if m == _T else (self.picked_inputs, self.first_picked)
        return replace(rows, offset=(layer - before) * self.spec.layer_inputs * DTYPES["f32"].size)

    def post_attention(self, layer: int, m: ArgRef, x: BufferRef, attention: BufferRef) -> None:
        """Output projection and MLP of m rows, each added to x."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        self.branch("o", segment, m, name, attention, x)
        if self.spec.parallel:
            source = self.picked_normed if x == self.picked else self.normed
        else:
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

    def mlp(self, part: MlpPart, layer: int, m: ArgRef, source: BufferRef, x: BufferRef) -> None:
        """Append what all m rows go through; beside experts the router may gate it."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        inner = self.dense_inner if part.prefix else self.inner
        gate_up = part.prefix + "gate_up"
        self.product(gate_up, segment, m, f"{name}.{gate_up}", source, *self.rows(inner))
        experts = self.spec.mlp_parts(layer)[0].experts
        if experts and experts.gated:
            gates = replace(self.scores, offset=experts.count * _F32)
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
        asked = (*chosen, choice, int(experts.sigmoid), *how, factors, *scores, *found)
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
        for op, a, rest in (
            ("gate_up", self.mixed, self.rows(self.inner)),
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

    def norm(self, segment: str, weight: str, x: BufferRef, out: BufferRef, m: ArgRef = _T) -> None:
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
        return _arg(positions), *tables, *norms, self.spec.norm_eps

    def stored_heads(self, layer: int) -> tuple[int, int, int]:
        """Return query heads, KV heads that are a layer's own, and head_dim."""
        heads, kv_heads, size = self.spec.layer_heads(layer)
        return heads, kv_heads if self.spec.kv_values(layer) else 0, size


class ForwardTape(DecoderTape):
    """The forward tape, one method per segment."""

    def __init__(
        self, spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        super().__init__(spec, weights, tokens, sequences)
        part = spec.n_heads * MAX_KV_SPLITS * (max(hd for *_, hd in spec.head_shapes) + 16)
        self.partial = self.dense("partial", sequences, part)
        self.final = self.padded("final", sequences, spec.hidden_size)
        if recurrent := spec.recurrent:
            self.mixing = self.padded("mixing", tokens, recurrent.channels * recurrent.parts)
            if recurrent.delta:
                self.convolved = self.padded("convolved", tokens, recurrent.channels)
                self.gates = self.padded("gates", tokens, recurrent.width)
                self.rates = self.padded("rates", tokens, 2 * recurrent.value_heads)
        self.own = spec.n_layers - spec.shared_kv

    def build(self, name: str, own: int) -> Tape:
        """Return the finished tape; layers from `own` on compute the rows that are read alone."""
        self.embed()
        last, rows = self.spec.n_layers - 1, (_T, self.x, self.attention)
        for layer in range(self.spec.n_layers):
            if layer == own:
                rows = self.pick_stream(layer, _OUT, "out_rows", f"pre_attn({layer})")
            if self.spec.recurrent and self.spec.is_recurrent(layer):
                self.mix(self.spec.recurrent, layer)
            elif layer < own:
                self.pre_attention(layer)
                self.attend(layer)
            else:
                self.attend_picked(layer)
            if layer == last < own:
                rows = self.pick(layer, _OUT, "out_rows")
            self.post_attention(layer, *rows)
        self.head()
        args = FORWARD_ARGS + (STATE_ARGS if self.spec.recurrent else ())
        args += OUT_ARGS if self.spec.shared_kv else ()
        return self.finish(name, args, self.tokens, self.sequences)

    def attend_picked(self, layer: int) -> None:
        """Queries of the picked rows, each of which attends like a decode, and no K and V."""
        super().pre_attention(layer, _OUT, self.picked)
        self.turn(layer, _OUT, "out_positions")
        where = self.keys(layer, ("out_lengths", "out_tables"))
        self.decode(layer, 0, _OUT, where, self.picked_attention)

    def decode(
        self, layer: int, behind: Value, m: ArgRef, where: tuple[Value, ...], out: BufferRef
    ) -> None:
        """Attention of m single rows behind so many prompts; where: as of `keys`."""
        rest = _arg("kv_splits"), *where, self.partial, *self.rows(out)
        values = (behind, m, *self.seen(layer), *rest)
        self.add("decode_attention", f"attn({layer})", *values, m=m, skips=True)

    def keys(self, layer: int, names: tuple[str, str]) -> tuple[Value, ...]:
        """Return queries, and where their keys are; names: of lengths and block tables."""
        given = map(_arg, ("seq_starts", *names, "table_stride"))
        return (*self.turned, *given, *self.pools(layer))

    def seen(self, layer: int) -> tuple[Value, ...]:
        """Return heads of a layer's attention, and what their scores are about."""
        window, sinks = self.spec.layer_window(layer), self.weight(f"layers.{layer}.sinks")
        return (*self.spec.layer_heads(layer), self.scale, window, sinks)

    def pre_attention(self, layer: int, m: ArgRef = _T, x: BufferRef | None = None) -> None:
        """Norm and projection, rotary embedding, and k and v into the pools."""
        super().pre_attention(layer, m, x)
        self.turn(layer, m, "positions")

    def turn(self, layer: int, m: ArgRef, positions: str) -> None:
        """Rotary embedding of m rows, and k and v into the pools."""
        spec, segment = self.spec, f"pre_attn({layer})"
        turns, (turned, apart) = self.turns(layer, positions), spec.layer_turns(layer)
        if spec.qk_norm and spec.qk_norm_of == ROWS:
            self.norm_heads(layer, m)
        if spec.qk_norm and spec.qk_norm_of == TURNED:
            assert turned == spec.head_dim
            plain = (*turns[:3], WeightRef(name=None), WeightRef(name=None), spec.norm_eps)
            rows = (*self.turned, *spec.layer_heads(layer))
            self.add("rope_rows", segment, m, *rows, *plain)
            turned = 0
        heads = (*self.turned, *self.stored_heads(layer), turned, apart)
        stored = (int(spec.v_norm), _arg("kv_slots"), *self.pools(layer))
        self.add("rope_store", segment, m, *heads, *turns, *stored)

    def norm_heads(self, layer: int, m: ArgRef) -> None:
        """Norm all heads of q together, and those of k."""
        n_q, n_kv, size = self.spec.layer_heads(layer)
        for part, first, count in (("q", 0, n_q), ("k", n_q, n_kv)):
            place = replace(self.qkv, offset=first * size * _F32)
            weight = self.weight(f"layers.{layer}.{part}_rows_norm")
            values = (m, count * size, place, self.rows(self.qkv)[1], weight, self.spec.norm_eps)
            self.add("norm_rows", f"pre_attn({layer})", *values)

    def attend(self, layer: int) -> None:
        """Prefill and decode attention, side by side: they write different rows."""
        prefill, out = _arg("n_prefill"), self.attention
        where = self.keys(layer, ("seq_lengths", "block_tables"))
        values = (prefill, *self.seen(layer), *where, *self.rows(out))
        self.add("prefill_attention", f"attn({layer})", *values, skips=True)
        self.decode(layer, prefill, _arg("n_decode"), where, out)
        if gates := self.spec.gate_size:
            self.add(
                "sigmoid_rows", f"attn({layer})", _T, gates, *self.rows(self.qkv), *self.rows(out)
            )

    @property
    def turned(self) -> tuple[BufferRef, int]:
        """Return where q, k and v lie: behind the gate of what attention gives."""
        before = self.spec.gate_size * _F32
        return replace(self.qkv, offset=before), self.rows(self.qkv)[1]

    def pools(self, layer: int) -> tuple[KvRef, KvRef]:
        """Return where a layer's keys and values lie."""
        place = self.spec.kv_layer(layer)
        return KvRef(pool="k", layer=place), KvRef(pool="v", layer=place)

    def mix(self, recurrent: RecurrentSpec, layer: int) -> None:
        """Norm, projections, and what a layer's state and the rows before tell each row."""
        name, place = f"layers.{layer}", recurrent.state_size * sum(recurrent.layers[:layer])
        self.norm(f"pre_attn({layer})", f"{name}.input_norm", self.x, self.normed)
        sides = {"mix": self.mixing}
        if recurrent.delta:
            sides |= {"mix_gate": self.gates, "rates": self.rates}
        for part, out in sides.items():  # sums of K are never parted: they would share the memory
            rest = (*NO_RESIDUAL, *self.rows(out), self.split[0], 0)
            self.product("qkv", f"pre_attn({layer})", _T, f"{name}.{part}", self.normed, *rest)
        if recurrent.delta:
            self.convolve("conv_rows", layer, recurrent, place, self.convolved)
            self.apply_delta(layer, recurrent, place + recurrent.kept)
        else:
            self.convolve("gated_conv_rows", layer, recurrent, place, self.attention)

    def convolve(
        self, op: str, layer: int, recurrent: RecurrentSpec, place: int, out: BufferRef
    ) -> None:
        """Append the convolution of `mixing`; place: floats before its part of a state."""
        name = f"layers.{layer}.conv"
        rows: tuple[Value, ...] = (*self.rows(self.mixing), self.weight(name))
        taps = (recurrent.channels, recurrent.taps, *rows, self.weight(f"{name}_bias"))
        there = (*self.states(place), *self.rows(out))
        self.add(op, f"attn({layer})", *_COUNTS, *taps, *there, m=_T)

    def apply_delta(self, layer: int, recurrent: RecurrentSpec, place: int) -> None:
        """Append the delta rule of `convolved`, its norm and its gate; place: see `convolve`."""
        name, segment, out = f"layers.{layer}", f"attn({layer})", self.rows(self.attention)
        heads, size = recurrent.value_heads, recurrent.value_dim
        shape = (recurrent.key_heads, heads, recurrent.key_dim, size, int(recurrent.tiled))
        rows = (*self.rows(self.convolved), *self.rows(self.rates))
        rates = (self.weight(f"{name}.a_log"), self.weight(f"{name}.dt_bias"))
        there = (*self.states(place), *out)
        self.add("delta_rows", segment, *_COUNTS, *shape, *rows, *rates, *there, m=_T)
        norm = (self.weight(f"{name}.mix_norm"), self.spec.norm_eps)
        self.add("gated_norm", segment, _T, heads, size, *norm, *self.rows(self.gates), *out)

    def states(self, place: int) -> tuple[Value, ...]:
        """Return where sequences begin, and their states from `place` floats on."""
        rows = (_arg(name) for name in ("seq_starts", "positions", *STATE_ARGS))
        return (*rows, StateRef(offset=place * _F32), self.spec.state_bytes // _F32)

    def head(self) -> None:
        """Logits of the picked rows."""
        self.norm("head", "final_norm", self.picked, self.final, _OUT)
        rest = (*NO_RESIDUAL, _arg("logits"), _arg("logits_stride"), *self.split)
        self.product("head", "head", _OUT, "head", self.final, *rest)
        if cap := self.spec.logits_cap:
            logits = _arg("logits"), _arg("logits_stride")
            self.add("cap_rows", "head", _OUT, self.spec.vocab_size, cap, *logits)


def _arg(name: str) -> ArgRef:
    return ArgRef(name=name)
