"""The architectures of text encoders: what each one fixes, and how it tells of its positions.

In: config.json. Out: an `EncoderFamily`, and rotary embeddings as `RopeSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.compiler.families.rope import MAX_FACTOR, MAX_THETA, MIN_THETA, read_rope
from dovetail.compiler.files.config import Config
from dovetail.ir.model import RopeSpec

POSITION_KINDS = {"learned": "absolute", "alibi": "alibi", "rotary": "rope"}
"""Our name for how positions enter -> position_embedding_type of config.json."""
LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""The layer types of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """What an architecture fixes.

    skips_padding: rows of the position table lie before a text's first token. relative, norm_first,
    gated: as in EncoderSpec. activations: known values of hidden_act, first the usual one. head: of
    classifiers. keys: what it may call a key of BERT's config.json. token_types, norm_eps, theta:
    where config.json does not tell. fixed: keys that may have no other value.
    """

    name: str
    positions: str = "learned"
    skips_padding: bool = False
    relative: bool = False
    norm_first: bool = False
    gated: bool = False
    activations: tuple[str, ...] = ("gelu", "gelu_new", "gelu_pytorch_tanh")
    head: str = "tanh"
    keys: Mapping[str, str] = field(default_factory=dict)
    token_types: int = 2
    norm_eps: float = 1e-12
    theta: float = 10000.0
    fixed: Mapping[str, object] = field(default_factory=dict)


_BERT = EncoderFamily(name="bert")
_ROBERTA = EncoderFamily(name="roberta", skips_padding=True)
_MPNET = EncoderFamily(
    name="mpnet",
    skips_padding=True,
    relative=True,
    token_types=0,
    fixed={"relative_attention_num_buckets": 32, "pad_token_id": 1},
)
_JINA = EncoderFamily(
    name="jina",
    positions="alibi",
    gated=True,
    activations=("gelu",),
    fixed={"feed_forward_type": "geglu"},
)
_GTE = EncoderFamily(
    name="gte",
    positions="rotary",
    gated=True,
    activations=("gelu",),
    token_types=1,
    fixed={"layer_norm_type": "layer_norm", "logn_attention_scale": False},
)
_MODERN = EncoderFamily(
    name="modernbert",
    positions="rotary",
    norm_first=True,
    gated=True,
    activations=("gelu",),
    head="gelu",
    keys={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
    token_types=0,
    norm_eps=1e-5,
    fixed={
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False),
        "classifier_activation": "gelu",
        "rope_scaling": None,
    },
)
_NOMIC = EncoderFamily(
    name="nomic",
    positions="rotary",
    gated=True,
    activations=("silu", "swiglu"),
    keys={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
    },
    theta=1000.0,
    fixed={
        "num_experts": 0,
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
        **dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "causal"), False),
        **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "rotary_emb_interleaved"), False),
        **{"scale_attn_weights": True, "rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None},
    },
)
LABELLED = "ForSequenceClassification"
"""How the names of classifiers end."""
_EMBEDS = ("Model", "ForMaskedLM")
_SCORES = (*_EMBEDS, LABELLED)
ENCODER_FAMILIES: dict[str, EncoderFamily] = {
    f"{stem}{suffix}": family
    for stem, suffixes, family in (
        ("Bert", _SCORES, _BERT),
        ("Roberta", _SCORES, _ROBERTA),
        ("XLMRoberta", _SCORES, _ROBERTA),
        ("Camembert", _SCORES, _ROBERTA),
        ("MPNet", _SCORES, _MPNET),
        ("NomicBert", _SCORES, _NOMIC),
        ("JinaBert", _EMBEDS, _JINA),
        ("ModernBert", _SCORES, _MODERN),
        ("New", _SCORES, _GTE),
        ("Gte", _SCORES, _GTE),
    )
    for suffix in suffixes
}
"""Architecture of config.json -> family."""


def find_family(config: Config) -> tuple[str, EncoderFamily]:
    """Return the architecture that config.json names, and its family; SpecError if unknown."""
    return config.architecture(ENCODER_FAMILIES, "a supported encoder")


def check_fixed(config: Config, family: EncoderFamily) -> None:
    """Raise SpecError for a config.json that asks for what this family's kernels do not do."""
    if config.flag("is_decoder"):
        raise config.fail("is_decoder", "but only bidirectional models are encoders")
    kind = POSITION_KINDS[family.positions]
    for key, value in {"position_embedding_type": kind, **family.fixed}.items():
        if config.has(key) and config.values[key] != value:
            raise config.fail(key, f"but of {family.name} models only {value!r} is supported")


def read_rotation(
    config: Config, family: EncoderFamily, head_dim: int, rows: int
) -> dict[str, Any]:
    """Return the fields of an EncoderSpec on how q and k are rotated over `rows` positions."""
    if family.positions != "rotary":
        return {}
    if not family.norm_first:
        return {"rope": _read_one(config, head_dim, rows, family.theta)}
    return {
        "local_layers": _read_local_layers(config),
        "rope": _read_kind(config, GLOBAL, "global_rope_theta", 160000.0, head_dim, rows),
        "local_rope": _read_kind(config, LOCAL, "local_rope_theta", 10000.0, head_dim, rows),
        "reach": config.integer("local_attention", 2, 1 << 24, 128) // 2,
    }


def _read_one(config: Config, head_dim: int, rows: int, theta: float) -> RopeSpec:
    """Return the rotation of a config.json with one; GTE's own kind is `ntk`."""
    scaling = config.section("rope_scaling") if config.has("rope_scaling") else config
    if scaling.text("type", "") != "ntk":
        return read_rope(config, head_dim, rows, theta=theta)
    return RopeSpec(
        kind="ntk",
        theta=config.number("rope_theta", MIN_THETA, MAX_THETA, theta),
        factor=scaling.number("factor", 1.0, MAX_FACTOR),
        rotary_dim=head_dim,
    )


def _read_kind(
    config: Config, kind: str, key: str, theta: float, head_dim: int, rows: int
) -> RopeSpec:
    """Return the rotation of a layer type: of its part of rope_parameters, or by an older key."""
    given = config.section("rope_parameters") if config.has("rope_parameters") else None
    values = dict(given.section(kind).values) if given is not None and given.has(kind) else {}
    values.setdefault("rope_theta", config.number(key, MIN_THETA, MAX_THETA, theta))
    return read_rope(Config(config.name, {"rope_parameters": values}), head_dim, rows)


def _read_local_layers(config: Config) -> tuple[bool, ...]:
    """Return which layers are local: those listed, or all but each third (or n-th)."""
    count = config.integer("num_hidden_layers", 1, 1024)
    if not config.has("layer_types"):
        every = config.integer("global_attn_every_n_layers", 1, 1024, 3)
        return tuple(i % every != 0 for i in range(count))
    types = config.texts("layer_types")
    if len(types) != count or not set(types) <= {LOCAL, GLOBAL}:
        raise config.fail("layer_types", f"but must be {LOCAL} or {GLOBAL} for each layer")
    return tuple(kind == LOCAL for kind in types)
