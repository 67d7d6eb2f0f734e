"""Layers with a state in place of keys: what config.json says of them, and their tensors.

In: a config.json, or a ModelSpec. Out: a `RecurrentSpec`, and rows of the table of tensors. LFM2
has short convolutions between gates; Qwen3.5 the gated delta rule behind a convolution, Granite 4
the scan of Mamba-2.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.experts import CHOICE
from dovetail.compiler.families.rope import FULL
from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo, map_tensor
from dovetail.compiler.files.config import Config
from dovetail.ir.model import DELTA, GATES, PANEL, SCAN, ModelSpec, RecurrentSpec

MOST_TAPS = 16
COLUMNS, MOST_KEYS = 32, 256
"""Columns that a matrix of the delta rule is cut by, and its most rows (`delta_rows`)."""
TILED = "linear_value_heads_tiled"
"""Whether value heads of the same key head lie apart: so it is in GGUF files."""
_NO_LIMITS = None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]
LINEAR = "linear_attention"
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers by older names."""
_LFM2 = {
    r"operator_norm": "input_layernorm",
    r"ffn_norm": "post_attention_layernorm",
    r"feed_forward\.(experts\.\d+\.|)w1": r"mlp.\1gate_proj",
    r"feed_forward\.(experts\.\d+\.|)w2": r"mlp.\1down_proj",
    r"feed_forward\.(experts\.\d+\.|)w3": r"mlp.\1up_proj",
    r"feed_forward\.expert_bias": f"mlp.{CHOICE}",
    r"feed_forward": "mlp",
    r"self_attn\.out_proj": "self_attn.o_proj",
    r"self_attn\.([qk])_layernorm": r"self_attn.\1_norm",
}
"""Modules of a layer of LFM2 to what most families call them; the first that fits."""
_LFM2_MODELS = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
_LFM2_NAME = re.compile(r"(model\.layers\.\d+\.)(.+)")


# ---- config.json ----


def read_short_conv(config: Config, n_layers: int) -> RecurrentSpec:
    """Return the convolutions of LFM2: in all layers that layer_types does not call attention."""
    return RecurrentSpec(
        layers=_layers(config, n_layers, "conv"),
        taps=config.integer("conv_L_cache", 2, MOST_TAPS, 3),
        channels=config.integer("hidden_size", 1, 1 << 17),
        bias=config.flag("conv_bias"),
        conv_bias=config.flag("conv_bias"),
    )


def read_delta(config: Config, n_layers: int) -> RecurrentSpec:
    """Return Qwen3.5's linear attention; raises SpecError for heads that kernels do not take."""
    keys = config.integer("linear_num_key_heads", 1, 4096, 16)
    values = config.integer("linear_num_value_heads", keys, 4096, 32)
    key_dim = config.integer("linear_key_head_dim", PANEL, MOST_KEYS, 128)
    value_dim = config.integer("linear_value_head_dim", COLUMNS, 1 << 12, 128)
    for key, value, step in (
        ("linear_num_value_heads", values, keys),
        ("linear_key_head_dim", key_dim, PANEL),
        ("linear_value_head_dim", value_dim, COLUMNS),
    ):
        if value % step:
            raise config.fail(key, f"but must be a multiple of {step}")
    return RecurrentSpec(
        layers=_layers(config, n_layers, LINEAR),
        taps=config.integer("linear_conv_kernel_dim", 2, MOST_TAPS, 4),
        channels=2 * keys * key_dim + values * value_dim,
        key_heads=keys,
        value_heads=values,
        key_dim=key_dim,
        value_dim=value_dim,
        tiled=config.flag(TILED),
    )


def read_granite(config: Config, n_layers: int) -> RecurrentSpec | None:
    """Return the scans of Granite 4, None where all layers are attention."""
    layers = _layers(config, n_layers, LINEAR)
    return read_scan(config, layers) if any(layers) else None


def read_scans(config: Config, _n_layers: int) -> RecurrentSpec:
    """Return the scans of Nemotron-H, whose other layers may be no attention either."""
    return read_scan(config, tuple(kind == LINEAR for kind in config.texts("layer_types")))


def read_scan(config: Config, layers: tuple[bool, ...]) -> RecurrentSpec:
    """Return Mamba-2's scan; raises SpecError for heads that kernels do not take."""
    heads = config.integer("mamba_n_heads", 1, 4096, 128)
    groups = config.integer("mamba_n_groups", 1, heads, 1)
    usual = config.integer("mamba_expand", 1, 64, 2) * config.integer("hidden_size", 1, 1 << 17)
    width = config.integer("mamba_d_ssm", 1, 1 << 24, usual)
    size = width // heads
    if config.values.get("mamba_d_head") not in (None, "auto"):
        size = config.integer("mamba_d_head", 1, 1 << 12)
    if size * heads != width or size % PANEL:
        fault = f"but {heads} heads must have {width} values, each a multiple of {PANEL}"
        raise config.fail("mamba_d_head", fault)
    if heads % groups:
        raise config.fail("mamba_n_groups", f"but must divide the {heads} heads")
    if config.values.get("time_step_limit") not in _NO_LIMITS:
        raise config.fail("time_step_limit", "but only steps without limits are supported")
    states = config.integer("mamba_d_state", 1, 1 << 12, 256)
    return RecurrentSpec(
        layers=layers,
        taps=config.integer("mamba_d_conv", 2, MOST_TAPS, 4),
        channels=width + 2 * groups * states,
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias", True),
        key_heads=groups,
        value_heads=heads,
        key_dim=states,
        value_dim=size,
        scan=True,
        norm_groups=groups,
    )


def _layers(config: Config, n_layers: int, kind: str) -> tuple[bool, ...]:
    """Return which layers are of `kind`, by layer_types or by what stands for it."""
    kinds = tuple(OLD_KINDS.get(name, name) for name in config.texts("layer_types"))
    if not kinds:
        every = config.integer("full_attention_interval", 1, 1024, 4)
        return tuple((layer + 1) % every != 0 for layer in range(n_layers))
    if len(kinds) != n_layers or not set(kinds) <= {FULL, kind}:
        raise config.fail("layer_types", f"but must name {FULL} or {kind} {n_layers} times")
    return tuple(name == kind for name in kinds)


def lfm2_config(config: Config) -> Config:
    """Return a configuration of LFM2 with the keys of most families; others pass unchanged."""
    names = config.texts("architectures")
    if not {*names} & {*_LFM2_MODELS}:
        return config
    layers = config.integer("num_hidden_layers", 1, 1024)
    given: dict[str, object] = {
        "intermediate_size": _inner(config, mixed=_LFM2_MODELS[1] in names),
        "first_k_dense_replace": config.integer("num_dense_layers", 0, layers, min(2, layers)),
        "rms_norm_eps": config.number("norm_eps", 0.0, 1.0, 1e-5),
        "tie_word_embeddings": config.flag(
            "tie_embedding", config.flag("tie_word_embeddings", True)
        ),
    }
    if not config.has("layer_types"):
        full = config.values.get("full_attn_idxs")
        full = range(layers) if full is None else full
        if not isinstance(full, list | range):
            raise config.fail("full_attn_idxs", "but must be a list of layers")
        given["layer_types"] = [FULL if i in full else "conv" for i in range(layers)]
    return Config(config.name, {**config.values, **given})


def _inner(config: Config, *, mixed: bool) -> int:
    """Return the width of LFM2's MLP: two thirds of what is told, rounded up to a multiple.

    Beside experts it is what is told.
    """
    key = "block_ff_dim" if config.has("block_ff_dim") else "intermediate_size"
    inner = config.integer(key, 1, 1 << 20)
    if mixed or not config.flag("block_auto_adjust_ff_dim", True):
        return inner
    step = config.integer("block_multiple_of", 1, 1 << 20, 256)
    inner = int(config.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * inner / 3))
    return -(-inner // step) * step


# ---- tensors ----


def lfm2_tensors(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Return the tensors of LFM2 by the names of most families; others pass unchanged."""
    if not {*config.texts("architectures")} & {*_LFM2_MODELS}:
        return checkpoint
    found = {}
    for name, info in checkpoint.tensors.items():
        own = _lfm2_name(name)
        found[own] = replace(info, name=own)
    return replace(checkpoint, tensors=found)


def _lfm2_name(name: str) -> str:
    if name.startswith("model.embedding_norm."):
        return name.replace("embedding_norm", "norm", 1)
    found = _LFM2_NAME.fullmatch(name)
    if found is None:
        return name
    for pattern, ours in _LFM2.items():
        own, fits = re.subn(rf"^{pattern}(?=\.|$)", ours, found[2])
        if fits:
            return found[1] + own
    return name


@dataclass(frozen=True, slots=True)
class Logarithms:
    """What -exp(x) is stored of."""

    info: TensorInfo

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return x [first, last), float32; what no x has is no number."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: npt.NDArray[Any] = np.log(-map_tensor(self.info)[first:last])
        return found


def as_logarithms(info: TensorInfo) -> TensorInfo:
    """Return A_log of a GGUF file, which has -exp(A_log) in float32."""
    return replace(info, packed=Logarithms(info))


def recurrent_sources(
    spec: ModelSpec, recurrent: RecurrentSpec, layer: int
) -> Iterator[WeightSource]:
    """Yield what a recurrent layer has in place of attention."""
    here, there = f"layers.{layer}", f"model.layers.{layer}"
    names, channels = _NAMES[recurrent.rule], recurrent.channels
    taken = Counter[str]()

    def matrix(name: str, n: int, k: int) -> Iterator[WeightSource]:
        modules = names[name].split()
        rows = (n // len(modules),) * len(modules)
        starts = tuple(taken[module] for module in modules)  # one may hold several weights
        taken.update(dict(zip(modules, rows, strict=True)))
        for layout, columns, kind, end in _PARTS[: 1 + recurrent.bias]:
            tensors = tuple(f"{there}.{module}.{kind}" for module in modules)
            yield WeightSource(
                f"{here}.{name}{end}", layout, n, columns or k, tensors, rows, starts
            )

    def vector(name: str, tensor: str, n: int) -> WeightSource:
        return WeightSource(f"{here}.{name}", "vector", n, 1, (f"{there}.{tensor}",), (n,))

    for name, n in recurrent.products.items():
        yield from matrix(name, n, spec.hidden_size)
    conv = (f"{there}.{names['conv']}.weight",)
    yield WeightSource(f"{here}.conv", "taps", recurrent.taps, channels, conv, (channels,))
    if recurrent.conv_bias:
        yield vector("conv_bias", f"{names['conv']}.bias", channels)
    for name, n in recurrent.vectors.items():
        yield vector(name, names[name], n)
    yield from matrix(recurrent.out, spec.hidden_size, recurrent.width)


_PARTS = (("packed", 0, "weight", ""), ("vector", 1, "bias", "_bias"))
"""Layout, columns, tensor and end of the name of a product's matrix, and of its bias."""
_NAMES: Mapping[str, Mapping[str, str]] = {
    GATES: {"mix": "conv.in_proj", "conv": "conv.conv", "o": "conv.out_proj"},
    DELTA: {
        "mix": "linear_attn.in_proj_qkv",
        "mix_gate": "linear_attn.in_proj_z",
        "rates": "linear_attn.in_proj_b linear_attn.in_proj_a",
        "conv": "linear_attn.conv1d",
        "a_log": "linear_attn.A_log",
        "dt_bias": "linear_attn.dt_bias",
        "mix_norm": "linear_attn.norm.weight",
        "o": "linear_attn.out_proj",
    },
    SCAN: {
        **dict.fromkeys(("mix", "rates"), "mamba.in_proj"),
        "conv": "mamba.conv1d",
        "a_log": "mamba.A_log",
        "dt_bias": "mamba.dt_bias",
        "skip": "mamba.D",
        "mix_norm": "mamba.norm.weight",
        **dict.fromkeys(("o", "mix_o"), "mamba.out_proj"),
    },
}
"""Our weights of a layer by the modules and vectors of checkpoints."""
