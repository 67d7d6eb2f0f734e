"""ModelSpec: the architecture of one decoder-only model, and the index of its packed weights.

These are the contents of `models/<name>/model.json` in an artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

KV_BLOCK = 16
"""Tokens in one KV block, on every device."""
PANEL = 16
"""Columns in one panel of a packed weight; every target's micro-kernels read whole panels."""
MAX_KV_SPLITS = 16
"""Largest `kv_splits` of a forward tape: its partial-attention buffer holds so many parts."""
DENSE = "dense_"
"""Of a mixture, what the names of products begin with that all tokens go through."""
APART = "gate_up_apart"
"""The product that gives gates and ups, in panels by turns: adapters add to them, or they meet in
a kernel of a user's own."""
OWN_GATE = "own_gate"
"""That kernel: tables have it for the phases in which it serves."""
ROWS, TURNED = "rows", "turned"
"""What q and k may be normed over besides single heads."""
ROPE, LOCAL_ROPE = "rope", "local_rope"
"""Names of ropes."""
RELU2, XIELU = "relu2", "xielu"
"""Activations of MLPs that have no gate, only ups: squares of what is above 0, and one with numbers
of each layer."""
GATES, DELTA, SCAN = "gates", "delta", "scan"
"""Rules of recurrent layers."""
SPLIT_K_ELEMENTS = 1 << 19
"""Floats of a forward tape's buffer for partial sums of split-K; what needs more is not split."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding as in config.json.

    kind: default, linear, dynamic, llama3, longrope, ntk, proportional or yarn.
    """

    kind: str = "default"
    theta: float = 10000.0
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    divisors: tuple[float, ...] = ()  # longrope: of each frequency
    span: int = 0  # proportional: values of a head, of the halves of which some are turned
    truncate: bool = True  # yarn: round the ramp's bounds to whole dimensions


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of the layers' feed-forward parts: `used` of `count` compute a token."""

    count: int
    used: int
    share: bool = True  # the weights of a token's experts are divided by their sum
    sigmoid: bool = False  # scores are sigmoids of what the router gives, not a softmax
    biased: bool = False  # a vector is added to scores to choose by, not to weigh by
    groups: int = 1  # a token's experts are of `groups_used` of so many groups
    groups_used: int = 1
    scale: float = 1.0  # of what the experts of a token give together
    shared: int = 0  # inner columns of an MLP of all tokens beside them
    gated: bool = False  # what that gives is multiplied by a sigmoid, whose row the router has last
    dense: int = 0  # inner columns of the layers that have no experts
    dense_layers: tuple[bool, ...] = ()  # per layer: has it none; () = all have experts

    @property
    def scores(self) -> int:
        """Return what a router gives for a token: a score of each expert, and of the gate."""
        return self.count + self.gated


class MlpPart(NamedTuple):
    """A part of a layer's MLP: what all parts give is added up.

    prefix: of the names of its products; columns: inner ones, of each expert where there are.
    """

    prefix: str
    columns: int
    experts: ExpertSpec | None = None


class RecurrentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep a state of one size of each sequence in place of keys and values.

    `taps` tokens, the newest included, are convolved, each of `channels` values alone. Without
    value heads that is all (LFM2); else each value head has a matrix [key_dim][value_dim], each key
    head serves value_heads / key_heads of them, and a rule tells how a token changes the matrix:
    the gated delta rule (Qwen3.5), or the scan of Mamba-2, which calls keys B and queries C.
    """

    layers: tuple[bool, ...]  # of the model: is it one of these
    taps: int
    channels: int
    bias: bool = False  # of all its products
    conv_bias: bool = False
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tiled: bool = False  # value head v has key head v % key_heads, else v // (their ratio)
    scan: bool = False  # Mamba-2's rule, not the delta rule
    norm_groups: int = 0  # scan: parts of what it gives that are normed apart; 0 = no norm
    norm_first: bool = False  # scan: it is normed before it is gated, not behind
    beside: bool = False  # each of these layers has attention, too, which reads the same

    @property
    def rule(self) -> str:
        """What follows or surrounds the convolution."""
        return GATES if not self.value_heads else SCAN if self.scan else DELTA

    @property
    def width(self) -> int:
        """Values of a token that go into the output projection."""
        return self.value_heads * self.value_dim or self.channels

    @property
    def out(self) -> str:
        """Return the name of the output projection."""
        return "mix_o" if self.beside else "o"

    @property
    def products(self) -> dict[str, int]:
        """Columns of each projection of a token, by weight.

        `mix` has what is convolved: between two gates, or behind the scan's gate.
        """
        width, heads = self.width, self.value_heads
        return {
            GATES: {"mix": 3 * self.channels},
            DELTA: {"mix": self.channels, "mix_gate": width, "rates": 2 * heads},
            SCAN: {"mix": width + self.channels, "rates": heads},
        }[self.rule]

    @property
    def vectors(self) -> dict[str, int]:
        """Values of each vector of a layer beside biases, by weight."""
        rates = dict.fromkeys(("a_log", "dt_bias"), self.value_heads)
        normed = {"mix_norm": self.width} if self.norm_groups else {}
        return {
            GATES: {},
            DELTA: {**rates, "mix_norm": self.value_dim},
            SCAN: {**rates, "skip": self.value_heads, **normed},
        }[self.rule]

    @property
    def kept(self) -> int:
        """Floats of a layer's state that are inputs of the convolution; the matrices follow."""
        return -(-(self.taps - 1) * self.channels // 16) * 16

    @property
    def state_size(self) -> int:
        """Floats of a layer's state."""
        return self.kept + self.value_heads * self.key_dim * self.value_dim


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention over one latent vector of each token (DeepSeek-V2, §2.1).

    K and V of a head are products of it. Theirs are taken into queries and into what attention
    gives, so that all heads attend over the vector: `rank` values, which are V, too, and behind
    them those that the rope turns.
    """

    rank: int
    plain: int  # values of a query that no rope turns
    values: int  # of a head that go into the output projection
    queries: int = 0  # values that queries are products of, normed; 0 = of the stream's


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: dims in elements, dtypes by name of `dovetail.ir.dtypes`."""

    family: str  # of compiler.families
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of each expert, where there are
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position: int
    max_context: int  # positions that rope tables and requests may reach; <= max_position
    norm_eps: float
    rope: RopeSpec
    weight_dtype: str  # of ir.formats: how packed weights are stored
    formats: tuple[tuple[str, str], ...] = ()  # (weight, its format) of those stored otherwise
    checkpoint_dtype: str
    kv_dtype: str = "f32"
    sliding_window: int = 0  # keys a query may see, itself included; 0 = all
    window_layers: tuple[bool, ...] = ()  # per layer: does the window apply; () = all layers
    attention_bias: bool = False  # q, k, v
    output_bias: bool = False  # o
    mlp_bias: bool = False  # gate, up, down; of experts their router, too
    sinks: bool = False  # of each query head a learnt score that no key has
    qk_norm: bool = False
    qk_norm_of: str = "heads"  # heads, heads that a rope has turned, or rows: all heads together
    output_gate: bool = False  # attention is multiplied by a sigmoid, computed beside q, k and v
    recurrent: RecurrentSpec | None = None  # layers without keys
    latent: LatentSpec | None = None  # one vector of a token in place of K and V of heads
    rope_layers: tuple[bool, ...] = ()  # per layer: are q and k rotated; () = all layers
    local_rope: RopeSpec | None = None  # of layers with a window, where theirs is another
    attention_scale: float | None = None  # of q k^T; None = head_dim ** -0.5
    attention_cap: int = 0  # c of scores c tanh(x / c), scaled ones; 0 = they are x
    activation: str = (
        "silu"  # of the gate: silu, gelu_tanh; clamped, of gate and up; relu2, xielu, of up
    )
    pre_norms: bool = True  # RMSNorm of what attention and MLP read
    parallel: bool = False  # the MLP reads what attention reads, instead of a norm of its own
    layer_norm: bool = False  # norms of the stream subtract the mean
    branch_norms: bool = False  # RMSNorm of what attention and MLP give, before it is added
    branch_scale: float = 1.0  # what they give without one is added to the stream times this
    logits_scale: float = 1.0
    norm_offset: float = 0.0  # what is added to the RMSNorm weights of the checkpoint
    stream_scale: float = 1.0  # the residual stream is kept so many times smaller
    tied_head: bool = False
    full_heads: tuple[int, int] | None = None  # KV heads, head_dim of layers without a window
    shared_kv: int = 0  # last layers that attend over K and V of the last of their kind before them
    shared_inner: int = 0  # intermediate_size of these, 0 = that of the others
    keys_as_values: bool = False  # layers without a window have V of K's weights
    v_norm: bool = False  # an RMSNorm of V, without weights
    mlp_alone: tuple[bool, ...] = ()  # per layer: an MLP alone, or none; () = all have one behind
    layer_inputs: int = 0  # values that each layer has of its own of a token; 0 = none
    layer_scale: bool = False  # what a layer gives is multiplied by a learnt number
    logits_cap: float = 0.0  # c of logits c tanh(x / c); 0 = they are x
    experts: ExpertSpec | None = None
    dense_inner: int = 0  # intermediate_size of an MLP beside experts, both normed; 0 = none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()  # names of those that requests may ask for

    @property
    def adapter_dtype(self) -> str:
        """How the matrices of adapters are stored."""
        return "f32" if self.weight_dtype == "f32" else "bf16"

    @property
    def qkv_size(self) -> int:
        """Columns of the largest fused projection: of the gate, if there is one, then q, k, v."""
        return self.gate_size + max(sum(self.qkv_rows(layer)) for layer in range(self.n_layers))

    @property
    def gate_size(self) -> int:
        """Columns of the gate of attention's output."""
        return self.n_heads * self.head_dim if self.output_gate else 0

    @property
    def mixed_size(self) -> int:
        """Values of a token that go into the output projection, at most."""
        heads = max(self.qkv_rows(layer)[0] for layer in range(self.n_layers))
        if self.recurrent is None:
            return heads
        width = self.recurrent.width
        return heads + width if self.recurrent.beside else max(heads, width)

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer has a state in place of keys."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def mixes(self, layer: int) -> bool:
        """Return whether a layer has more than an MLP."""
        return not (self.mlp_alone and self.mlp_alone[layer])

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        alone = self.is_recurrent(layer) and not (self.recurrent and self.recurrent.beside)
        return self.mixes(layer) and not alone

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states, of all layers."""
        if self.recurrent is None:
            return 0
        return 4 * self.recurrent.state_size * sum(self.recurrent.layers)

    def layer_heads(self, layer: int) -> tuple[int, int, int]:
        """Return query heads, KV heads and head_dim of a layer."""
        if self.full_heads and not self.layer_window(layer):
            return self.n_heads, *self.full_heads
        return self.n_heads, self.n_kv_heads, self.head_dim

    @property
    def head_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """What `layer_heads` gives of any layer, each once."""
        return tuple(dict.fromkeys(map(self.layer_heads, range(self.n_layers))))

    def kv_layer(self, layer: int) -> int:
        """Return the layer over whose K and V a layer attends: itself, but of those that share."""
        own = self.n_layers - self.shared_kv
        if layer < own:
            return layer
        window = self.layer_window(layer)
        return max(i for i in range(own) if self.layer_window(i) == window)

    def kv_values(self, layer: int) -> int:
        """Return the values of a token's K, and of its V, that are a layer's own."""
        _, heads, size = self.layer_heads(layer)
        own = self.kv_layer(layer) == layer and self.attends(layer)
        return heads * size if own else 0

    @property
    def pools(self) -> int:
        """Pools of keys and values: V may be a part of K."""
        return 1 if self.latent else 2

    def qkv_rows(self, layer: int) -> tuple[int, int, int]:
        """Return the columns of a layer's q, k and v."""
        heads, _, size = self.layer_heads(layer)
        return heads * size, self.kv_values(layer), self.kv_values(layer)

    def layer_inner(self, layer: int) -> int:
        """Return the intermediate_size of a layer."""
        shares = layer >= self.n_layers - self.shared_kv
        return self.shared_inner if self.shared_inner and shares else self.intermediate_size

    @property
    def uneven(self) -> bool:
        """Whether layers differ in more than windows and ropes, or have parts of few families."""
        parts = self.full_heads, self.shared_kv, self.layer_inputs, self.recurrent
        beside = self.dense_inner, self.mlp_alone, self.latent, self.adapters
        return any((*parts, *beside))

    def inner_columns(self, rows: float = 1) -> float:
        """Return the inner columns of a layer that so many tokens go through, at most; the mean."""
        parts = [part for layer in range(self.n_layers) for part in self.mlp_parts(layer)]
        times = [min(rows * p.experts.used, p.experts.count) if p.experts else 1 for p in parts]
        widths = (part.columns * each for part, each in zip(parts, times, strict=True))
        return sum(widths) / self.n_layers

    def mlp_parts(self, layer: int) -> tuple[MlpPart, ...]:
        """Return the parts of a layer's MLP; of a mixture, those without experts are `dense_`."""
        experts = self.experts
        if self.mlp_alone and self.mixes(layer):
            return ()
        if experts is None:
            return (MlpPart("", self.layer_inner(layer)),)
        if experts.dense_layers and experts.dense_layers[layer]:
            return (MlpPart(DENSE, experts.dense),)
        width = experts.shared or self.dense_inner
        beside = (MlpPart(DENSE, width),) if width else ()
        return (MlpPart("", self.intermediate_size, experts), *beside)

    def all_mlp_parts(self) -> frozenset[MlpPart]:
        """Return the different parts of all layers."""
        return frozenset(p for layer in range(self.n_layers) for p in self.mlp_parts(layer))

    def norms_before(self, layer: int) -> tuple[str, ...]:
        """Return the names of the norms of what a layer's attention and its MLP read."""
        if self.mlp_alone:
            return ("input_norm" if self.mixes(layer) else "post_norm",)
        return ("input_norm", "post_norm")[: self.pre_norms * (1 if self.parallel else 2)]

    @property
    def gated(self) -> bool:
        """Whether MLPs have gates beside ups."""
        return self.activation not in (RELU2, XIELU)

    @property
    def up(self) -> str:
        """Return the name of what MLPs begin with."""
        return "gate_up" if self.gated else "up"

    @property
    def stream_eps(self) -> float:
        """Epsilon of norms of the residual stream."""
        return self.norm_eps / self.stream_scale**2

    def ropes(self) -> dict[str, RopeSpec]:
        """Return the ropes of the layers, by the names of their tables."""
        local = {LOCAL_ROPE: self.local_rope} if self.local_rope else {}
        return {ROPE: self.rope, **local}

    def layer_rope(self, layer: int) -> tuple[str, int]:
        """Return the tables' name of a layer's rope, and the values of a head that it turns."""
        if self.rope_layers and not self.rope_layers[layer]:
            return ROPE, 0
        name = LOCAL_ROPE if self.local_rope and self.layer_window(layer) else ROPE
        return name, self.ropes()[name].rotary_dim

    def layer_turns(self, layer: int) -> tuple[int, int]:
        """Return how many values of a head a layer's rope turns, and in whose halves pairs lie."""
        name, turned = self.layer_rope(layer)
        return turned, max(turned, self.ropes()[name].span)

    def weight_format(self, weight: str) -> str:
        """Return the format of a weight by its name in the index."""
        return next((form for name, form in self.formats if name == weight), self.weight_dtype)

    def qkv_parts(self, layer: int) -> tuple[str, ...]:
        """Return the weights that hold q, k and v of a layer: one, or three of several formats.

        The gate of attention's output, where there is one, stands before q.
        """
        parts = tuple(f"layers.{layer}.{part}" for part in "qkv")
        listed = any(name == parts[0] for name, _ in self.formats)
        return parts if listed else (f"layers.{layer}.qkv",)

    def layer_window(self, layer: int) -> int:
        """Return the sliding window of `layer`, 0 for none."""
        if not self.sliding_window or (self.window_layers and not self.window_layers[layer]):
            return 0
        return self.sliding_window


def rope_names(rope: str) -> tuple[str, str]:
    """Return the names of a rope's tables of cosines and sines."""
    return f"{rope}_cos", f"{rope}_sin"


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return (n, k) of every weight a model of this spec has; biases and per-head norms apart."""
    hidden = spec.hidden_size
    shapes = {"head": (spec.vocab_size, hidden), "final_norm": (hidden, 1)}
    for name, rope in spec.ropes().items():
        shapes |= dict.fromkeys(rope_names(name), (spec.max_context, rope.rotary_dim // 2))
    if not spec.tied_head:
        shapes["embed"] = (spec.vocab_size, hidden)
    if spec.layer_inputs:
        every = spec.n_layers * spec.layer_inputs
        shapes |= {"layer_embed": (spec.vocab_size, every), "layer_inputs": (every, hidden)}
    for i in range(spec.n_layers):
        shapes |= {f"layers.{i}.{n}": s for n, s in _layer_shapes(spec, i).items()}
        if spec.recurrent and spec.is_recurrent(i):
            mixers = _mixer_shapes(spec.recurrent, hidden)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in mixers.items()}
        if not spec.attends(i):
            continue
        if spec.latent:
            shapes |= {f"layers.{i}.{n}": s for n, s in latent_shapes(spec, spec.latent).items()}
            continue
        parts, rows = spec.qkv_parts(i), spec.qkv_rows(i)
        rows = rows[0] + spec.gate_size, *rows[1:]
        columns = rows if len(parts) > 1 else (sum(rows),)
        shapes |= {name: (n, hidden) for name, n in zip(parts, columns, strict=True)}
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, int]]:
    hidden, norm = spec.hidden_size, (spec.hidden_size, 1)
    parts = spec.mlp_parts(layer)
    found = dict(pair for part in parts for pair in _mlp_shapes(spec, part, hidden))
    found |= {"o": (hidden, spec.qkv_rows(layer)[0])} if spec.mixes(layer) else {}
    found |= {"xielu": (3, 1)} if spec.activation == XIELU else {}
    found |= dict.fromkeys(spec.norms_before(layer), norm)
    if spec.experts and spec.dense_inner:
        found |= dict.fromkeys(("dense_norm", "router_norm", "experts_norm"), norm)
        found |= {"experts_out_norm": norm, "expert_scale": (spec.experts.count, 1)}
    if spec.branch_norms:
        found |= {"attention_norm": norm, "mlp_norm": norm}
    if spec.layer_inputs:
        width = spec.layer_inputs
        found |= {"input_gate": (width, hidden), "input_out": (hidden, width)}
        found["input_out_norm"] = norm
    return found


LATENT_EPS = 1e-6
"""Epsilon of the norms inside latent attention, whatever that of others is (transformers)."""
HEAD_PRODUCTS = ("keys", "values")
"""Weights of latent attention that have a matrix for each head."""


def latent_shapes(spec: ModelSpec, latent: LatentSpec) -> dict[str, tuple[int, int]]:
    """Return (n, k) of what a layer has in place of q, k, v: heads' matrices one after another."""
    hidden, heads, turned = spec.hidden_size, spec.n_heads, spec.rope.rotary_dim
    source = latent.queries or hidden
    return {
        **({"query_in": (latent.queries, hidden)} if latent.queries else {}),
        "query": (heads * (latent.plain + turned), source),
        "latent": (latent.rank + turned, hidden),
        "keys": (heads * latent.rank, latent.plain),
        "values": (heads * latent.values, latent.rank),
        "o": (hidden, heads * latent.values),
    }


def _mixer_shapes(recurrent: RecurrentSpec, hidden: int) -> dict[str, tuple[int, int]]:
    """Return (n, k) of the weights of a recurrent layer in place of attention."""
    return {
        **{name: (n, hidden) for name, n in recurrent.products.items()},
        **{name: (n, 1) for name, n in recurrent.vectors.items()},
        "conv": (recurrent.taps, recurrent.channels),
        recurrent.out: (hidden, recurrent.width),
    }


def _mlp_shapes(
    spec: ModelSpec, part: MlpPart, hidden: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    matrices = part.experts.count if part.experts else 1
    if part.experts:
        yield "router", (part.experts.scores, hidden)
    sides = 2 if spec.gated else 1
    yield part.prefix + spec.up, (sides * part.columns * matrices, hidden)
    yield part.prefix + "down", (hidden * matrices, part.columns)


class WeightEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in `weights/weights.bin`. Offsets in bytes, multiples of 4096.

    layout `packed`: [ceil(N/16)][K][16], columns past N are zero;
    layout `packed_pair`: panels of gate and up in turn: 2j gate, 2j+1 up (n = 2 x intermediate);
    of experts all matrices stand one after another, n counts the columns of all;
    layout `rows`: row-major [n][k]; layout `vector`: [n] (k = 1).
    """

    name: str
    layout: str
    dtype: str
    n: int
    k: int
    offset: int
    bytes: int


class WeightChunks(msgspec.Struct, frozen=True, kw_only=True):
    """sha256 of consecutive chunks of `weights.bin`."""

    chunk_bytes: int
    total_bytes: int
    sha256: tuple[str, ...]


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """`models/<name>/model.json`."""

    schema: int = 1
    name: str
    spec: ModelSpec
    weights: tuple[WeightEntry, ...]
    max_step_tokens: int  # tokens one tape run may hold
    max_step_sequences: int  # sequences one tape run may hold
    tokenizer: str | None = None  # file beside model.json, None where the checkpoint has none
    generation: dict[str, float | int | bool | str | list[int] | None] = {}
