"""ModelSpec: the architecture of one decoder-only model, and the index of its packed weights.

These are the contents of `models/<name>/model.json` in an artifact.
"""

from __future__ import annotations

import msgspec

KV_BLOCK = 16
"""Tokens in one KV block, on every device."""
PANEL = 16
"""Columns in one panel of a packed weight; every target's micro-kernels read whole panels."""
MAX_KV_SPLITS = 16
"""Largest `kv_splits` of a forward tape: its partial-attention buffer holds so many parts."""
ROPE, LOCAL_ROPE = "rope", "local_rope"
"""Names of ropes."""
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
    """Experts of each layer's feed-forward part: `used` of `count` compute a token."""

    count: int
    used: int
    share: bool = True  # the weights of a token's experts are divided by their sum


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
    rope_layers: tuple[bool, ...] = ()  # per layer: are q and k rotated; () = all layers
    local_rope: RopeSpec | None = None  # of layers with a window, where theirs is another
    attention_scale: float | None = None  # of q k^T; None = head_dim ** -0.5
    activation: str = "silu"  # of the gate: silu, gelu_tanh, or clamped, of gate and up
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
    layer_inputs: int = 0  # values that each layer has of its own of a token; 0 = none
    layer_scale: bool = False  # what a layer gives is multiplied by a learnt number
    logits_cap: float = 0.0  # c of logits c tanh(x / c); 0 = they are x
    experts: ExpertSpec | None = None
    dense_inner: int = 0  # intermediate_size of an MLP beside experts, both normed; 0 = none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qkv_size(self) -> int:
        """Columns of the largest fused q, k, v projection: (n_heads + 2 n_kv_heads) head_dim."""
        return max(sum(self.qkv_rows(layer)) for layer in range(self.n_layers))

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
        return heads * size if self.kv_layer(layer) == layer else 0

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
        """Whether layers differ in more than windows and ropes, or have parts of Gemma 4's."""
        parts = self.full_heads, self.shared_kv, self.layer_inputs, self.logits_cap
        return any((*parts, self.dense_inner))

    def inner_columns(self, rows: float = 1) -> float:
        """Return the inner columns of a layer that so many tokens go through, at most."""
        used = min(rows * self.experts.used, self.experts.count) if self.experts else 1
        return self.intermediate_size * used + self.dense_inner

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
        """Return the weights that hold q, k and v of a layer: one, or three of several formats."""
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
    hidden, matrices = spec.hidden_size, spec.experts.count if spec.experts else 1
    shapes = {"head": (spec.vocab_size, hidden), "final_norm": (hidden, 1)}
    for name, rope in spec.ropes().items():
        shapes |= dict.fromkeys(rope_names(name), (spec.max_context, rope.rotary_dim // 2))
    if not spec.tied_head:
        shapes["embed"] = (spec.vocab_size, hidden)
    if spec.layer_inputs:
        every = spec.n_layers * spec.layer_inputs
        shapes |= {"layer_embed": (spec.vocab_size, every), "layer_inputs": (every, hidden)}
    for i in range(spec.n_layers):
        shapes |= {f"layers.{i}.{n}": s for n, s in _layer_shapes(spec, i, matrices).items()}
        parts, rows = spec.qkv_parts(i), spec.qkv_rows(i)
        columns = rows if len(parts) > 1 else (sum(rows),)
        shapes |= {name: (n, hidden) for name, n in zip(parts, columns, strict=True)}
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int, matrices: int) -> dict[str, tuple[int, int]]:
    hidden, inner, norm = spec.hidden_size, spec.layer_inner(layer), (spec.hidden_size, 1)
    found = {
        "input_norm": norm,
        "o": (hidden, spec.qkv_rows(layer)[0]),
        "post_norm": norm,
        "gate_up": (2 * inner * matrices, hidden),
        "down": (hidden * matrices, inner),
    }
    if spec.experts:
        found["router"] = (matrices, hidden)
    if beside := spec.dense_inner:
        found |= {"dense_gate_up": (2 * beside, hidden), "dense_down": (hidden, beside)}
        found |= dict.fromkeys(("dense_norm", "router_norm", "experts_norm"), norm)
        found |= {"experts_out_norm": norm, "expert_scale": (matrices, 1)}
    if spec.branch_norms:
        found |= {"attention_norm": norm, "mlp_norm": norm}
    if spec.layer_inputs:
        width = spec.layer_inputs
        found |= {"input_gate": (width, hidden), "input_out": (hidden, width)}
        found["input_out_norm"] = norm
    return found


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
