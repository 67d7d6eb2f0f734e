"""Rotary embedding: the rope part of a config.json to a RopeSpec, and a RopeSpec to its tables.

The arithmetic follows transformers' in float32 step by step, since at position 100 000 one rounding
of a frequency is already a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from dovetail.compiler.config import Config
from dovetail.ir.errors import SpecError
from dovetail.ir.model import RopeSpec

F32 = npt.NDArray[np.float32]
MIN_THETA, MAX_THETA = 1.001, 1e12
MAX_FACTOR = 1e6
MAX_POSITION = 1 << 27


def read_rope(config: Config, head_dim: int, max_position: int) -> RopeSpec:
    """Return the rope of a config: `rope_parameters`, or the older `rope_theta` + `rope_scaling`.

    Raises SpecError for kinds this product does not compute (longrope, per-layer ropes, partial
    rotation).
    """
    given = [key for key in ("rope_parameters", "rope_scaling") if config.has(key)]
    rope = config.section(given[0]) if given else Config(config.name, {})
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise SpecError(f"{rope.name} differs between layer types, which is not supported")
    for place in (config, rope):
        if place.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise place.fail("partial_rotary_factor", "but only 1 is supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    theta = 10000.0
    for place in (config, rope):  # the latter stands; what a newer version passes over must be fit
        theta = place.number("rope_theta", MIN_THETA, MAX_THETA, theta)
    if kind not in _READERS:
        known = ", ".join(_READERS)
        raise SpecError(f"{rope.name}: rope type {kind!r} is not supported; supported: {known}")
    return _READERS[kind](rope, RopeSpec(kind=kind, theta=theta, rotary_dim=head_dim), max_position)


def usable_positions(rope: RopeSpec, max_position: int) -> int:
    """Return the positions a model may use: YaRN stretches its original context by its factor."""
    if rope.kind != "yarn":
        return max_position
    return min(MAX_POSITION, max(max_position, int(rope.original_max_position * rope.factor)))


def rope_tables(rope: RopeSpec, positions: int) -> tuple[F32, F32]:
    """Return cos and sin, each float32 [positions][rotary_dim / 2], attention scaling included."""
    frequencies = inverse_frequencies(rope)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    scale = np.float32(1.0 if rope.attention_factor is None else rope.attention_factor)
    return np.cos(angles) * scale, np.sin(angles) * scale


def inverse_frequencies(rope: RopeSpec) -> F32:
    """Return the float32 angle per position of each of the rotary_dim / 2 pairs."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / powers
    return _SCALERS[rope.kind](rope, plain) if rope.kind in _SCALERS else plain


# ---- reading ----


def _read_factor(rope: Config, spec: RopeSpec, _max_position: int) -> RopeSpec:
    return replace(spec, factor=rope.number("factor", 1.0, MAX_FACTOR))


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
    elif rope.has("mscale") and rope.has("mscale_all_dim"):
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


_READERS: dict[str, Callable[[Config, RopeSpec, int], RopeSpec]] = {
    "default": lambda _rope, spec, _max_position: spec,
    "linear": _read_factor,
    "dynamic": _read_factor,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def _original_positions(rope: Config, max_position: int) -> int:
    return rope.integer("original_max_position_embeddings", 1, MAX_POSITION, max_position)


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


_SCALERS: dict[str, Callable[[RopeSpec, F32], F32]] = {
    "linear": lambda rope, plain: plain / np.float32(rope.factor),
    "llama3": _scale_llama3,
    "ntk": _scale_ntk,
    "yarn": _scale_yarn,
}
