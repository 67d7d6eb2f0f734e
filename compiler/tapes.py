"""Lowers one model step to a tape: the forward tape (prefill and decode alike) and the sample tape.

In: ModelSpec, the weight index and the largest step. Out: a Tape, verified. Barriers follow from
what entries read and write; buffers are planned by liveness. What rows of a layer see of others is
apart: an encoder may have the layers of a decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from dovetail.compiler.buffers import Stage, plan_offsets
from dovetail.compiler.operators import OPERATORS
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import (
    MAX_KV_SPLITS,
    ROWS,
    SPLIT_K_ELEMENTS,
    TURNED,
    ExpertSpec,
    MlpPart,
    ModelSpec,
    WeightEntry,
    rope_names,
)
from dovetail.ir.tape import (
    FORWARD_ARGS,
    SAMPLE_ARGS,
    ArgRef,
    Buffer,
    BufferRef,
    Entry,
    FloatConst,
    Groups,
    IntConst,
    KvRef,
    Slot,
    Tape,
    WeightRef,
)

Value = Slot | int | float
"""A slot of an entry; numbers stand for constants."""
_BRANCH_NORMS = {"o": "attention_norm", "down": "mlp_norm"}
NO_RESIDUAL: tuple[Value, int] = (WeightRef(name=None), 0)
_T, _OUT = ArgRef(name="n_tokens"), ArgRef(name="n_out")


def build_forward_tape(
    spec: ModelSpec, weights: Sequence[WeightEntry], max_step_tokens: int, max_step_sequences: int
) -> Tape:
    """Return the tape of one step of at most so many token rows and sequences.

    `kv_splits` of a run may be at most MAX_KV_SPLITS.
    """
    return _Forward(spec, weights, max_step_tokens, max_step_sequences).build()


def build_sample_tape(spec: ModelSpec, max_step_sequences: int) -> Tape:
    """Return the tape that chooses a token for each of up to `max_step_sequences` logits rows."""
    tape = TapeBuilder()
    scratch = tape.dense("scratch", max_step_sequences, spec.vocab_size)
    values: list[Value] = [ArgRef(name=name) for name in SAMPLE_ARGS]
    rows, logits, stride, *rest = values
    tape.add("sample", "sample", rows, spec.vocab_size, logits, stride, *rest, scratch)
    return tape.finish("sample", SAMPLE_ARGS, max_step_sequences, max_step_sequences)


class TapeBuilder:
    """Collects entries; `add` decides each one's barrier, `finish` plans the buffers."""

    def __init__(self, weights: Iterable[WeightEntry] = ()) -> None:
        self.weights = {entry.name: entry for entry in weights}
        self.buffers: dict[str, Buffer] = {}
        self.entries: list[Entry] = []
        self.stages: list[Stage] = []
        self.split: tuple[Value, int] = NO_RESIDUAL
        """Where products add up parts of K, and how many elements fit there."""
        self._parts: frozenset[str] = frozenset()
        """What several entries of the open stage write together."""

    def padded(self, name: str, rows: int, columns: int) -> BufferRef:
        """Declare rows of float32 whose stride keeps neighbours out of each other's cache sets."""
        return self._declare(name, rows, columns, -(-columns // 16) * 16 + 16)

    def dense(self, name: str, rows: int, columns: int) -> BufferRef:
        """Declare float32 rows without padding, for kernels that index the buffer themselves."""
        return self._declare(name, rows, columns, columns)

    def rows(self, buffer: BufferRef) -> tuple[BufferRef, int]:
        """Return a buffer and the elements between its rows."""
        return buffer, self.buffers[buffer.name].stride

    def weight(self, name: str) -> WeightRef:
        """Return a weight, or null where this model has none of that name."""
        return WeightRef(name=name if name in self.weights else None)

    def gemm(self, weight: str, a: BufferRef, m: ArgRef, matrices: int = 1) -> tuple[Value, ...]:
        """Return the slots every GEMM begins with: M, N, K, A, lda, B, panel stride, bias.

        matrices: of one shape that the weight has, one after another.
        """
        entry = self.weights[weight]
        n = entry.n // 2 if entry.layout == "packed_pair" else entry.n
        stride = FORMATS[entry.dtype].panel_elements(entry.k)
        bias = self.weight(f"{weight}_bias")
        return (m, n // matrices, entry.k, *self.rows(a), self.weight(weight), stride, bias)

    def add(
        self,
        op: str,
        segment: str,
        *values: Value,
        m: ArgRef | None = None,
        skips: bool = False,
        groups: Groups | None = None,
    ) -> None:
        """Append an entry; `values` are its slots in order, numbers stand for constants.

        m: the rows it works on, by default its first slot. skips: it does not run where M is 0.
        groups: as of the entry.
        """
        slots, operands, rows = tuple(map(_slot, values)), OPERATORS[op], m or values[0]
        assert len(slots) == len(operands), f"{op} takes {len(operands)} slots, not {len(slots)}"
        assert isinstance(rows, ArgRef), f"the M of {op} is an argument"
        uses = [(r, o.kind) for s, o in zip(slots, operands, strict=True) if (r := _resource(s))]
        uses += [(groups.starts.name, "in")] if groups else []
        stage, parts = Stage.of(uses), frozenset(r for r, kind in uses if kind == "part")
        barrier = bool(self.stages) and self._needs_barrier(stage, parts)
        if barrier or not self.stages:
            self.stages.append(stage)
            self._parts = parts
        else:
            self.stages[-1] = self.stages[-1].join(stage)
            self._parts |= parts
        skip = rows.name if skips else None
        self.entries.append(
            Entry(
                op=op,
                slots=slots,
                m=rows.name,
                barrier=barrier,
                skip_if_zero=skip,
                groups=groups,
                segment=segment,
            )
        )

    def product(
        self, op: str, segment: str, m: ArgRef, weight: str, a: BufferRef, *rest: Value
    ) -> None:
        """Append a product of m rows; `rest` are its slots from the residual on."""
        self.add(op, segment, *self.gemm(weight, a, m), *rest)

    def linear(
        self,
        op: str,
        segment: str,
        m: ArgRef,
        weight: str,
        a: BufferRef,
        c: BufferRef,
        *,
        residual: BufferRef | None = None,
    ) -> None:
        """Append c = a W^T + bias + residual over all m rows."""
        added = self.rows(residual) if residual else NO_RESIDUAL
        self.product(op, segment, m, weight, a, *added, *self.rows(c), *self.split)

    def gather(
        self, segment: str, m: ArgRef, places: str, source: BufferRef, target: BufferRef
    ) -> None:
        """Append target = the m rows of source that the argument `places` tells."""
        values = (m, self.buffers[source.name].columns, ArgRef(name=places))
        self.add("gather_rows", segment, *values, *self.rows(source), *self.rows(target))

    def finish(self, name: str, args: tuple[str, ...], tokens: int, sequences: int) -> Tape:
        """Plan the buffers and return the tape."""
        names = self.buffers.keys()
        stages = [Stage(stage.reads & names, stage.writes & names) for stage in self.stages]
        sizes = {buffer.name: buffer.bytes for buffer in self.buffers.values()}
        offsets, arena = plan_offsets(sizes, stages)
        return Tape(
            name=name,
            args=args,
            buffers=tuple(replace(b, offset=offsets[b.name]) for b in self.buffers.values()),
            arena_bytes=arena,
            entries=tuple(self.entries),
            max_tokens=tokens,
            max_sequences=sequences,
        )

    def _declare(self, name: str, rows: int, columns: int, stride: int) -> BufferRef:
        size = rows * stride * DTYPES["f32"].size
        self.buffers[name] = Buffer(
            name=name, dtype="f32", rows=rows, columns=columns, stride=stride, offset=0, bytes=size
        )
        return BufferRef(name=name)

    def _needs_barrier(self, stage: Stage, parts: frozenset[str]) -> bool:
        open_ = self.stages[-1]
        order = (stage.reads & open_.writes) | (stage.writes & (open_.reads | open_.writes))
        return bool(order - (parts & self._parts))


class DecoderTape(TapeBuilder):
    """The layers of a decoder, but for what its rows see of others."""

    def __init__(
        self, spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        super().__init__(weights)
        self.spec, self.tokens, self.sequences = spec, tokens, sequences
        hidden, heads = spec.hidden_size, spec.n_heads * spec.head_dim
        self.x = self.padded("x", tokens, hidden)
        self.normed = self.padded("normed", tokens, hidden)
        self.qkv = self.padded("qkv", tokens, spec.qkv_size)
        self.attention = self.padded("attention", tokens, heads)
        each = spec.experts.used if spec.experts else 1
        self.inner = self.padded("inner", tokens * each, spec.intermediate_size)
        if spec.experts:
            widest = max(spec.experts.shared, spec.experts.dense)
            self.dense_inner = self.padded("dense_inner", tokens, widest) if widest else self.inner
            self.scores = self.padded("scores", tokens, spec.experts.scores)
            self.mixed = self.padded("mixed", tokens * each, hidden)
            self.starts = self.dense("starts", 1, spec.experts.count + 1)
            self.chosen, self.places, self.sources, self.shares = (
                self.dense(name, tokens, each) for name in ("chosen", "places", "tokens", "shares")
            )
        self.split = (self.dense("split_k", 1, SPLIT_K_ELEMENTS), SPLIT_K_ELEMENTS)
        self.picked = self.padded("picked", sequences, hidden)
        self.picked_attention = self.padded("picked_attention", sequences, heads)
        if spec.parallel:
            self.picked_normed = self.padded("picked_normed", sequences, hidden)

    def embed(self) -> None:
        """Token ids to x; a tied model reads the head's packed columns."""
        table = "head" if self.spec.tied_head else "embed"
        values = (_T, self.spec.hidden_size, _arg("token_ids"), self.weight(table))
        self.add("embed", "embed", *values, *self.rows(self.x))

    def pre_attention(self, layer: int) -> None:
        """Norm and the fused q, k, v projection."""
        name = f"layers.{layer}.input_norm"
        self.project(layer, self.norm_before(f"pre_attn({layer})", name, self.x, _T))

    def norm_before(self, segment: str, weight: str, x: BufferRef, m: ArgRef) -> BufferRef:
        """Return what a branch reads: m rows of x, normed where norms come first."""
        if not self.spec.pre_norms:
            return x
        self.norm(segment, weight, x, self.normed, m)
        return self.normed

    def project(self, layer: int, source: BufferRef) -> None:
        """Append q, k and v: one product, or three side by side, which share no partial sums."""
        if len(parts := self.spec.qkv_parts(layer)) == 1:
            name = f"layers.{layer}.qkv"
            self.linear("qkv", f"pre_attn({layer})", _T, name, source, self.qkv)
            return
        bias, column, size = f"layers.{layer}.qkv_bias", 0, DTYPES["f32"].size
        for name in parts:
            n = self.weights[name].n
            gemm = self.gemm(name, source, _T)
            added = WeightRef(name=bias if bias in self.weights else None, offset=column * size)
            out = replace(self.qkv, offset=column * size)
            values = (*gemm[:-1], added, *NO_RESIDUAL, out, self.rows(self.qkv)[1])
            self.add("qkv", f"pre_attn({layer})", *values, self.split[0], 0)
            column += n

    def pick(self, layer: int, m: ArgRef, places: str) -> tuple[ArgRef, BufferRef, BufferRef]:
        """Gather the m rows that are read later: behind the last layer's K and V no other is."""
        pairs = [(self.x, self.picked), (self.attention, self.picked_attention)]
        if self.spec.parallel:
            pairs.append((self.normed, self.picked_normed))
        for of, to in pairs:
            self.gather(f"post_attn({layer})", m, places, of, to)
        return m, self.picked, self.picked_attention

    def post_attention(self, layer: int, m: ArgRef, x: BufferRef, attention: BufferRef) -> None:
        """Output projection and MLP of m rows, each added to x."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        self.branch("o", segment, m, name, attention, x)
        if self.spec.parallel:
            source = self.picked_normed if x == self.picked else self.normed
        else:
            source = self.norm_before(segment, f"{name}.post_norm", x, m)
        for part in self.spec.mlp_parts(layer):
            if part.experts:
                self.experts(part.experts, layer, m, x)
            else:
                self.mlp(part, layer, m, source, x)

    def mlp(self, part: MlpPart, layer: int, m: ArgRef, source: BufferRef, x: BufferRef) -> None:
        """Append what all m rows go through; beside experts the router may gate it."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        inner = self.dense_inner if part.prefix else self.inner
        gate_up = part.prefix + "gate_up"
        self.product(gate_up, segment, m, f"{name}.{gate_up}", source, *self.rows(inner))
        experts = self.spec.mlp_parts(layer)[0].experts
        if experts and experts.gated:
            gates = replace(self.scores, offset=experts.count * DTYPES["f32"].size)
            stride = self.rows(self.scores)[1]
            self.add("gate_rows", segment, m, part.columns, gates, stride, *self.rows(inner))
        self.branch(part.prefix + "down", segment, m, name, inner, x)

    def experts(self, experts: ExpertSpec, layer: int, m: ArgRef, x: BufferRef) -> None:
        """Append the experts of m normed rows: each multiplies those that chose it, x gets sums."""
        name, segment = f"layers.{layer}", f"post_attn({layer})"
        used, hidden, share = experts.used, self.spec.hidden_size, int(experts.share)
        self.linear("router", segment, m, f"{name}.router", self.normed, self.scores)
        scores, normed = self.rows(self.scores), self.rows(self.normed)
        chosen = m, experts.count, used
        how = self.weight(f"{name}.choice"), int(experts.sigmoid), share, experts.scale
        self.add("route", segment, *chosen, *how, *scores, self.chosen, self.shares)
        sorted_ = self.starts, self.places, self.sources
        self.add("sort_experts", segment, *chosen, self.chosen, *sorted_)
        rows = m, used, hidden
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
        summed = self.places, self.shares, *self.rows(self.mixed), *self.rows(x)
        scale = self.spec.branch_scale
        self.add("combine_experts", segment, *rows, *summed, scale, *self.rows(x))

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
        rows = (m, spec.hidden_size, *self.rows(self.normed))
        if spec.branch_norms:
            how: tuple[Value, ...] = (self.weight(f"{layer}.{_BRANCH_NORMS[op]}"), spec.norm_eps)
            self.add("rmsnorm_add", segment, *rows, *how, *self.rows(x))
        else:
            self.add("scaled_add", segment, *rows, spec.branch_scale, *self.rows(x))

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

    def heads(self) -> tuple[int, int, int]:
        """Return query heads, KV heads and head_dim."""
        return self.spec.n_heads, self.spec.n_kv_heads, self.spec.head_dim

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.spec.attention_scale or self.spec.head_dim**-0.5

    def turns(self, layer: int) -> tuple[Value, ...]:
        """Return how q and k of a layer are normed and rotated."""
        rope, _ = self.spec.layer_rope(layer)
        norms = (self.weight(f"layers.{layer}.{part}_norm") for part in "qk")
        tables = map(self.weight, rope_names(rope))
        return _arg("positions"), *tables, *norms, self.spec.norm_eps


class _Forward(DecoderTape):
    """The forward tape, one method per segment."""

    def __init__(
        self, spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        super().__init__(spec, weights, tokens, sequences)
        part = spec.n_heads * MAX_KV_SPLITS * (spec.head_dim + 16)
        self.partial = self.dense("partial", sequences, part)
        self.final = self.padded("final", sequences, spec.hidden_size)

    def build(self) -> Tape:
        """Return the finished tape."""
        self.embed()
        last, rows = self.spec.n_layers - 1, (_T, self.x, self.attention)
        for layer in range(self.spec.n_layers):
            self.pre_attention(layer)
            self.attend(layer)
            if layer == last:
                rows = self.pick(layer, _OUT, "out_rows")
            self.post_attention(layer, *rows)
        self.head()
        return self.finish("forward", FORWARD_ARGS, self.tokens, self.sequences)

    def pre_attention(self, layer: int) -> None:
        """Norm and projection, rotary embedding, and k and v into the pools."""
        super().pre_attention(layer)
        spec, segment, rows = self.spec, f"pre_attn({layer})", self.rows(self.qkv)
        turned, turns = spec.layer_rope(layer)[1], self.turns(layer)
        if spec.qk_norm and spec.qk_norm_of == ROWS:
            self.norm_heads(layer)
        if spec.qk_norm and spec.qk_norm_of == TURNED:
            assert turned == spec.head_dim
            plain = (*turns[:3], WeightRef(name=None), WeightRef(name=None), spec.norm_eps)
            self.add("rope_rows", segment, _T, *rows, *self.heads(), *plain)
            turned = 0
        stored = (_arg("kv_slots"), *_pools(layer))
        self.add("rope_store", segment, _T, *rows, *self.heads(), turned, *turns, *stored)

    def norm_heads(self, layer: int) -> None:
        """Norm all heads of q together, and those of k."""
        n_q, n_kv, size = self.heads()
        for part, first, count in (("q", 0, n_q), ("k", n_q, n_kv)):
            place = replace(self.qkv, offset=first * size * DTYPES["f32"].size)
            weight = self.weight(f"layers.{layer}.{part}_rows_norm")
            values = (_T, count * size, place, self.rows(self.qkv)[1], weight, self.spec.norm_eps)
            self.add("norm_rows", f"pre_attn({layer})", *values)

    def attend(self, layer: int) -> None:
        """Prefill and decode attention, side by side: they write different rows."""
        segment = f"attn({layer})"
        window, sinks = self.spec.layer_window(layer), self.weight(f"layers.{layer}.sinks")
        shared: tuple[Value, ...] = (*self.heads(), self.scale, window, sinks)
        keys = tuple(_arg(n) for n in ("seq_starts", "seq_lengths", "block_tables", "table_stride"))
        where: tuple[Value, ...] = (*self.rows(self.qkv), *keys, *_pools(layer))
        prefill, decode = _arg("n_prefill"), _arg("n_decode")
        out = self.rows(self.attention)
        self.add("prefill_attention", segment, prefill, *shared, *where, *out, skips=True)
        values = (prefill, decode, *shared, _arg("kv_splits"), *where, self.partial, *out)
        self.add("decode_attention", segment, *values, m=decode, skips=True)

    def head(self) -> None:
        """Logits of the picked rows."""
        self.norm("head", "final_norm", self.picked, self.final, _OUT)
        rest = (*NO_RESIDUAL, _arg("logits"), _arg("logits_stride"), *self.split)
        self.product("head", "head", _OUT, "head", self.final, *rest)


def _arg(name: str) -> ArgRef:
    return ArgRef(name=name)


def _pools(layer: int) -> tuple[KvRef, KvRef]:
    return KvRef(pool="k", layer=layer), KvRef(pool="v", layer=layer)


def _slot(value: Value) -> Slot:
    if isinstance(value, int):
        return IntConst(value=value)
    return FloatConst(value=value) if isinstance(value, float) else value


def _resource(slot: Slot) -> str | None:
    """Return the name under which a slot's memory takes part in dependences, None for constants."""
    if isinstance(slot, BufferRef):
        return slot.name
    if isinstance(slot, KvRef):
        return f"kv:{slot.pool}:{slot.layer}"
    return f"arg:{slot.name}" if isinstance(slot, ArgRef) else None
