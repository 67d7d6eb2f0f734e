"""Decoders that embed: their configuration, read as that of the model that generates.

In: config.json and tokenizer of a folder of sentence-transformers. Out: a ModelSpec of the layers,
what a row sees, and how texts end. Without modules.json such a model is one that generates.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from dovetail.compiler.families.decoders import FAMILIES
from dovetail.compiler.families.encoders import LABELLED
from dovetail.compiler.files.config import Config
from dovetail.compiler.models.source import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelSource,
    end_ids,
    read_json,
)
from dovetail.compiler.models.spec import read_architecture

_STEMS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")
EMBEDDING_DECODERS = {
    name: FAMILIES[f"{stem}ForCausalLM"]
    for stem in _STEMS
    for text in ("Text" if stem == "Gemma3" else "",)
    for name in (f"{stem}{text}Model", f"{stem}ForCausalLM", f"{stem}{text}{LABELLED}")
}
"""Architecture of config.json -> family, of which the base model and classifiers are saved, too."""
_BOTH = "use_bidirectional_attention"
"""Gemma's key for rows that see later ones; the code of other authors has is_causal for that."""


def read_decoder(config: Config, dtypes: tuple[str, str], max_tokens: int) -> dict[str, Any]:
    """Return the fields of an EncoderSpec that its layers decide.

    dtypes: of the packed weights and of the checkpoint's. Raises SpecError as `read_model_spec`.
    """
    _, family = config.architecture(EMBEDDING_DECODERS, "a supported encoder")
    (packed, stored), causal, plain = dtypes, config.flag("is_causal", True), config
    if family.name == "gemma3" and config.flag(_BOTH):
        causal, plain = False, Config(config.name, {**config.values, _BOTH: False})
    found = read_architecture(plain, family, stored, packed, max_context=max_tokens)
    window = found.sliding_window
    if window == 1 or (window and not causal and plain is config):
        raise config.fail("sliding_window", "but must be at least 2, and with is_causal false null")
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


def read_ending_tokenizer(source: ModelSource) -> bytes | None:
    """Return tokenizer.json, which ends texts where only tokenizer_config.json says so.

    Rows of end tokens stand for texts, and transformers puts them there when it loads a tokenizer.
    """
    data, settings = source.file(TOKENIZER), read_json(source, TOKENIZER_CONFIG)
    found = read_json(source, TOKENIZER)
    if settings is None or found is None or not settings.flag("add_eos_token"):
        return data
    end = settings.values.get("eos_token")
    end, ids = end.get("content") if isinstance(end, dict) else end, end_ids(source)
    before = found.values.get("post_processor")
    if not ids or json.dumps(end) in json.dumps(before):
        return data
    steps = [] if before is None else before.get("processors", [before])
    if not any(step["type"] == _TEMPLATE for step in steps):
        one, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        none: dict[str, Any] = {"single": [one], "pair": [one, other], "special_tokens": {}}
        steps = [*steps, {"type": _TEMPLATE, **none}]
    template = next(step for step in steps if step["type"] == _TEMPLATE)
    template["single"].append({"SpecialToken": {"id": end, "type_id": 0}})
    template["special_tokens"][end] = {"id": end, "ids": ids, "tokens": [end]}
    ending = {"post_processor": {"type": "Sequence", "processors": steps}}
    return json.dumps({**found.values, **ending}, ensure_ascii=False).encode()


_TEMPLATE = "TemplateProcessing"
"""What tokenizers calls the step that adds special tokens."""
