"""Rotary embedding: the rope part of a config.json to a RopeSpec, and a RopeSpec to its tables.

The arithmetic follows transformers' in float32 step by step, since at position 100 000 one rounding
of a frequency is already a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError
from dovetail.ir.model import RopeSpec, rope_names

F32 = npt.NDArray[np.float32]
MIN_THETA, MAX_THETA = 1.001, 1e12
MAX_FACTOR = 1e6
MAX_POSITION = 1 << 27
FULL, SLIDING = "full_attention", "sliding_attention"
"""Layers without a window and with one, as config.json calls them."""
LOCAL_BASE = "rope_local_base_freq"
SCORES_GROW = "llama_4_scaling_beta"
"""By how much scores grow with the logarithm of a position behind the original context."""


def read_rope(
    config: Config,
    head_dim: int,
    max_position: int,
    max_context: int | None = None,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    per_layer: bool = False,
) -> RopeSpec:
    """Return the rope of a config: `rope_parameters`, or the older `rope_theta` + `rope_scaling`.

    max_context: positions that will be used, None for all. theta: the base where none is told.
    partial: the part of each head that it turns, unless it is told; None: always all of it.
    per_layer: layers with a window have a rope of their own (`read_local_rope`). Raises SpecError
    for what this product does not compute.
    """
    places = [config, _section(config)]
    if any(isinstance(value, dict) for value in places[1].values.values()):
        if not per_layer:
            raise SpecError(f"{places[1].name} differs between layer types, which is not supported")
        places[1] = places[1].section(FULL)
    for place in places:  # the latter stands; what a newer version passes over must be fit
        theta = place.number("rope_theta", MIN_THETA, MAX_THETA, theta)
    share = turned_share(config, partial)
    spec = RopeSpec(theta=theta, rotary_dim=int(head_dim * share + 1e-6))
    if spec.rotary_dim < 2 or spec.rotary_dim % 2:
        raise SpecError(
            f"{config.name}: partial_rotary_factor {share:g} turns {spec.rotary_dim} of the "
            f"{head_dim} values of a head, but must turn an even number of them"
        )
    return _read(places[1], config, spec, max_position, max_context)


def turned_share(config: Config, partial: float | None) -> float:
    """Return the part of each head that a rope turns; `partial` as of `read_rope`."""
    share = 1.0 if partial is None else partial
    for place in (config, _section(config)):
        share = place.number("partial_rotary_factor", 0.0, 1.0, share)
        if share != 1.0 and partial is None:
            raise place.fail("partial_rotary_factor", "but only 1 is supported")
    return share


def read_local_rope(
    config: Config, head_dim: int, max_position: int, base: str, theta: float
) -> RopeSpec:
    """Return the rope of layers with a window (Gemma 3, OLMo 3), of which nothing is scaled.

    base: what older files call its base, which is `theta` where none is told, but Gemma's 10000.
    """
    usual = 10000.0 if base == LOCAL_BASE else theta
    if config.has("rope_parameters"):
        rope, base = config.section("rope_parameters").section(SLIDING), "rope_theta"
    else:
        rope = Config(config.name, {**config.values, "rope_type": "default"})
    theta = rope.number(base, MIN_THETA, MAX_THETA, usual)
    return _read(rope, config, RopeSpec(theta=theta, rotary_dim=head_dim), max_position, None)


def _section(config: Config) -> Config:
    """Return what a rope is told by; SpecError where two places tell different things.

    transformers takes the older place alone, and what config.json itself has of the newer one.
    """
    told = [config.section(key) for key in _PLACES if config.values.get(key)]
    if told[1:]:
        newer, older = (
            {"rope_type" if key == "type" else key: value for key, value in place.values.items()}
            for place in told
        )
        beside = {k: v for k, v in newer.items() if k not in older and config.values.get(k) == v}
        if newer != older | beside:
            differs = f"but {_PLACES[0]} is there, too, and differs; write all of it there alone"
            raise config.fail(_PLACES[1], differs)
    return (*told, Config(config.name, {}))[0]


_PLACES = ("rope_parameters", "rope_scaling")


def _read(
    rope: Config, config: Config, spec: RopeSpec, max_position: int, max_context: int | None
) -> RopeSpec:
    kind, original = rope.text("rope_type", rope.text("type", "default")), _ORIGINAL
    if config.has(original):  # it goes first
        rope = Config(rope.name, {**rope.values, original: config.values[original]})
    if kind == "su" or rope.has("long_factor"):  # its names in the first files of Phi-3
        kind = "longrope"
    if kind == "longrope":
        return _read_longrope(rope, spec, max_position, max_context)
    if kind not in _READERS:
        known = ", ".join((*_READERS, "longrope"))
        raise SpecError(f"{rope.name}: rope type {kind!r} is not supported; supported: {known}")
    return _READERS[kind](rope, replace(spec, kind=kind), max_position)


def usable_positions(config: Config, rope: RopeSpec, max_position: int) -> int:
    """Return the positions a model may use: YaRN stretches its original context by its factor.

    Of Ministral 3 it is the original context: behind it scores are scaled, which is not computed.
    """
    if rope.kind != "yarn":
        return max_position
    if _section(config).number(SCORES_GROW, 0.0, 1.0, 0.0):
        return rope.original_max_position
    return min(MAX_POSITION, max(max_position, int(rope.original_max_position * rope.factor)))


def named_tables(ropes: Mapping[str, RopeSpec], positions: int) -> dict[str, F32]:
    """Return the tables of ropes, as `rope_names` calls them."""
    tables: dict[str, F32] = {}
    for name, rope in ropes.items():
        tables |= zip(rope_names(name), rope_tables(rope, positions), strict=True)
    return tables


def rope_tables(rope: RopeSpec, positions: int) -> tuple[F32, F32]:
    """Return cos and sin, each float32 [positions][rotary_dim / 2], attention scaling included."""
    frequencies = inverse_frequencies(rope)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    scale = np.float32(1.0 if rope.attention_factor is None else rope.attention_factor)
    return np.cos(angles) * scale, np.sin(angles) * scale


def inverse_frequencies(rope: RopeSpec) -> F32:
    """Return the float32 angle per position of each of the rotary_dim / 2 pairs."""
    width = np.float32(rope.span or rope.rotary_dim)
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / width
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / powers
    return _SCALERS[rope.kind](rope, plain) if rope.kind in _SCALERS else plain


# ---- reading ----


def _read_factor(rope: Config, spec: RopeSpec, _max_position: int) -> RopeSpec:
    return replace(spec, factor=rope.number("factor", 1.0, MAX_FACTOR))


def _read_dynamic(rope: Config, spec: RopeSpec, max_position: int) -> RopeSpec:
    """Hunyuan gives this name, and `alpha`, to a base that is stretched once."""
    if not rope.has("alpha"):
        return _read_factor(rope, spec, max_position)
    alpha, size = rope.number("alpha", 1.0, MAX_FACTOR), spec.rotary_dim
    theta = spec.theta * alpha ** (size / (size - 2)) if size > 2 else spec.theta
    return replace(spec, kind="default", theta=theta)


def _read_llama3(rope: Config, spec: RopeSpec, max_position: int) -> RopeSpec:
    low = rope.number("low_freq_factor", 1e-6, MAX_FACTOR)
    high = rope.number("high_freq_factor", 1e-6, MAX_FACTOR)
    if high <= low:
        raise rope.fail("high_freq_factor", f"but must be larger than low_freq_factor {low:g}")
    return replace(
        spec,
        factor=rope.number("factor", 1.0, MAX_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_original_positions(rope, max_position),
    )


def _read_yarn(rope: Config, spec: RopeSpec, max_position: int) -> RopeSpec:
    original = _original_positions(rope, max_position)
    factor = rope.number("factor", 1.0, MAX_FACTOR, max(1.0, max_position / original))
    if rope.has("attention_factor"):
        attention = rope.number("attention_factor", 1e-6, MAX_FACTOR)
    elif all(map(rope.values.get, ("mscale", "mscale_all_dim"))):  # 0 stands for none
        scales = (rope.number(key, 1e-6, MAX_FACTOR) for key in ("mscale", "mscale_all_dim"))
        attention = math.prod(
            _yarn_scale(factor, m) ** sign for m, sign in zip(scales, (1, -1), strict=True)
        )
    else:
        attention = _yarn_scale(factor, 1.0)
    return replace(
        spec,
        factor=factor,
        original_max_position=original,
        attention_factor=attention,
        beta_fast=rope.number("beta_fast", 1e-6, MAX_FACTOR, 32.0),
        beta_slow=rope.number("beta_slow", 1e-6, MAX_FACTOR, 1.0),
        truncate=rope.flag("truncate", True),
    )


def _read_longrope(
    rope: Config, spec: RopeSpec, max_position: int, max_context: int | None
) -> RopeSpec:
    """Each frequency has a divisor: one for contexts as in training, one for longer ones.

    As tables are made once, `max_context` decides (as in vLLM and llama.cpp).
    """
    original = rope.integer(_ORIGINAL, 2, MAX_POSITION, max(2, max_position))
    factor = rope.number("factor", 1.0, MAX_FACTOR, max(1.0, max_position / original))
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    longer = min(max_context or max_position, max_position) > original
    key = "long_factor" if longer else "short_factor"
    divisors = rope.values.get(key)
    if (
        not isinstance(divisors, list)
        or len(divisors) != spec.rotary_dim // 2
        or not all(isinstance(d, int | float) and 0 < d <= MAX_FACTOR for d in divisors)
    ):
        raise rope.fail(key, f"but must be a list of {spec.rotary_dim // 2} divisors")
    return replace(
        spec,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.number("attention_factor", 1e-6, MAX_FACTOR, usual),
        divisors=tuple(map(float, divisors)),
    )


def _read_proportional(rope: Config, spec: RopeSpec, _max_position: int) -> RopeSpec:
    """Gemma 4: a part of the pairs of a head is turned, as slowly as if all were."""
    share = rope.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    turned = 2 * int(share * spec.rotary_dim // 2)
    if not turned:
        raise rope.fail("partial_rotary_factor", "but must turn some values of a head")
    factor = rope.number("factor", 1e-6, MAX_FACTOR, 1.0)
    return replace(spec, rotary_dim=turned, span=spec.rotary_dim, factor=factor)


_READERS: dict[str, Callable[[Config, RopeSpec, int], RopeSpec]] = {
    "default": lambda _rope, spec, _max_position: spec,
    "linear": _read_factor,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
    "yarn": _read_yarn,
}


def _original_positions(rope: Config, max_position: int) -> int:
    return rope.integer(_ORIGINAL, 1, MAX_POSITION, max_position)


_ORIGINAL = "original_max_position_embeddings"


def score_scale(config: Config, rope: RopeSpec) -> float:
    """Return by what YaRN multiplies scores, where `mscale_all_dim` is told (DeepSeek)."""
    scale = _section(config).number("mscale_all_dim", 0.0, 1e6, 0.0)
    return _yarn_scale(rope.factor, scale) ** 2 if scale else 1.0


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


# ---- scaling; `dynamic` equals `default` up to max_position, which requests cannot pass ----


def _scale_ntk(rope: RopeSpec, _plain: F32) -> F32:
    """Stretch the base, then all frequencies (Alibaba's GTE models)."""
    base = inverse_frequencies(replace(rope, kind="default", theta=rope.theta * rope.factor))
    return base / np.float32(rope.factor ** (2 / rope.rotary_dim))


def _scale_llama3(rope: RopeSpec, plain: F32) -> F32:
    low_wave = rope.original_max_position / rope.low_freq_factor
    high_wave = rope.original_max_position / rope.high_freq_factor
    wave = np.float32(2 * math.pi) / plain
    slowed = plain / np.float32(rope.factor)
    spread = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    smooth = (
        np.float32(rope.original_max_position) / wave - np.float32(rope.low_freq_factor)
    ) / spread
    blended = (1 - smooth) * plain / np.float32(rope.factor) + smooth * plain
    kept: F32 = np.where(wave < high_wave, plain, blended)
    return np.where(wave > low_wave, slowed, kept)


def _scale_yarn(rope: RopeSpec, plain: F32) -> F32:
    low, high = (_correction_dim(rope, beta) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    slowed = np.float32(1.0) / (np.float32(rope.factor) * (np.float32(1.0) / plain))
    scaled: F32 = slowed * (1 - kept) + plain * kept
    return scaled


def _correction_dim(rope: RopeSpec, rotations: float) -> float:
    turns = rope.original_max_position / (rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))


def _scale_longrope(rope: RopeSpec, plain: F32) -> F32:
    divisors: F32 = np.array(rope.divisors, np.float32)
    return plain / divisors


_SCALERS: dict[str, Callable[[RopeSpec, F32], F32]] = {
    **dict.fromkeys(
        ("linear", "proportional"), lambda rope, plain: plain / np.float32(rope.factor)
    ),
    "llama3": _scale_llama3,
    "longrope": _scale_longrope,
    "ntk": _scale_ntk,
    "yarn": _scale_yarn,
}
