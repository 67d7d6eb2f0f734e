"""Which checkpoint tensors a model has, and which packed weight each of them becomes.

In: a ModelSpec. Out: `WeightSource` rows in the order of weights.bin. This table is the one
place that knows Hugging Face tensor names; the shape check and the packer both walk it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from dovetail.compiler.families.apertus import UNUSED_NUMBER, xielu_source
from dovetail.compiler.families.experts import CHOICE, GATE
from dovetail.compiler.families.latent import latent_sources
from dovetail.compiler.families.recurrent import recurrent_sources
from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import is_quantised
from dovetail.ir.model import ROWS, TURNED, XIELU, MlpPart, ModelSpec, order_name, rope_names


def weight_sources(spec: ModelSpec) -> tuple[WeightSource, ...]:
    """Return every packed weight of a model, in the order in which a step reads them."""
    return tuple(_all_sources(spec))


def check_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Compare every tensor with the spec.

    Raises SpecError naming the tensor for one that is missing, has another shape, no floating
    dtype, or is not known to this architecture (an adapter or quantization that would silently
    be lost).
    """
    unused = [UNUSED_TIED.pattern if spec.tied_head else _UNUSED.pattern]
    shared = range(spec.n_layers - spec.shared_kv, spec.n_layers)  # published files have K and V
    unused += [rf"model\.layers\.{i}\.self_attn\.[kv]_(proj|norm)\.weight" for i in shared]
    if drafts := _DRAFTS.get(spec.family):
        unused.append(drafts.format(spec.n_layers))
    check_sources(weight_sources(spec), checkpoint, re.compile("|".join(unused)))


def check_sources(
    sources: Iterable[WeightSource], checkpoint: Checkpoint, unused: re.Pattern[str]
) -> None:
    """Compare the tensors of `sources` with a checkpoint, which may have `unused` ones beside."""
    known: dict[str, int] = {}
    listed = tuple(sources)
    for source in listed:  # several may share the rows of a tensor
        known |= {name: max(rows, known.get(name, 0)) for name, rows in source.heights.items()}
    for source in listed:
        for name in source.heights:
            info = checkpoint.info(name)
            shapes = source.shapes(known[name])
            if info.shape not in shapes:
                raise SpecError(
                    f"{info.path}: tensor {name} has shape {list(info.shape)}, "
                    f"its configuration asks for {list(shapes[0])}"
                )
            if info.dtype.name not in ("f32", "f16", "bf16"):
                raise SpecError(
                    f"{info.path}: tensor {name} has dtype {info.dtype.safetensors}; only F32, F16 "
                    "and BF16 checkpoints are supported"
                )
    for name in checkpoint.tensors:
        if name not in known and not unused.fullmatch(name) and not _is_no_bias(name, checkpoint):
            raise SpecError(
                f"{checkpoint.path}: tensor {name} is not part of this architecture as "
                "its configuration has it; adapters and quantized weights must be merged first"
            )


def _is_no_bias(name: str, checkpoint: Checkpoint) -> bool:
    """Tell whether a tensor is a bias of zeros, which some quantisers give every matrix."""
    return name.endswith(".bias") and not checkpoint.load(name).any()


_UNUSED = re.compile(
    r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*attn\.masked_bias"
    rf"|.*\.act_fn\.{UNUSED_NUMBER}"
)
_DRAFTS = {
    **dict.fromkeys(("glm4moe", "glm4moelite", "deepseek3"), r"(?:model\.layers|blk)\.{}\..+"),
    "ernie4_5moe": r"model\.mtp_.+",
    "nemotron_h": r"mtp\..+|(?:model\.layers|blk)\.{}\..+",
    **dict.fromkeys(("qwen3_5", "qwen3_5moe"), r"mtp\..+|(?:model\.layers|blk)\.{}\..+"),
}
"""Of families, the tensors of layers that draft tokens; {} stands for the number of the others."""
UNUSED_TIED = re.compile(rf"{_UNUSED.pattern}|lm_head\.weight")


def _all_sources(spec: ModelSpec) -> Iterator[WeightSource]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    if not spec.tied_head:
        layout = "packed" if is_quantised(spec.weight_format("embed")) else "rows"
        yield WeightSource("embed", layout, vocab, hidden, ("model.embed_tokens.weight",), (vocab,))
    if spec.layer_inputs:
        yield from _input_sources(spec, spec.layer_inputs)
    for name, rope in spec.ropes().items():
        for table in rope_names(name):
            yield WeightSource(table, "rows", spec.max_context, rope.rotary_dim // 2)
    for layer in range(spec.n_layers):
        for source in _layer_sources(spec, layer):
            if source.name in spec.ordered:
                yield WeightSource(order_name(source.name), "vector", source.k, 1)
            yield source
    yield _norm(spec, "final_norm", "model.norm.weight", hidden, spec.logits_scale)
    head = "model.embed_tokens.weight" if spec.tied_head else "lm_head.weight"
    yield WeightSource("head", "packed", vocab, hidden, (head,), (vocab,))


def _layer_sources(spec: ModelSpec, layer: int) -> Iterator[WeightSource]:
    """Yield one layer's weights in the order of its tape."""
    here, there = f"layers.{layer}", f"model.layers.{layer}"
    hidden = spec.hidden_size
    norms = _NORMS_OF.get(spec.family, _NORMS)

    def norm(name: str, scale: float = 1.0) -> WeightSource:
        return _norm(spec, f"{here}.{name}", f"{there}.{norms[name]}.weight", hidden, scale)

    if "input_norm" in spec.norms_before(layer):
        yield norm("input_norm")
    if spec.recurrent and spec.is_recurrent(layer):
        yield from recurrent_sources(spec, spec.recurrent, layer)
    if spec.latent:
        yield from latent_sources(spec, spec.latent, layer)
    elif spec.attends(layer):
        yield from _attention_sources(spec, layer)
    if spec.branch_norms:
        yield norm("attention_norm", 1 / spec.stream_scale)
    if "post_norm" in spec.norms_before(layer):
        yield norm("post_norm")
    if spec.dense_inner:
        yield from _both_sources(spec, layer, norm)
    else:
        for mlp in spec.mlp_parts(layer):
            own = _expert_sources if mlp.experts else _dense_sources
            yield from own(spec, layer, mlp)
    if spec.branch_norms:
        yield norm("mlp_norm", 1 / spec.stream_scale)
    if spec.layer_inputs:
        width = spec.layer_inputs
        for name, (tensor, n, k) in {
            "input_gate": ("per_layer_input_gate", width, hidden),
            "input_out": ("per_layer_projection", hidden, width),
        }.items():
            yield WeightSource(
                f"{here}.{name}", "packed", n, k, (f"{there}.{tensor}.weight",), (n,)
            )
        yield norm("input_out_norm", 1 / spec.stream_scale)
    if spec.layer_scale:
        yield _vector(f"{here}.scale", f"{there}.layer_scalar", 1)


def _both_sources(
    spec: ModelSpec, layer: int, norm: Callable[[str], WeightSource]
) -> Iterator[WeightSource]:
    """Yield an MLP and the experts beside it, each with norms of its own (Gemma 4)."""
    (experts, dense), there = spec.mlp_parts(layer), f"model.layers.{layer}.router"
    here, hidden = f"layers.{layer}", spec.hidden_size
    assert experts.experts is not None
    yield from _dense_sources(spec, layer, dense)
    yield norm("dense_norm")
    yield _norm(spec, f"{here}.router_norm", f"{there}.scale", hidden, hidden**-0.5)
    yield norm("experts_norm")
    yield from _expert_sources(spec, layer, experts)
    scale = f"{there}.per_expert_scale"
    yield _vector(f"{here}.expert_scale", scale, experts.experts.count)
    yield norm("experts_out_norm")


def _dense_sources(spec: ModelSpec, layer: int, part: MlpPart) -> Iterator[WeightSource]:
    """Yield the matrices and biases that all tokens go through."""
    hidden, inner = spec.hidden_size, part.columns
    beside = len(spec.mlp_parts(layer)) > 1 and not spec.dense_inner
    module = "mlp" if spec.family in FUSED_PAIR or not beside else "mlp.shared_experts"
    here, there = f"layers.{layer}.{part.prefix}", f"model.layers.{layer}.{module}"
    pair = tuple(f"{there}.{p}_proj" for p in ("gate", "up"))
    fused, down = (f"{there}.gate_up_proj.weight",) * 2, f"{there}.down_proj"
    if not spec.gated:
        if spec.activation == XIELU:
            yield xielu_source(layer)
        yield WeightSource(f"{here}up", "packed", inner, hidden, _weights(pair[1:]), (inner,))
        yield WeightSource(f"{here}down", "packed", hidden, inner, _weights((down,)), (hidden,))
        return
    yield WeightSource(
        f"{here}gate_up",
        "packed_pair",
        2 * inner,
        hidden,
        fused if spec.family in FUSED_PAIR else _weights(pair),
        (inner, inner),
        (0, inner) if spec.family in FUSED_PAIR else (),
    )
    if spec.mlp_bias:
        yield WeightSource(
            f"{here}gate_up_bias", "pair_vector", 2 * inner, 1, _biases(pair), (inner, inner)
        )
    yield WeightSource(f"{here}down", "packed", hidden, inner, _weights((down,)), (hidden,))
    if spec.mlp_bias:
        yield _vector(f"{here}down_bias", f"{down}.bias", hidden)


def _input_sources(spec: ModelSpec, width: int) -> Iterator[WeightSource]:
    """Yield what gives each layer values of its own of a token: `tape/decoder.py` embeds it."""
    every, vocab = spec.n_layers * width, spec.vocab_size
    layout = "packed" if is_quantised(spec.weight_format("layer_embed")) else "rows"
    table, model = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"
    yield WeightSource("layer_embed", layout, vocab, every, (table,), (vocab,))
    yield WeightSource("layer_inputs", "packed", every, spec.hidden_size, (model,), (every,))
    norm = "model.per_layer_projection_norm.weight"
    yield _norm(spec, "layer_inputs_norm", norm, width, width**-0.5)


def _attention_sources(spec: ModelSpec, layer: int) -> Iterator[WeightSource]:
    """Yield the weights of a layer's attention."""
    here, there = f"layers.{layer}", f"model.layers.{layer}"
    hidden, out = spec.hidden_size, f"{there}.self_attn.o_proj"
    q, kv, _ = spec.qkv_rows(layer)
    rows = tuple(filter(None, spec.qkv_rows(layer)))
    one = spec.keys_as_values and not spec.layer_window(layer)
    kinds = ("qkk" if one else "qkv")[: len(rows)]
    qkv = tuple((f"{there}.self_attn.{p}_proj", n) for p, n in zip(kinds, rows, strict=True))
    parts = spec.qkv_parts(layer)
    if spec.family in FUSED_QKV:  # one tensor has one format: it is never parted
        whole = f"{there}.self_attn.qkv_proj.weight"
        yield WeightSource(parts[0], "packed", q + 2 * kv, hidden, (whole,), (q + 2 * kv,))
    elif len(parts) > 1:
        for name, module in zip(parts, qkv, strict=True):
            yield _stacked(spec, name, "packed", hidden, (module,), "weight")
    else:
        yield _stacked(spec, parts[0], "packed", hidden, qkv, "weight")
    if spec.attention_bias:
        yield _stacked(spec, f"{here}.qkv_bias", "vector", 1, qkv, "bias")
    if spec.qk_norm:
        name, modules = _QK_NORMS[spec.qk_norm_of]
        for part, width in (("q", q), ("k", kv)):
            n = width if spec.qk_norm_of == ROWS else spec.layer_heads(layer)[2]
            if width:
                source = f"{there}.self_attn.{modules[part]}.weight"
                yield _norm(spec, f"{here}.{part}{name}", source, n)
    if spec.sinks:
        yield _vector(f"{here}.sinks", f"{there}.self_attn.sinks", spec.n_heads)
    yield WeightSource(f"{here}.o", "packed", hidden, q, _weights((out,)), (hidden,))
    if spec.output_bias:
        yield _vector(f"{here}.o_bias", f"{out}.bias", hidden)


def _stacked(
    spec: ModelSpec, name: str, layout: str, k: int, modules: tuple[tuple[str, int], ...], kind: str
) -> WeightSource:
    """Return projections (module, rows) as one weight; q may have a gate behind each head.

    Then the rows of all gates come first, those of q next.
    """
    parts: list[tuple[str, int, int]] = []
    for module, rows in modules:
        tensor, size = f"{module}.{kind}", spec.head_dim
        if spec.output_gate and module.endswith("q_proj"):
            for side in (1, 0):
                parts += [(tensor, (2 * h + side) * size, size) for h in range(spec.n_heads)]
        else:
            parts.append((tensor, 0, rows))
    tensors, starts, counts = zip(*parts, strict=True)
    return WeightSource(name, layout, sum(counts), k, tensors, counts, starts)


def _expert_sources(spec: ModelSpec, layer: int, part: MlpPart) -> Iterator[WeightSource]:
    """Yield the router and the experts of a layer, one after another."""
    here, there = f"layers.{layer}", f"model.layers.{layer}.mlp"
    hidden, inner, experts = spec.hidden_size, part.columns, part.experts
    assert experts is not None
    gates, ups, downs = (
        tuple(f"{there}.experts.{expert}.{part}_proj" for expert in range(experts.count))
        for part in ("gate", "up", "down")
    )
    gate = {f"{there}.{GATE}": 1} if experts.gated else {}
    router = {f"{there}.gate.weight": experts.count, **gate}
    tensors, heights = tuple(router), tuple(router.values())
    yield WeightSource(f"{here}.router", "packed", experts.scores, hidden, tensors, heights)
    if spec.mlp_bias:
        yield _vector(f"{here}.router_bias", f"{there}.gate.bias", experts.count)
    if experts.biased:
        yield _vector(f"{here}.choice", f"{there}.{CHOICE}", experts.count)
    first = ((*gates, *ups), "_pair") if spec.gated else (ups, "")
    for name, (modules, kind), n, k in (
        (spec.up, first, inner, hidden),
        ("down", (downs, ""), hidden, inner),
    ):
        rows = (n,) * len(modules)
        whole = sum(rows)
        yield WeightSource(f"{here}.{name}", f"packed{kind}", whole, k, _weights(modules), rows)
        if spec.mlp_bias:
            vector = "pair_vector" if kind else "vector"
            yield WeightSource(f"{here}.{name}_bias", vector, whole, 1, _biases(modules), rows)


FUSED_QKV, FUSED_PAIR = ("phi3",), ("phi3", "granite4", "granitemoeshared", "glm4")
"""Families whose checkpoints have q, k and v as one tensor; and those of gate and up."""
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_QK = {"q": "q_norm", "k": "k_norm"}
_QK_NORMS = {
    "heads": ("_norm", _QK),
    TURNED: ("_norm", {"q": "query_layernorm", "k": "key_layernorm"}),
    ROWS: ("_rows_norm", _QK),
}
"""What q and k are normed over to the ends of our names, and the names in checkpoints."""
_LAST = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_GEMMA = {**_LAST, "input_norm": "input_layernorm", "post_norm": "pre_feedforward_layernorm"}
_NORMS_OF = {
    "apertus": {"input_norm": "attention_layernorm", "post_norm": "feedforward_layernorm"},
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _LAST),
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    "gemma4": {
        **_GEMMA,
        "dense_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_out_norm": "post_feedforward_layernorm_2",
        "input_out_norm": "post_per_layer_input_norm",
    },
    "nemotron_h": dict.fromkeys(_NORMS, "input_layernorm"),
    "glm4": {
        **_NORMS,
        "attention_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_mlp_layernorm",
    },
}
"""Our norms of a layer by what checkpoints call them, in most families and in those of branches."""


def _norm(spec: ModelSpec, name: str, tensor: str, n: int, scale: float = 1.0) -> WeightSource:
    return WeightSource(name, "vector", n, 1, (tensor,), (n,), plus=spec.norm_offset, times=scale)


def _vector(name: str, tensor: str, n: int) -> WeightSource:
    return WeightSource(name, "vector", n, 1, (tensor,), (n,))


def _weights(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.weight" for module in modules)


def _biases(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.bias" for module in modules)
