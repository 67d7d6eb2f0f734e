"""Lowers one model step to a tape: the forward tape (prefill and decode alike) and the sample tape.

In: ModelSpec, the weight index and the largest step. Out: a Tape, verified. Barriers follow from
what entries read and write; buffers are planned by liveness.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dovetail.compiler.tape.builder import NO_RESIDUAL, TapeBuilder, Value
from dovetail.compiler.tape.decoder import F32_BYTES, OUT_ROWS, STEP_ROWS, DecoderTape, arg
from dovetail.ir.model import (
    DELTA,
    GATES,
    LATENT_EPS,
    MAX_KV_SPLITS,
    ROWS,
    SCAN,
    TURNED,
    LatentSpec,
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
    KvRef,
    StateRef,
    Tape,
    WeightRef,
)

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
            columns = recurrent.products.items()
            self.mixing = {name: self.padded(name, tokens, n) for name, n in columns}
            self.convolved = self.attention
            if recurrent.rule != GATES:
                self.convolved = self.padded("convolved", tokens, recurrent.channels)
        if latent := spec.latent:
            each = latent.plain + spec.rope.rotary_dim
            self.queries = self.padded("queries", tokens, spec.n_heads * each)
            self.query_in = self.padded("query_in", tokens, max(1, latent.queries))
            self.values = self.padded("values", tokens, spec.n_heads * latent.values)
        self.own = spec.n_layers - spec.shared_kv

    def build(self, name: str, own: int) -> Tape:
        """Return the finished tape; layers from `own` on compute the rows that are read alone."""
        self.embed()
        last, rows = self.spec.n_layers - 1, (STEP_ROWS, self.x, self.attention)
        for layer in range(self.spec.n_layers):
            if layer == own:
                rows = self.pick_stream(layer, OUT_ROWS, "out_rows", f"pre_attn({layer})")
            recurrent = self.spec.recurrent if self.spec.is_recurrent(layer) else None
            attends = self.spec.attends(layer)
            if attends and layer >= own:
                self.attend_picked(layer)
            elif attends:
                self.pre_attention(layer)
            if recurrent:
                self.project_mix(recurrent, layer)
            if attends and layer < own:
                self.attend(layer)
            if recurrent:
                self.mix(recurrent, layer)
            if layer == last < own:
                rows = self.pick(layer, OUT_ROWS, "out_rows")
            self.post_attention(layer, *rows)
        self.head()
        args = FORWARD_ARGS + (STATE_ARGS if self.spec.recurrent else ())
        args += OUT_ARGS if self.spec.shared_kv else ()
        return self.finish(name, args, self.tokens, self.sequences)

    def attend_picked(self, layer: int) -> None:
        """Queries of the picked rows, each of which attends like a decode, and no K and V."""
        super().pre_attention(layer, OUT_ROWS, self.picked)
        self.turn(layer, OUT_ROWS, "out_positions")
        where = self.keys(layer, ("out_lengths", "out_tables"))
        self.decode(layer, 0, OUT_ROWS, where, self.picked_attention)

    def decode(
        self, layer: int, behind: Value, m: ArgRef, where: tuple[Value, ...], out: BufferRef
    ) -> None:
        """Attention of m single rows behind so many prompts; where: as of `keys`."""
        rest = arg("kv_splits"), *where, self.partial, *self.rows(out)
        values = (behind, m, *self.seen(layer), *rest)
        self.add("decode_attention", f"attn({layer})", *values, m=m, skips=True)

    def keys(self, layer: int, names: tuple[str, str]) -> tuple[Value, ...]:
        """Return queries, and where their keys are; names: of lengths and block tables."""
        given = map(arg, ("seq_starts", *names, "table_stride"))
        return (*self.turned, *given, *self.pools(layer))

    def seen(self, layer: int) -> tuple[Value, ...]:
        """Return heads of a layer's attention, and what their scores are about."""
        window, sinks = self.spec.layer_window(layer), self.weight(f"layers.{layer}.sinks")
        return (*self.spec.layer_heads(layer), self.scale, window, sinks)

    def pre_attention(self, layer: int, m: ArgRef = STEP_ROWS, x: BufferRef | None = None) -> None:
        """Norm and projection, rotary embedding, and k and v into the pools."""
        super().pre_attention(layer, m, x)
        if not self.spec.latent:
            self.turn(layer, m, "positions")

    def project(self, layer: int, m: ArgRef, source: BufferRef) -> None:
        """Append q, k and v; of latent attention queries and the vector that is attended over."""
        if latent := self.spec.latent:
            self.project_latent(latent, layer, m, source)
        else:
            super().project(layer, m, source)

    def project_latent(self, latent: LatentSpec, layer: int, m: ArgRef, source: BufferRef) -> None:
        """Append queries of m rows, each with its head's matrix of K, and the rows' vectors."""
        segment, name, spec = f"pre_attn({layer})", f"layers.{layer}", self.spec
        if latent.queries:
            self.linear("qkv", segment, m, f"{name}.query_in", source, self.query_in)
            norm = self.weight(f"{name}.query_norm"), LATENT_EPS
            self.add("norm_rows", segment, m, latent.queries, *self.rows(self.query_in), *norm)
        key = replace(self.qkv, offset=spec.n_heads * spec.head_dim * F32_BYTES)
        into = (*NO_RESIDUAL, key, self.rows(self.qkv)[1], *self.split)
        self.product("qkv", segment, m, f"{name}.latent", source, *into)
        query = self.query_in if latent.queries else source
        self.linear("qkv", segment, m, f"{name}.query", query, self.queries)
        turned = spec.rope.rotary_dim
        between = latent.plain + turned, spec.head_dim
        self.heads(segment, m, f"{name}.keys", self.queries, self.qkv, between)
        rows = (*self.rows(self.queries), latent.plain, *self.rows(self.qkv), spec.n_heads)
        tables = (self.weight(table) for table in rope_names(spec.layer_rope(layer)[0]))
        norm = self.weight(f"{name}.latent_norm"), LATENT_EPS
        stored = arg("kv_slots"), self.pools(layer)[0]
        turns: tuple[Value, ...] = (latent.rank, turned, arg("positions"), *tables, *norm, *stored)
        self.add("latent_store", segment, m, *rows, *turns)

    def heads(
        self,
        segment: str,
        m: ArgRef,
        weight: str,
        a: BufferRef,
        c: BufferRef,
        between: tuple[int, int],
    ) -> None:
        """Append a product for each head; between: values from a head to the next in a and c."""
        entry, count = self.weights[weight], self.spec.n_heads
        for head in range(count):
            source, out = (
                replace(rows, offset=head * step * F32_BYTES)
                for rows, step in zip((a, c), between, strict=True)
            )
            gemm = list(self.gemm(weight, a, m, count))
            gemm[3], gemm[5] = source, WeightRef(name=weight, offset=entry.bytes // count * head)
            into = (*NO_RESIDUAL, out, self.rows(c)[1], self.split[0], 0)
            self.add("heads", segment, *gemm, *into)

    def post_attention(self, layer: int, m: ArgRef, x: BufferRef, attention: BufferRef) -> None:
        """Output projection and MLP of m rows; of latent attention first V of each head."""
        if latent := self.spec.latent:
            between, weight = (self.spec.head_dim, latent.values), f"layers.{layer}.values"
            self.heads(f"post_attn({layer})", m, weight, attention, self.values, between)
            attention = self.values
        super().post_attention(layer, m, x, attention)

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
        stored = (int(spec.v_norm), arg("kv_slots"), *self.pools(layer))
        self.add("rope_store", segment, m, *heads, *turns, *stored)

    def norm_heads(self, layer: int, m: ArgRef) -> None:
        """Norm all heads of q together, and those of k."""
        n_q, n_kv, size = self.spec.layer_heads(layer)
        for part, first, count in (("q", 0, n_q), ("k", n_q, n_kv)):
            place = replace(self.qkv, offset=first * size * F32_BYTES)
            weight = self.weight(f"layers.{layer}.{part}_rows_norm")
            values = (m, count * size, place, self.rows(self.qkv)[1], weight, self.spec.norm_eps)
            self.add("norm_rows", f"pre_attn({layer})", *values)

    def attend(self, layer: int) -> None:
        """Prefill and decode attention, side by side: they write different rows."""
        prefill, out = arg("n_prefill"), self.attention
        where = self.keys(layer, ("seq_lengths", "block_tables"))
        values = (prefill, *self.seen(layer), *where, *self.rows(out))
        self.add("prefill_attention", f"attn({layer})", *values, skips=True)
        self.decode(layer, prefill, arg("n_decode"), where, out)
        if gates := self.spec.gate_size:
            self.add(
                "sigmoid_rows",
                f"attn({layer})",
                STEP_ROWS,
                gates,
                *self.rows(self.qkv),
                *self.rows(out),
            )

    @property
    def turned(self) -> tuple[BufferRef, int]:
        """Return where q, k and v lie: behind the gate of what attention gives."""
        before = self.spec.gate_size * F32_BYTES
        return replace(self.qkv, offset=before), self.rows(self.qkv)[1]

    def pools(self, layer: int) -> tuple[KvRef, KvRef]:
        """Return where a layer's keys and values lie."""
        place = self.spec.kv_layer(layer)
        return KvRef(pool="k", layer=place), KvRef(pool="kv"[self.spec.pools - 1], layer=place)

    def project_mix(self, recurrent: RecurrentSpec, layer: int) -> None:
        """Norm, unless attention has it, and projections of a recurrent layer."""
        name = f"layers.{layer}"
        if not recurrent.beside:
            self.norm(f"pre_attn({layer})", f"{name}.input_norm", self.x, self.normed)
        for part, out in self.mixing.items():  # sums of K are not parted: they share the memory
            rest = (*NO_RESIDUAL, *self.rows(out), self.split[0], 0)
            self.product(
                "qkv", f"pre_attn({layer})", STEP_ROWS, f"{name}.{part}", self.normed, *rest
            )

    def mix(self, recurrent: RecurrentSpec, layer: int) -> None:
        """What a layer's state and the rows before tell each row."""
        place = recurrent.state_size * sum(recurrent.layers[:layer])
        self.convolve(layer, recurrent, place)
        if recurrent.rule != GATES:
            self.apply_rule(layer, recurrent, place + recurrent.kept)

    def convolve(self, layer: int, recurrent: RecurrentSpec, place: int) -> None:
        """Append the convolution of what a row has of it; place: floats before its state."""
        name, gated = f"layers.{layer}.conv", recurrent.rule == GATES
        before = recurrent.width * F32_BYTES if recurrent.rule == SCAN else 0
        mix = replace(self.mixing["mix"], offset=before), self.rows(self.mixing["mix"])[1]
        rows: tuple[Value, ...] = (*mix, self.weight(name))
        taps = (recurrent.channels, recurrent.taps, *rows, self.weight(f"{name}_bias"))
        there = (*self.states(place), *self.rows(self.convolved))
        op = "gated_conv_rows" if gated else "conv_rows"
        self.add(op, f"attn({layer})", *_COUNTS, *taps, *there, m=STEP_ROWS)

    def apply_rule(self, layer: int, recurrent: RecurrentSpec, place: int) -> None:
        """Append the rule over `convolved`, its norm and its gate; place: as of `convolve`."""
        segment, out = f"attn({layer})", self.mixed_by(layer, self.attention)
        a_log, dt, skip, norm = (
            self.weight(f"layers.{layer}.{name}")
            for name in ("a_log", "dt_bias", "skip", "mix_norm")
        )
        heads, size, groups = recurrent.value_heads, recurrent.value_dim, recurrent.norm_groups
        shape = (recurrent.key_heads, heads, recurrent.key_dim, size)
        rows = (*self.rows(self.convolved), *self.rows(self.mixing["rates"]))
        there = (*self.states(place), *out)
        if recurrent.rule == DELTA:
            given: tuple[Value, ...] = (*shape, int(recurrent.tiled), *rows, a_log, dt)
            gate, parts, first = self.mixing["mix_gate"], (heads, size, norm, 0), 0
        else:
            given = (*shape, *rows, a_log, dt, skip)
            count = groups or 1
            gate, parts = self.mixing["mix"], (count, recurrent.width // count, norm, 1)
            first = int(not recurrent.norm_first)
        self.add(f"{recurrent.rule}_rows", segment, *_COUNTS, *given, *there, m=STEP_ROWS)
        how = (*parts, self.spec.norm_eps, first, *self.rows(gate))
        self.add("gated_norm", segment, STEP_ROWS, *how, *out)

    def states(self, place: int) -> tuple[Value, ...]:
        """Return where sequences begin, and their states from `place` floats on."""
        rows = (arg(name) for name in ("seq_starts", "positions", *STATE_ARGS))
        return (*rows, StateRef(offset=place * F32_BYTES), self.spec.state_bytes // F32_BYTES)

    def head(self) -> None:
        """Logits of the picked rows."""
        self.norm("head", "final_norm", self.picked, self.final, OUT_ROWS)
        rest = (*NO_RESIDUAL, arg("logits"), arg("logits_stride"), *self.split)
        self.product("head", "head", OUT_ROWS, "head", self.final, *rest)
        if cap := self.spec.logits_cap:
            logits = arg("logits"), arg("logits_stride")
            self.add("cap_rows", "head", OUT_ROWS, self.spec.vocab_size, cap, *logits)
