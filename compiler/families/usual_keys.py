"""What absent keys of config.json stand for, in families that differ from most.

In: a config.json, the name of a family. Out: the same with these keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.compiler.files.config import Config

_EPS = {"rms_norm_eps": 1e-5}
_WINDOW = {"sliding_window": 4096}
_USUAL: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(("apertus", "minicpm3", "ministral3", "mixtral"), _EPS),
    **dict.fromkeys(("ernie4_5", "ernie4_5moe", "falcon_h1", "glm4moe", "nemotron_h"), _EPS),
    **dict.fromkeys(("hunyuan", "hunyuanmoe", "olmo2", "olmo3", "olmoe"), _EPS),
    **dict.fromkeys(("dots1", "gemma2", "mistral"), _WINDOW),
    "exaone4": {**_EPS, **_WINDOW},
    "glm4": {"rms_norm_eps": 1.5625e-07},
    "glm4moelite": {**_EPS, "routed_scaling_factor": 1.8},
    "gpt_oss": {**_EPS, "sliding_window": 128},
    "phi3": {**_EPS, "original_max_position_embeddings": 4096},
    "deepseek3": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
}
_SCALED = ("apertus", "gemma4", "gpt_oss", "ministral3")
"""Families whose ropes are always scaled: config.json must say how."""


def with_usual_keys(config: Config, family: str) -> Config:
    """Return a configuration with the keys that transformers' class of the family gives it.

    Raises SpecError where a scaled rope is not told.
    """
    if family in _SCALED and not config.has("rope_scaling"):
        config.section("rope_parameters")
    return Config(config.name, {**_USUAL.get(family, {}), **config.values})
