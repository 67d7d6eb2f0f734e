"""A model to a ModelSpec.

In: config.json, generation_config.json and the headers of the tensors of a `ModelSource`.
Every value is checked; what this product does not compute is refused with a SpecError that names
the key, never approximated.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dovetail.codegen.isa.target import Target
from dovetail.compiler.families.decoders import FAMILIES, Family
from dovetail.compiler.families.encoders import ENCODER_FAMILIES
from dovetail.compiler.families.latent import latent_scale, read_latent
from dovetail.compiler.families.mixtures import MAX_INNER, has_experts, read_experts
from dovetail.compiler.families.rope import (
    MAX_POSITION,
    read_local_rope,
    read_rope,
    usable_positions,
)
from dovetail.compiler.families.score_row import has_own_head
from dovetail.compiler.families.tensors import check_tensors
from dovetail.compiler.families.usual_keys import with_usual_keys
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config
from dovetail.compiler.formats.weight_dtype import AUTO, resolve_weight_dtype
from dovetail.compiler.formats.weight_formats import (
    keep_formats,
    keep_orders,
    main_format,
    quantise_formats,
    split_orders,
)
from dovetail.compiler.models.source import (
    GENERATION,
    ModelSource,
    end_ids,
    has_weights,
    open_model,
    read_config,
    read_json,
)
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import is_quantised
from dovetail.ir.model import RELU2, XIELU, ExpertSpec, ModelSpec

DEFAULT_MAX_CONTEXT = 131072
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 576
KV_DTYPES = ("f32", "bf16", "f16")


def read_model_spec(
    model: str | Path | ModelSource,
    *,
    max_context: int | None = None,
    kv_dtype: str | None = None,
    weight_dtype: str | None = None,
    target: Target | None = None,
) -> ModelSpec:
    """Read and check a model: a directory, a GGUF file, or one that was opened.

    max_context: positions to plan for (default: all the model has, at most 131072).
    kv_dtype: f32, bf16 or f16; default f32 beside f32 weights, bf16 beside narrower ones.
    weight_dtype, target: see `resolve_weight_dtype`.

    Raises SpecError naming the file and the key or tensor at fault.
    """
    source = open_model(model) if isinstance(model, str | Path) else model
    config = source.config()
    _, family = config.architecture(FAMILIES, "supported", ENCODER_FAMILIES)
    checkpoint = source.checkpoint()
    quantised = main_format(checkpoint)
    stored = quantised or stored_dtype(checkpoint)
    chosen = resolve_weight_dtype(weight_dtype, stored, target)
    ends = _eos_ids(source, config)
    spec = read_architecture(config, family, stored, chosen, kv_dtype, max_context, ends)
    if spec.tied_head and has_own_head(checkpoint):
        spec = replace(spec, tied_head=False)
    check_tensors(spec, checkpoint)
    if quantised and weight_dtype in (None, AUTO):
        spec = keep_formats(spec, checkpoint)
    elif is_quantised(chosen):
        spec = quantise_formats(split_orders(spec, checkpoint, chosen), chosen)
    return keep_orders(spec, checkpoint, requantise=weight_dtype not in (None, AUTO))


def read_dimensions(
    path: str | Path, *, weight_dtype: str | None = None, target: Target | None = None
) -> ModelSpec:
    """Read a model's dimensions: of what has its weights here as `read_model_spec` does.

    Else from config.json alone (that file, or a directory that has one), for planning: what the
    checkpoint has is what config.json names then.
    """
    path = Path(path)
    if has_weights(path):
        return read_model_spec(path, weight_dtype=weight_dtype, target=target)
    config = read_config(path) if path.is_file() else open_model(path).config()
    name = config.text("dtype", config.text("torch_dtype", "float32"))
    stored = {"bfloat16": "bf16", "float16": "f16"}.get(name, "f32")
    _, family = config.architecture(FAMILIES, "supported", ENCODER_FAMILIES)
    chosen = resolve_weight_dtype(weight_dtype, stored, target)
    return read_architecture(config, family, stored, chosen)


def read_generation_defaults(source: ModelSource) -> dict[str, Any]:
    """Return the plain values (temperature, top_p, ...) of generation_config.json, if there."""
    found = read_json(source, GENERATION)
    return {key: value for key, value in found.values.items() if _plain(value)} if found else {}


def _plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int | str)


def read_architecture(
    config: Config,
    family: Family,
    stored: str,
    weight_dtype: str,
    kv_dtype: str | None = None,
    max_context: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> ModelSpec:
    """Return the spec of a config.json; the arguments are those of `read_model_spec`, as chosen."""
    config = with_usual_keys(config, family.name)
    _check_arithmetic(config, family)
    kv_dtype = _choose_kv_dtype(kv_dtype, weight_dtype)
    n_layers = config.integer("num_hidden_layers", 1, 1024)
    hidden = config.integer("hidden_size", 1, 1 << 17)
    heads = config.integer("num_attention_heads", 1, 4096)
    latent, turned = read_latent(config) if family.latent else (None, 0)
    head_dim = latent.rank + turned if latent else _head_dim(config, family, hidden, heads)
    positions = config.integer("max_position_embeddings", 1, MAX_POSITION)
    window, window_layers = family.windows(config, n_layers)
    kv_heads = 1 if latent else _kv_heads(config, family, heads)
    more = family.more(config, kv_heads, head_dim, window_layers) if family.more else {}
    full = more.get("full_heads") or (kv_heads, head_dim)
    _check_heads(config, heads, *full)
    rope = read_rope(
        *(config, turned or full[1], positions),
        min(max_context or DEFAULT_MAX_CONTEXT, positions),
        theta=family.theta,
        partial=family.partial,
        per_layer=family.local_rope is not None,
    )
    local = None
    if family.local_rope:
        local = read_local_rope(config, head_dim, positions, family.local_rope, family.theta)
    positions = usable_positions(config, rope, positions)
    inner, experts = _read_mlps(config, family, hidden, n_layers)
    bias = family.attention_bias
    config_bias = config.flag("attention_bias") if bias is None else False
    spec = ModelSpec(
        family=family.name,
        vocab_size=config.integer("vocab_size", 1, 1 << 24),
        hidden_size=hidden,
        intermediate_size=inner,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=positions,
        max_context=_context(config, max_context, positions),
        norm_eps=config.number(
            "layer_norm_eps" if family.layer_norm else "rms_norm_eps",
            *(0.0, 1.0, 1e-5 if family.layer_norm else 1e-6),
        ),
        rope=rope,
        sliding_window=window,
        window_layers=window_layers,
        attention_bias=bool(bias) or config_bias,
        output_bias=config_bias and family.output_bias,
        mlp_bias=config.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        sinks=family.sinks,
        qk_norm=config.flag("use_qk_norm") if family.qk_norm is None else family.qk_norm,
        output_gate=family.output_gate,
        recurrent=family.recurrent(config, n_layers) if family.recurrent else None,
        tied_head=config.flag("tie_word_embeddings", family.tied),
        rope_layers=family.rope_layers(config, n_layers),
        local_rope=local,
        **_scales(config, family, hidden),
        **_caps(config, family),
        activation=family.activation,
        qk_norm_of=family.qk_norm_of,
        pre_norms=family.pre_norms,
        parallel=family.parallel,
        layer_norm=family.layer_norm,
        branch_norms=family.branch_norms,
        experts=experts,
        norm_offset=family.norm_offset and config.number("norm_offset", 0.0, 1.0, 1.0),
        bos_token_id=_read_begin(config),
        eos_token_ids=eos_token_ids,
        kv_dtype=kv_dtype,
        weight_dtype=weight_dtype,
        checkpoint_dtype=stored,
    )
    if latent:
        more |= {"latent": latent, "attention_scale": latent_scale(config, latent, rope)}
    return replace(spec, **more)


def _read_mlps(
    config: Config, family: Family, hidden: int, n_layers: int
) -> tuple[int, ExpertSpec | None]:
    """Return the width of an MLP, or of each expert, and the experts, if there are any."""
    mixture = family.experts if has_experts(config, family.experts) else None
    inner = config.integer(mixture.inner if mixture else family.inner, 1, MAX_INNER)
    if mixture is None:
        return inner, None
    return inner, read_experts(
        config, mixture, hidden=hidden, inner=inner, dense=family.inner, n_layers=n_layers
    )


def _read_begin(config: Config) -> int | None:
    """Return the token that begins texts, if there is one."""
    key = "bos_token_id"
    return config.integer(key, 0, 1 << 24) if config.has(key) else None


def _check_arithmetic(config: Config, family: Family) -> None:
    """Raise SpecError for what would change the arithmetic and is not computed."""
    key, wanted = _ACTIVATIONS[family.activation]
    if (found := config.text(key, wanted)) != wanted:
        raise SpecError(f"{config.name}: {key} is {found!r}, but only {wanted} is supported")
    capped = _CAPS if family.caps else _CAPS[1:] if family.more else ()
    for key in _CAPS:
        if key not in capped and config.has(key):
            raise config.fail(key, "but only null is supported")
    seen = "use_bidirectional_attention"  # of pictures alone where it is "vision"
    if config.values.get(seen) not in (None, False, *(("vision",) if family.more else ())):
        raise config.fail(seen, "but only false is supported")
    for key, fixed in {**_CLAMPED, **family.fixed}.items():
        if config.has(key) and config.values[key] != fixed:
            raise config.fail(key, f"but only {fixed} is supported")


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
MOST_CAP = 1024
"""The largest cap of scores: it is a parameter of kernels."""
_ACTIVATIONS = {
    "silu": ("hidden_act", "silu"),
    "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh"),
    "clamped": ("hidden_act", "silu"),
    **{name: ("hidden_act", name) for name in (RELU2, XIELU)},
}
"""Activation of a family to its key in config.json, and its name there."""
_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Keys of the activation `clamped`, with the values that its kernels have."""


def _scales(config: Config, family: Family, hidden: int) -> dict[str, Any]:
    """Return what scores, the stream, its branches and logits are multiplied by.

    Embeddings are not multiplied: the stream is kept smaller instead, and what is added to it.
    """
    if family.query_scalar:
        scalar = config.number("query_pre_attn_scalar", 1e-6, 1e6, 256.0)
        return {"attention_scale": scalar**-0.5, "stream_scale": math.sqrt(hidden)}
    if family.logit_scale is not None:
        return {"logits_scale": config.number("logit_scale", 1e-6, 1e6, family.logit_scale)}
    if not family.multipliers:
        return {}
    keys = ("embedding", "residual", "attention")
    stream, branch, scores = (config.number(f"{key}_multiplier", 1e-6, 1e6, 1.0) for key in keys)
    return {
        "attention_scale": scores,
        "stream_scale": stream,
        "branch_scale": branch / stream,
        "logits_scale": 1 / config.number("logits_scaling", 1e-6, 1e6, 1.0),
    }


def _caps(config: Config, family: Family) -> dict[str, Any]:
    """Return the caps of scores and of logits; null stands for none."""
    scores, logits = (
        config.number(key, 0.0, 1e6, usual) if config.has(key) or key not in config.values else 0.0
        for key, usual in zip(_CAPS, family.caps or (0.0, 0.0), strict=True)
    )
    if not family.caps:
        return {}
    if not scores.is_integer() or scores > MOST_CAP:
        raise config.fail(_CAPS[0], f"but only whole numbers up to {MOST_CAP} are supported")
    return {"attention_cap": int(scores), "logits_cap": logits}


def _head_dim(config: Config, family: Family, hidden: int, heads: int) -> int:
    if not config.has("head_dim") and family.head_dim is None and hidden % heads:
        raise config.fail("hidden_size", f"but must be a multiple of num_attention_heads {heads}")
    head_dim = config.integer("head_dim", 1, 1 << 17, family.head_dim or max(1, hidden // heads))
    _check_heads(config, heads, 1, head_dim)
    return head_dim


def _check_heads(config: Config, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise SpecError(
            f"{config.name}: num_attention_heads is {heads}, but must be a multiple of the KV "
            f"heads, {kv_heads}"
        )
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        raise SpecError(
            f"{config.name}: head_dim {head_dim} is not supported; the attention kernels take "
            f"multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )


def _kv_heads(config: Config, family: Family, heads: int) -> int:
    kv_heads = config.integer("num_key_value_heads", 1, heads, family.kv_heads or heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"but must divide num_attention_heads {heads}")
    return kv_heads


def _context(config: Config, asked: int | None, positions: int) -> int:
    if asked is None:
        return min(positions, DEFAULT_MAX_CONTEXT)
    if not 1 <= asked <= positions:
        raise SpecError(
            f"a context of {asked} tokens was asked for, but {config.name} allows 1 to {positions}"
        )
    return asked


_KEPT_WIDE = re.compile(
    r".*\.(conv1d|conv\.conv|mlp\.gate|in_proj_[ab]|shared_expert_gate)\.weight"
)


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype of the matrices: the one they share, else f32, which holds all of them.

    Beside packed matrices float16 counts as bfloat16, as in `keep_formats`. What GGUF files of
    narrower models have in float32, too, does not count.
    """
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) > 1]
    counted = [info for info in matrices if not _KEPT_WIDE.fullmatch(info.name)] or matrices
    names = {info.dtype.name for info in counted}
    if checkpoint.packs_matrices:
        names = {"bf16" if name == "f16" else name for name in names}
    return names.pop() if len(names) == 1 else "f32"


def _choose_kv_dtype(asked: str | None, weights: str) -> str:
    if asked is None:
        return "f32" if weights == "f32" else "bf16"
    if asked not in KV_DTYPES:
        raise SpecError(
            f"KV dtype {asked!r} is not supported; choose one of {', '.join(KV_DTYPES)}"
        )
    return asked


def _eos_ids(model: ModelSource, config: Config) -> tuple[int, ...]:
    """Return the stop tokens: generation_config.json's where it has them, else config.json's.

    And the tokenizer's: models that were tuned to other turns often tell their end there alone.
    Tokens that the model has no rows of it cannot give.
    """
    generation = read_json(model, GENERATION) or config
    source = generation if generation.has("eos_token_id") else config
    value = source.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 24 for i in ids):
        raise source.fail("eos_token_id", "but must be a token id or a list of them")
    rows = config.integer("vocab_size", 1, 1 << 24)
    return tuple(dict.fromkeys(i for i in (*ids, *end_ids(model)) if i < rows))
