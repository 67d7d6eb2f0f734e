"""Families of decoders: what an architecture fixes, and how its config.json tells the rest.

In: a config.json. Out: a `Family`, and which layers have windows and ropes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.compiler.families.falcon import FALCON, read_beside, read_multipliers
from dovetail.compiler.families.gemma4 import UNIFIED, Fields, read_gemma4
from dovetail.compiler.families.minicpm import MINICPM
from dovetail.compiler.families.mixtures import (
    Mixture,
    ernie_dense,
    first_dense,
    listed_dense,
    one_shared,
    qwen_dense,
    shared_experts,
    shared_width,
)
from dovetail.compiler.families.nemotron import NEMOTRON, nemotron_dense, read_alone
from dovetail.compiler.families.recurrent import (
    read_delta,
    read_granite,
    read_scans,
    read_short_conv,
)
from dovetail.compiler.families.rope import FULL, LOCAL_BASE, MAX_POSITION, SLIDING
from dovetail.compiler.files.config import Config
from dovetail.ir.model import RELU2, ROWS, TURNED, XIELU, RecurrentSpec

PATTERN = 6
"""Gemma 3: of so many layers one has no window."""

Windows = Callable[[Config, int], tuple[int, tuple[bool, ...]]]
"""(config, layers) to the window, 0 for none, and in which layers it applies, () in all."""
Recurrent = Callable[[Config, int], RecurrentSpec | None]
"""(config, layers) to the layers without keys."""
More = Callable[[Config, int, int, Sequence[bool]], Fields]
"""(config, KV heads, head_dim, layers with a window) to fields that other families have not."""
RopeLayers = Callable[[Config, int], tuple[bool, ...]]
"""(config, layers) to whether each turns queries and keys, () for all."""


# ---- windows ----


def _no_window(_config: Config, _n_layers: int) -> tuple[int, tuple[bool, ...]]:
    return 0, ()


def _whole_window(config: Config, _n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Phi-3 and Mistral: one window for all layers, null for none."""
    return _window(config), ()


def _layer_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Qwen: a window on the layers named in layer_types, or on those from max_window_layers on."""
    if not config.flag("use_sliding_window"):
        return 0, ()
    first = config.integer("max_window_layers", 0, MAX_POSITION, 28)
    return _window(config), _sliding(config, n_layers, lambda layer: layer >= first)


def _used_window(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Qwen's mixtures: one window for all layers, where it is used."""
    return _whole_window(config, n_layers) if config.flag("use_sliding_window") else (0, ())


def _even_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Qwen2's mixtures: on the layers named in layer_types, or the even ones of the first."""
    if not config.flag("use_sliding_window"):
        return 0, ()
    last = config.integer("max_window_layers", 0, MAX_POSITION, 28)
    return _window(config), _sliding(config, n_layers, lambda i: i % 2 == 0 and i < last)


def _dots_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """dots: on the layers named in layer_types, or on those from max_window_layers on."""
    first = config.integer("max_window_layers", 0, MAX_POSITION, 62)
    return _window(config), _sliding(config, n_layers, lambda layer: layer >= first)


def _gemma_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Gemma 3: a window on the layers named in layer_types, or on all but each sixth."""
    each = config.integer("sliding_window_pattern", 1, 1024, PATTERN)
    window = config.integer("sliding_window", 1, MAX_POSITION, 4096)
    return window, _sliding(config, n_layers, lambda layer: (layer + 1) % each != 0)


def _gemma4_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Gemma 4: the same, but the last layer has none, whatever layer_types says."""
    usual = 1024 if UNIFIED in config.texts("architectures") else 512
    window = config.integer("sliding_window", 1, MAX_POSITION, usual)
    kinds = _sliding(config, n_layers, lambda layer: (layer + 1) % PATTERN != 0)
    return window, (*kinds[:-1], False)


def _oss_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """gpt-oss and Gemma 2: on the layers named in layer_types, or on each second from the first."""
    return _window(config), _sliding(config, n_layers, lambda layer: layer % 2 == 0)


def _olmo_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """OLMo 3: a window on the layers named in layer_types, or on all but each fourth."""
    window = config.integer("sliding_window", 1, MAX_POSITION, 4096)
    return window, _sliding(config, n_layers, lambda layer: (layer + 1) % 4 != 0)


def _cohere_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Command R7B: a window on the layers named in layer_types, or on all but each fourth."""
    each = config.integer("sliding_window_pattern", 1, 1024, 4)
    window = config.integer("sliding_window", 1, MAX_POSITION, 4096)
    return window, _sliding(config, n_layers, lambda layer: (layer + 1) % each != 0)


def _exaone_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """EXAONE 4: none, or on the layers named in layer_types, or on all but each fourth."""
    if not config.has("sliding_window"):
        return 0, ()
    each = 4 if config.has("layer_types") else config.integer("sliding_window_pattern", 1, 1024, 4)
    return _window(config), _sliding(config, n_layers, lambda layer: (layer + 1) % each != 0)


def _smollm_windows(config: Config, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    """SmolLM3: none; its code has one for layers without rope, which no published model uses."""
    if config.flag("use_sliding_window") and config.has("sliding_window"):
        raise config.fail("use_sliding_window", "but only false is supported")
    return 0, ()


def _sliding(config: Config, n_layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return for each layer whether it has the window, as layer_types or `default` tells."""
    kinds = config.texts("layer_types")
    if not kinds:
        return tuple(map(default, range(n_layers)))
    if len(kinds) != n_layers or not set(kinds) <= {FULL, SLIDING}:
        raise config.fail("layer_types", f"but must name {FULL} or {SLIDING} {n_layers} times")
    return tuple(kind == SLIDING for kind in kinds)


def _window(config: Config) -> int:
    if not config.has("sliding_window"):
        return 0
    return config.integer("sliding_window", 1, MAX_POSITION)


# ---- ropes ----


def _all_layers(_config: Config, _n_layers: int) -> tuple[bool, ...]:
    return ()


def _smollm_ropes(config: Config, n_layers: int) -> tuple[bool, ...]:
    """SmolLM3: layers without a rope (NoPE) are 0 in no_rope_layers, else each fourth."""
    listed = config.values.get("no_rope_layers")
    if listed is None:
        each = config.integer("no_rope_layer_interval", 1, 1024, 4)
        return tuple((layer + 1) % each != 0 for layer in range(n_layers))
    known = isinstance(listed, list) and all(item in (0, 1) for item in listed)
    if not known or len(listed) != n_layers:
        raise config.fail("no_rope_layers", f"but must be a list of {n_layers} times 0 or 1")
    return tuple(map(bool, listed))


def _exaone_ropes(config: Config, n_layers: int) -> tuple[bool, ...]:
    """EXAONE 4: in all layers, or in those with a window."""
    return _exaone_windows(config, n_layers)[1]


def _cohere_ropes(config: Config, n_layers: int) -> tuple[bool, ...]:
    """Command R7B: in the layers with a window."""
    return _cohere_windows(config, n_layers)[1]


def no_ropes(_config: Config, n_layers: int) -> tuple[bool, ...]:
    """Nemotron-H: in no layer."""
    return (False,) * n_layers


def _granite_ropes(config: Config, n_layers: int) -> tuple[bool, ...]:
    """Granite 4: a rope in all layers or in none."""
    return () if config.text("position_embedding_type", "") == "rope" else (False,) * n_layers


# ---- families ----


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes: defaults of config.json keys and which parts it has at all.

    `attention_bias`: True or False where the architecture decides, None where config.json does
    (for q, k, v, and o where it has an output_bias); `mlp_bias` and `qk_norm` likewise. sinks,
    recurrent, output_gate, latent: see ModelSpec. theta: base of the rope, where none is told.
    partial: the part of each head that ropes turn, unless config.json tells, None where it may not;
    neighbours: they turn the rows (0, 1), (2, 3), ... (`pairs.py`). local_rope: layers with a
    window have a rope of their own, whose base older files have by this key.
    query_scalar: scores are scaled by query_pre_attn_scalar, embeddings by sqrt(hidden_size).
    caps: config.json tells caps of scores and logits, or they are these.
    multipliers: config.json tells what scales scores, embeddings, branches and logits.
    logit_scale: config.json tells what logits are multiplied by, or this.
    norm_offset: what its code adds to weights of RMSNorms. more: see `More`.
    experts: of a family of mixtures, what it fixes of them; inner: the key of the width of an MLP
    without experts. fixed: keys that may have no other value.
    """

    name: str
    attention_bias: bool | None = False
    output_bias: bool = True
    mlp_bias: bool | None = False
    qk_norm: bool | None = False
    qk_norm_of: str = "heads"
    sinks: bool = False
    windows: Windows = _no_window
    recurrent: Recurrent | None = None
    output_gate: bool = False
    latent: bool = False
    rope_layers: RopeLayers = _all_layers
    local_rope: str | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    theta: float = 10000.0
    partial: float | None = None
    neighbours: bool = False
    activation: str = "silu"
    query_scalar: bool = False
    caps: tuple[float, float] | None = None
    pre_norms: bool = True
    parallel: bool = False
    layer_norm: bool = False
    logit_scale: float | None = None
    branch_norms: bool = False
    multipliers: bool = False
    norm_offset: float = 0.0
    more: More | None = None
    experts: Mixture | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    inner: str = "intermediate_size"


_GEMMA4 = Family(
    "gemma4",
    attention_bias=None,
    qk_norm=True,
    windows=_gemma4_windows,
    local_rope=LOCAL_BASE,
    kv_heads=4,
    head_dim=256,
    tied=True,
    activation="gelu_tanh",
    branch_norms=True,
    more=read_gemma4,
)
_GRANITE4 = Family(
    "granite4",
    attention_bias=None,
    recurrent=read_granite,
    rope_layers=_granite_ropes,
    multipliers=True,
    experts=Mixture(shared=shared_width("shared_intermediate_size", 1024), optional=True),
    inner="shared_intermediate_size",
)
GRANITE_PARTED = "GraniteHybridForCausalLM"
"""What GGUF files of Granite 4 stand for, whose gates and ups are tensors of their own."""
_OLMO: dict[str, Any] = {
    **{"attention_bias": None, "qk_norm": True, "qk_norm_of": ROWS},
    **{"pre_norms": False, "branch_norms": True},
}
"""Of OLMo 2 and 3."""
_COHERE: dict[str, Any] = {
    **{"attention_bias": None, "neighbours": True, "tied": True},
    **{"parallel": True, "layer_norm": True, "logit_scale": 0.0625},
}
"""Of Command R and R7B."""
_LFM2: dict[str, Any] = {
    **{"qk_norm": True, "recurrent": read_short_conv},
    **{"kv_heads": 8, "tied": True, "theta": 1e6},
}
_QWEN35: dict[str, Any] = {
    **{"attention_bias": None, "qk_norm": True, "recurrent": read_delta, "output_gate": True},
    **{"head_dim": 256, "partial": 0.25, "norm_offset": 1.0},
}
"""Of LFM2 and of Qwen3.5, dense or not."""
_DEEPSEEK3: dict[str, Any] = {
    **{"sigmoid": True, "biased": True, "inner": "moe_intermediate_size"},
    "shared": shared_experts("n_shared_experts", 1),
}
"""Of experts of DeepSeek V3 and GLM-4.7 Flash."""
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", attention_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family("mistral", windows=_whole_window, kv_heads=8),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        windows=_whole_window,
        kv_heads=8,
        head_dim=128,
        theta=1e6,
    ),
    "Qwen2ForCausalLM": Family("qwen2", attention_bias=True, windows=_layer_windows),
    "Qwen3ForCausalLM": Family(
        "qwen3", attention_bias=None, qk_norm=True, windows=_layer_windows, head_dim=128
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3moe",
        attention_bias=None,
        qk_norm=True,
        windows=_used_window,
        kv_heads=4,
        experts=Mixture(share=False, inner="moe_intermediate_size", dense=qwen_dense),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2moe",
        attention_bias=True,
        windows=_even_windows,
        experts=Mixture(
            share=False,
            inner="moe_intermediate_size",
            dense=qwen_dense,
            shared=shared_width("shared_expert_intermediate_size", 5632),
            gated=True,
        ),
        fixed={"qkv_bias": True},
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4moe",
        attention_bias=None,
        output_bias=False,
        qk_norm=None,
        partial=0.5,
        experts=Mixture(
            sigmoid=True,
            biased=True,
            inner="moe_intermediate_size",
            dense=first_dense(1),
            shared=shared_experts("n_shared_experts", 1),
        ),
    ),
    "Dots1ForCausalLM": Family(
        "dots1",
        attention_bias=None,
        qk_norm=True,
        windows=_dots_windows,
        experts=Mixture(
            share=False,
            sigmoid=True,
            biased=True,
            inner="moe_intermediate_size",
            dense=first_dense(0),
            shared=shared_experts("n_shared_experts", 0),
        ),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5moe",
        kv_heads=4,
        tied=True,
        theta=500000.0,
        neighbours=True,
        experts=Mixture(
            biased=True,
            inner="moe_intermediate_size",
            dense=ernie_dense,
            shared=shared_experts("moe_num_shared_experts", 2),
        ),
        fixed={"use_bias": False, "moe_norm_min": 1e-12},
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek2",
        latent=True,
        experts=Mixture(
            share=False,
            inner="moe_intermediate_size",
            dense=first_dense(0),
            shared=shared_experts("n_shared_experts", 2),
        ),
        fixed={"norm_topk_prob": False},
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek3",
        latent=True,
        experts=Mixture(dense=listed_dense(3), **_DEEPSEEK3),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4moelite",
        latent=True,
        experts=Mixture(dense=listed_dense(1), **_DEEPSEEK3),
    ),
    "YoutuForCausalLM": Family("youtu", latent=True, tied=True),
    MINICPM: Family("minicpm3", latent=True, tied=True, multipliers=True),
    "MixtralForCausalLM": Family(
        "mixtral", windows=_whole_window, kv_heads=8, theta=1e6, experts=Mixture()
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        attention_bias=None,
        multipliers=True,
        experts=Mixture(shared=shared_width("shared_intermediate_size", 0)),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        "granitemoeshared",
        attention_bias=None,
        multipliers=True,
        experts=Mixture(shared=shared_width("shared_intermediate_size", 0)),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        attention_bias=None,
        mlp_bias=True,
        sinks=True,
        windows=_oss_windows,
        kv_heads=8,
        head_dim=64,
        theta=150000.0,
        activation="clamped",
        experts=Mixture(),
    ),
    "Lfm2ForCausalLM": Family("lfm2", **_LFM2),
    "Lfm2MoeForCausalLM": Family(
        "lfm2moe",
        **_LFM2,
        experts=Mixture(
            sigmoid=True, biased=True, inner="moe_intermediate_size", dense=first_dense(2)
        ),
        fixed={"use_expert_bias": True},
    ),
    "Qwen3_5ForCausalLM": Family("qwen3_5", **_QWEN35, kv_heads=4),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5moe",
        **_QWEN35,
        kv_heads=2,
        experts=Mixture(
            inner="moe_intermediate_size",
            shared=shared_width("shared_expert_intermediate_size", 512),
            gated=True,
        ),
    ),
    "GraniteForCausalLM": Family("granite", attention_bias=None, mlp_bias=None, multipliers=True),
    "GraniteMoeHybridForCausalLM": _GRANITE4,
    GRANITE_PARTED: replace(_GRANITE4, name="granitehybrid"),
    NEMOTRON: Family(
        "nemotron_h",
        recurrent=read_scans,
        rope_layers=no_ropes,
        kv_heads=8,
        head_dim=128,
        activation=RELU2,
        more=read_alone,
        experts=Mixture(
            sigmoid=True,
            biased=True,
            inner="moe_intermediate_size",
            dense=nemotron_dense,
            shared=shared_width("moe_shared_expert_intermediate_size", 7688),
            optional=True,
        ),
        fixed={"attention_bias": False, "mlp_bias": False, "mamba_hidden_act": "silu"}
        | dict.fromkeys(("moe_latent_size", "sliding_window", "final_logit_softcapping")),
    ),
    FALCON: Family(
        "falcon_h1",
        kv_heads=8,
        recurrent=read_beside,
        more=read_multipliers,
        fixed=dict.fromkeys(
            ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False
        ),
    ),
    "Phi3ForCausalLM": Family("phi3", windows=_whole_window, partial=1.0),
    "Glm4ForCausalLM": Family(
        "glm4",
        attention_bias=None,
        output_bias=False,
        kv_heads=2,
        head_dim=128,
        partial=0.5,
        neighbours=True,
        branch_norms=True,
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        kv_heads=2,
        head_dim=128,
        tied=True,
        theta=500000.0,
        neighbours=True,
        fixed={"use_bias": False},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        attention_bias=None,
        mlp_bias=None,
        windows=_smollm_windows,
        rope_layers=_smollm_ropes,
        kv_heads=4,
        tied=True,
        theta=2e6,
    ),
    "ApertusForCausalLM": Family(
        "apertus",
        attention_bias=None,
        qk_norm=True,
        theta=12e6,
        activation=XIELU,
        fixed={"qk_norm": True, "post_norm": False, "mlp_bias": False},
    ),
    "Olmo2ForCausalLM": Family("olmo2", **_OLMO),
    "Olmo3ForCausalLM": Family(
        "olmo3", **_OLMO, windows=_olmo_windows, local_rope="rope_theta", theta=500000.0
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        attention_bias=None,
        qk_norm=True,
        qk_norm_of=ROWS,
        experts=Mixture(share=False),
        fixed={"clip_qkv": None},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        qk_norm=True,
        windows=_exaone_windows,
        rope_layers=_exaone_ropes,
        pre_norms=False,
        branch_norms=True,
    ),
    "CohereForCausalLM": Family("cohere", **_COHERE, theta=500000.0, fixed={"use_qk_norm": False}),
    "Cohere2ForCausalLM": Family(
        "cohere2", **_COHERE, windows=_cohere_windows, rope_layers=_cohere_ropes
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        attention_bias=True,
        mlp_bias=None,
        kv_heads=8,
        head_dim=128,
        fixed={"attention_bias": True, "attention_out_bias": False},
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan", attention_bias=None, qk_norm=True, qk_norm_of=TURNED
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuanmoe",
        attention_bias=None,
        qk_norm=True,
        qk_norm_of=TURNED,
        experts=Mixture(shared=one_shared),
        fixed={"use_cla": False},
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        attention_bias=None,
        windows=_oss_windows,
        kv_heads=4,
        head_dim=256,
        tied=True,
        activation="gelu_tanh",
        query_scalar=True,
        caps=(50.0, 30.0),
        branch_norms=True,
        norm_offset=1.0,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        attention_bias=None,
        qk_norm=True,
        windows=_gemma_windows,
        local_rope=LOCAL_BASE,
        kv_heads=4,
        head_dim=256,
        tied=True,
        theta=1e6,
        activation="gelu_tanh",
        query_scalar=True,
        branch_norms=True,
        norm_offset=1.0,
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    UNIFIED: _GEMMA4,
}
