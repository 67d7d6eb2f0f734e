"""The directory of a text encoder, as Hugging Face or sentence-transformers, to an EncoderSpec.

In: config.json, modules.json with what it names, and the headers of the safetensors files. What is
not computed is refused with a SpecError that names the key.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dovetail.codegen.isa.target import Target
from dovetail.compiler.families.encoder_tensors import check_encoder_tensors
from dovetail.compiler.families.encoders import (
    EncoderFamily,
    check_fixed,
    find_family,
    read_rotation,
)
from dovetail.compiler.families.ranking_decoders import INSTRUCTION, read_pair_text
from dovetail.compiler.families.rope import MAX_POSITION
from dovetail.compiler.families.score_row import SCORE
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config
from dovetail.compiler.formats.encoder_formats import keep_encoder_formats
from dovetail.compiler.formats.weight_dtype import AUTO, resolve_weight_dtype
from dovetail.compiler.formats.weight_formats import main_format
from dovetail.compiler.models.embedding_decoders import read_decoder
from dovetail.compiler.models.encoder_folder import SENTENCE_CONFIG, EncoderFolder, open_folder
from dovetail.compiler.models.source import CONFIG, TOKENIZER_CONFIG
from dovetail.compiler.models.spec import HEAD_DIM_STEP, MAX_HEAD_DIM, stored_dtype
from dovetail.ir.encoder import DenseSpec, EncoderSpec
from dovetail.ir.errors import SpecError

PROMPTS = "config_sentence_transformers.json"
MAX_TOKENS = 1 << 15
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    **dict.fromkeys(("silu", "swiglu"), "silu"),
}
"""hidden_act of config.json -> our name."""
POOLING_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_TASKS = ("search_query", "search_document", "clustering", "classification")
KNOWN_PROMPTS = {
    r"e5-.*instruct": {"query": f"Instruct: {INSTRUCTION}\nQuery: "},
    "e5-": {"query": "query: ", "passage": "passage: "},
    "nomic-embed-text": {task: f"{task}: " for task in _TASKS},
}
"""Pattern of a part of a model's name, the first that fits -> what such models were trained with;
their folders do not say so."""


def read_encoder_spec(
    path: str | Path,
    *,
    weight_dtype: str | None = None,
    max_tokens: int | None = None,
    target: Target | None = None,
) -> EncoderSpec:
    """Read and check the directory of an encoder.

    weight_dtype, target: as for decoders. max_tokens: of one text; by default what the model says.

    Raises SpecError naming the file and the key or tensor at fault.
    """
    folder = open_folder(Path(path))
    config = folder.config()
    if config.has("quantization_config") and not folder.decodes:
        problem = "but quantized encoders are not supported, only decoders that embed or rank"
        raise config.fail("quantization_config", problem)
    source = folder.source
    checkpoint = source.checkpoint()
    quantised = main_format(checkpoint)
    stored = quantised or stored_dtype(_own_tensors(checkpoint))
    dtypes = (resolve_weight_dtype(weight_dtype, stored, target), stored)
    if folder.decodes:
        spec = _read_decoder(config, folder, dtypes, max_tokens)
        if folder.pooling is None:
            spec = _read_ranking(config, folder, spec, checkpoint.info(SCORE).height)
    else:
        spec = _architecture(config, folder, dtypes, max_tokens)
    check_encoder_tensors(spec, checkpoint)
    if quantised and weight_dtype in (None, AUTO):
        return keep_encoder_formats(spec, checkpoint)
    return spec


def _own_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the tensors of the transformer itself."""
    beside = re.compile(rf"dense\..*|{re.escape(SCORE)}")
    own = {name: info for name, info in checkpoint.tensors.items() if not beside.fullmatch(name)}
    return replace(checkpoint, tensors=own)


def _read_decoder(
    config: Config, folder: EncoderFolder, dtypes: tuple[str, str], max_tokens: int | None
) -> EncoderSpec:
    """Return the spec of a decoder that embeds."""
    rows = min(config.integer("max_position_embeddings", 1, MAX_POSITION), MAX_TOKENS)
    layers = read_decoder(config, dtypes, _most_tokens(folder, rows, max_tokens))
    return EncoderSpec(
        **layers, **_read_ends(config, folder, layers["hidden_size"]), pooling=_read_pooling(folder)
    )


def _read_ranking(
    config: Config, folder: EncoderFolder, spec: EncoderSpec, labels: int
) -> EncoderSpec:
    """Return the spec of a decoder with a classifier."""
    settings = folder.read(folder.transformer, SENTENCE_CONFIG)
    for key in ("processing_kwargs", "chat_template"):
        settings = settings.section(key) if settings.has(key) else Config(settings.name, {})
    asks = settings.flag("add_generation_prompt")
    pair = read_pair_text(config, folder.transformer, folder.names(config), asks=asks)
    ends: dict[str, Any] = {"pooling": "last", "template": pair.template}
    if pair.instruction is not None and spec.default_prompt is None:
        ends["prompts"] = {**spec.prompts, "instruction": pair.instruction}
        ends["default_prompt"] = "instruction"
    sigmoid = _scores_by_sigmoid(config, folder)
    return msgspec.structs.replace(spec, labels=labels, sigmoid=sigmoid, **ends)


def _architecture(
    config: Config,
    folder: EncoderFolder,
    dtypes: tuple[str, str],
    max_tokens: int | None,
) -> EncoderSpec:
    """Return the spec; dtypes: of the packed weights and of the checkpoint's."""
    _, family = find_family(config)
    config = replace(config, aliases=family.keys)
    check_fixed(config, family)
    hidden = config.integer("hidden_size", 1, 1 << 15)
    heads = config.integer("num_attention_heads", 1, 1024)
    rows = config.integer("max_position_embeddings", 1, MAX_TOKENS)
    if config.has("rotary_scaling_factor"):  # beyond, frequencies would follow a text's length
        rows = min(rows, config.integer("max_trained_positions", 1, MAX_TOKENS, 2048))
    first = config.integer("pad_token_id", 0, 1 << 24, 1) + 1 if family.skips_padding else 0
    packed, stored = dtypes
    labelled = folder.labelled
    head_dim = _head_dim(config, hidden, heads)
    return EncoderSpec(
        family=family.name,
        vocab_size=config.integer("vocab_size", 1, 1 << 24),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 1, 1 << 17),
        n_layers=config.integer("num_hidden_layers", 1, 1024),
        n_heads=heads,
        head_dim=head_dim,
        max_tokens=_most_tokens(folder, rows - first, max_tokens),
        norm_eps=config.number("layer_norm_eps", 0.0, 1.0, family.norm_eps),
        activation=_activation(config, family),
        gated=family.gated,
        norm_first=family.norm_first,
        positions=family.positions,
        n_positions=rows,
        first_position=first,
        relative=family.relative,
        **read_rotation(config, family, head_dim, rows),
        token_types=config.integer("type_vocab_size", 0, 1024, family.token_types),
        pooling=_classifier_pooling(config) if labelled else _read_pooling(folder),
        **_read_ends(config, folder, hidden),
        labels=_count_labels(config) if labelled else 0,
        head=family.head,
        sigmoid=labelled and _scores_by_sigmoid(config, folder),
        weight_dtype=packed,
        checkpoint_dtype=stored,
    )


def _read_ends(config: Config, folder: EncoderFolder, hidden: int) -> dict[str, Any]:
    """Return the fields of an EncoderSpec that are not of its layers; hidden: columns of a row."""
    prompts, default = _read_prompts(folder, config)
    dense: list[DenseSpec] = []
    for path in folder.dense:
        dense.append(_read_dense(folder.read(path, CONFIG), dense[-1].n if dense else hidden))
    return {
        "dense": tuple(dense),
        "unit": folder.unit,
        "prompts": prompts,
        "default_prompt": default,
    }


def _read_dense(config: Config, k: int) -> DenseSpec:
    """Return a layer of rows of k values."""
    name = config.text("activation_function", "Tanh").rsplit(".", 1)[-1]
    if name not in ("Identity", "Tanh"):
        raise config.fail("activation_function", "but only Identity and Tanh are supported")
    for key in ("module_input_name", "module_output_name"):
        if config.text(key, _OF_TEXT) != _OF_TEXT:
            raise config.fail(key, f"but only {_OF_TEXT} is supported")
    n = config.integer("out_features", 1, 1 << 17)
    k = config.integer("in_features", k, k)
    return DenseSpec(n=n, k=k, bias=config.flag("bias", True), tanh=name == "Tanh")


_OF_TEXT = "sentence_embedding"
"""What sentence-transformers calls a text's row."""


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise config.fail("hidden_size", f"but must be a multiple of num_attention_heads {heads}")
    size = hidden // heads
    if size % HEAD_DIM_STEP or size > MAX_HEAD_DIM:
        raise SpecError(
            f"{config.name}: heads of {size} values are not supported; the attention kernel takes "
            f"multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    return size


def _activation(config: Config, family: EncoderFamily) -> str:
    known = family.activations
    name = config.text("hidden_act", known[0])
    if name not in known:
        raise config.fail("hidden_act", f"but must be one of {', '.join(known)}")
    return ACTIVATIONS[name]


def _most_tokens(folder: EncoderFolder, positions: int, asked: int | None) -> int:
    """Return the tokens of the longest text: what is asked for, or what the model's files say."""
    if asked is not None:
        if not 3 <= asked <= positions:
            raise SpecError(
                f"texts of {asked} tokens were asked for, but {folder.root} allows 3 to {positions}"
            )
        return asked
    limits = [positions]
    for where, name, key in (
        (folder.transformer, SENTENCE_CONFIG, "max_seq_length"),
        (folder.transformer, TOKENIZER_CONFIG, "model_max_length"),
    ):
        config = folder.read(where, name)
        if config.has(key) and config.number(key, 1, 1e40) < positions:
            limits.append(config.integer(key, 3, positions))
    return min(limits)


def _read_pooling(folder: EncoderFolder) -> str:
    if folder.pooling is None:
        return "mean"
    config = folder.read(folder.pooling, CONFIG)
    if not config.flag("include_prompt", True):
        raise config.fail("include_prompt", "but prompts always count")
    named = config.text("pooling_mode", "")
    chosen = [f"pooling_mode_{named}"] if named else []
    chosen = chosen or [
        k for k in config.values if k.startswith("pooling_mode_") and config.flag(k)
    ]
    short = {**POOLING_MODES, **{f"pooling_mode_{mode}": mode for mode in POOLING_MODES.values()}}
    if len(chosen) != 1 or chosen[0] not in short:
        raise SpecError(
            f"{config.name}: pooling by {', '.join(chosen) or 'nothing'} is not supported; one of "
            f"{', '.join(POOLING_MODES)} is"
        )
    return short[chosen[0]]


def _classifier_pooling(config: Config) -> str:
    pooling = config.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise config.fail("classifier_pooling", "but must be cls or mean")
    return pooling


def _read_prompts(folder: EncoderFolder, config: Config) -> tuple[dict[str, str], str | None]:
    """Return prompts by name and the name of the default one."""
    found = folder.read(folder.root, PROMPTS)
    if found.has("prompts") and found.section("prompts").values:
        listed = found.section("prompts")
        prompts = {name: listed.text(name, "") for name in listed.values}
    else:
        names = folder.names(config)
        known = (
            prompts
            for part, prompts in KNOWN_PROMPTS.items()
            if any(re.search(part, name.lower()) for name in names)
        )
        prompts = dict(next(known, {}))
    default = found.text("default_prompt_name") if found.has("default_prompt_name") else None
    if default is not None and default not in prompts:
        raise found.fail("default_prompt_name", "but is none of the prompts")
    return prompts, default


def _count_labels(config: Config) -> int:
    values: Any = config.values.get("id2label")
    if isinstance(values, dict) and values:
        return len(values)
    return config.integer("num_labels", 1, 1 << 16, 2)


def _scores_by_sigmoid(config: Config, folder: EncoderFolder) -> bool:
    """Tell whether a score is the sigmoid of a logit: so it is unless the files say other."""
    key, newer = "sbert_ce_default_activation_function", "activation_fn"
    nested = (
        config.section("sentence_transformers") if config.has("sentence_transformers") else config
    )
    if (beside := folder.read(folder.root, PROMPTS)).has(newer):
        nested = beside
    named = nested.text(newer, config.text(key, "Sigmoid")).rsplit(".", 1)[-1]
    if named not in ("Sigmoid", "Identity"):
        raise config.fail(key, "but scores are by Sigmoid or Identity")
    return named == "Sigmoid"
