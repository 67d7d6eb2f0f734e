"""Dimensions of well-known models, for planning without a checkpoint.

In: a name such as `llama-3-8b`. Out: a ModelSpec (figures from the models' published config.json).
"""

from __future__ import annotations

from typing import Any

from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import ModelSpec, RopeSpec

_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "n_layers"),
    *("n_heads", "n_kv_heads", "head_dim", "max_position"),
)
_MODELS: dict[str, tuple[int, int, int, int, int, int, int, int]] = {
    "llama-160m": (32000, 768, 3072, 12, 12, 12, 64, 2048),
    "sheared-llama-1.3b": (32000, 2048, 5504, 24, 16, 16, 128, 4096),
    "tinyllama": (32000, 2048, 5632, 22, 32, 4, 64, 2048),
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8, 128, 8192),
    "llama-3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64, 131072),
    "llama-3.2-3b": (128256, 3072, 8192, 28, 24, 8, 128, 131072),
    "llama-3-70b": (128256, 8192, 28672, 80, 64, 8, 128, 8192),
}

PRESETS = tuple(_MODELS)
"""Names that `preset_model` knows."""


def preset_model(name: str, *, weight_dtype: str = "bf16", kv_dtype: str = "f32") -> ModelSpec:
    """Return the dimensions of a model by name.

    Raises:
        SpecError: no such name (all are listed), or weights of no known format.
    """
    if weight_dtype not in FORMATS:
        known = " or ".join(FORMATS)
        raise SpecError(f"weight dtype {weight_dtype!r} is not supported; choose {known}")
    found = _MODELS.get(name.lower())
    if found is None:
        raise SpecError(f"unknown model {name!r}; known without files: {', '.join(PRESETS)}")
    figures: dict[str, Any] = dict(zip(_FIELDS, found, strict=True))
    return ModelSpec(
        family="llama",
        **figures,
        max_context=figures["max_position"],
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=figures["head_dim"]),
        weight_dtype=weight_dtype,
        checkpoint_dtype="bf16",
        kv_dtype=kv_dtype,
    )
