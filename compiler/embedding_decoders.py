"""Decoders that embed: their configuration, read as that of the model that generates.

In: config.json of a folder of sentence-transformers. Out: a ModelSpec of the layers, and what a row
sees. Without modules.json such a model is one that generates.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dovetail.compiler.config import Config
from dovetail.compiler.families import FAMILIES
from dovetail.compiler.model_spec import read_architecture
from dovetail.ir.errors import SpecError

_STEMS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")
EMBEDDING_DECODERS = {
    f"{stem}{suffix}": FAMILIES[f"{stem}ForCausalLM"]
    for stem in _STEMS
    for suffix in ("TextModel" if stem == "Gemma3" else "Model", "ForCausalLM")
}
"""Architecture of config.json -> family, of which the base model is saved, too."""
_GEMMA_BOTH, _BOTH = "use_bidirectional_attention", "is_causal"
"""Keys that tell whether rows see later ones: Gemma's, and that of other authors' code."""


def read_decoder(config: Config, dtypes: tuple[str, str], max_tokens: int) -> dict[str, Any]:
    """Return the fields of an EncoderSpec that its layers decide.

    dtypes: of the packed weights and of the checkpoint's. Raises SpecError as `read_model_spec`.
    """
    _, family = config.architecture(EMBEDDING_DECODERS, "a supported encoder")
    if config.has("quantization_config"):
        raise config.fail("quantization_config", "but quantized encoders are not supported")
    packed, stored = dtypes
    plain = Config(config.name, {k: v for k, v in config.values.items() if k != _GEMMA_BOTH})
    found = read_architecture(plain, family, stored, packed, max_context=max_tokens)
    causal = config.flag(_BOTH, True) and not config.flag(_GEMMA_BOTH)
    window = found.sliding_window
    if window == 1 or (window and not config.flag(_BOTH, True)):
        raise SpecError(f"{config.name}: a sliding window of {window} is not supported here")
    return {
        **{name: getattr(found, name) for name in _SHARED},
        "decoder": replace(found, tied_head=False),
        "gated": True,
        "norm_first": True,
        "positions": "rotary",
        "causal": causal,
        "local_layers": tuple(found.layer_window(i) > 0 for i in range(found.n_layers)),
        "reach": window - 1 if causal and window else window // 2,
        "max_tokens": max_tokens,
    }


_SHARED = (
    *("family", "vocab_size", "hidden_size", "intermediate_size", "n_layers", "n_heads"),
    *("head_dim", "norm_eps", "activation", "rope", "local_rope"),
    *("weight_dtype", "checkpoint_dtype"),
)
"""Fields that both specs have."""
