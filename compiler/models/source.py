"""Where a model comes from: a Hugging Face directory, or a GGUF file.

An adapter's folder stands for its model with the adapter's sums in the weights
(`merged_adapter.py`).

In: a path. Out: a `ModelSource`: its config.json, small files by name, and checkpoint. Nothing
behind it asks which of the two it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dovetail.compiler.families.experts import expert_tensors
from dovetail.compiler.families.falcon import falcon_tensors
from dovetail.compiler.families.latent import latent_tensors
from dovetail.compiler.families.minicpm import minicpm_config
from dovetail.compiler.families.nemotron import nemotron_config, nemotron_tensors
from dovetail.compiler.families.pairs import halves
from dovetail.compiler.families.recurrent import lfm2_config, lfm2_tensors
from dovetail.compiler.families.score_row import with_score
from dovetail.compiler.families.text_part import text_config, text_tensors
from dovetail.compiler.files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, open_checkpoint
from dovetail.compiler.files.config import MAX_JSON_BYTES, Config, parse_json_object, read_bounded
from dovetail.compiler.files.packed import packed_tensors
from dovetail.compiler.models.merged_adapter import ADAPTER_WEIGHTS, find_base, is_adapter, merge
from dovetail.ir.errors import SpecError

if TYPE_CHECKING:
    from dovetail.compiler.models.gguf_model import GgufModel

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"  # of older tokenizers
CHAT_TEMPLATE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"  # of older models of pictures and text
LIMITS = {TOKENIZER: 64 << 20, TOKENIZER_CONFIG: 4 << 20, CHAT_TEMPLATE: 1 << 20}
"""Bytes that a small file may have, where they are not those of any JSON."""


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory as save_pretrained writes it, or the folder of a model in an artifact.

    dense: folders of layers beside it, whose tensors are `dense.0.linear.weight` and so on.
    answers: tokens of its head that make a classifier.
    """

    path: Path
    dense: tuple[Path, ...] = ()
    answers: tuple[int, ...] = ()

    def config(self) -> Config:
        """Read config.json."""
        if not (self.path / CONFIG).is_file() and (files := sorted(self.path.glob("*.gguf"))):
            raise SpecError(f"{self.path} has no {CONFIG}; to compile a GGUF file give {files[0]}")
        return read_config(self.path / CONFIG)

    def file(self, name: str) -> bytes | None:
        """Read a small file, None where it is not there."""
        path = self.path / name
        if not path.is_file():
            return None
        return read_bounded(path, LIMITS.get(name, MAX_JSON_BYTES))

    def checkpoint(self) -> Checkpoint:
        """Read the headers of the safetensors files."""
        config = self.config()
        opened = lfm2_tensors(text_tensors(open_checkpoint(self.path)), config)
        opened = packed_tensors(nemotron_tensors(opened, config), config)
        opened = falcon_tensors(opened, config)
        found = latent_tensors(halves(expert_tensors(opened), config), config)
        beside = {
            f"dense.{i}.{name}": info
            for i, folder in enumerate(self.dense)
            for name, info in open_checkpoint(folder).tensors.items()
        }
        found = replace(found, tensors={**found.tensors, **beside})
        return with_score(found, self.answers) if self.answers else found


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """A folder of a LoRA adapter: its own small files go before those of its model."""

    path: Path
    base: ModelDirectory

    def config(self) -> Config:
        """Read the config.json of its model."""
        return self.base.config()

    def file(self, name: str) -> bytes | None:
        """Read a small file of either, None where neither has it."""
        own = ModelDirectory(self.path)
        if (found := own.file(name)) is not None:
            return found
        if name in (CHAT_TEMPLATE, PROCESSOR_TEMPLATE):  # its own may lie in another file
            config = read_json(own, TOKENIZER_CONFIG)
            if config and config.has("chat_template"):
                return None
        return self.base.file(name)

    def checkpoint(self) -> Checkpoint:
        """Read the headers of both."""
        tied = self.config().flag("tie_word_embeddings")
        return merge(self.path, self.base.checkpoint(), tied=tied)


def read_config(path: Path) -> Config:
    """Read a config.json with the keys that most families have."""
    return minicpm_config(nemotron_config(lfm2_config(text_config(Config.read(path)))))


ModelSource: TypeAlias = "ModelDirectory | AdapterDirectory | GgufModel"
"""A model before it is compiled: its path, config.json, small files by name, and checkpoint."""


def open_model(path: str | Path) -> ModelSource:
    """Return the model at a path: a file is GGUF. Raises SpecError where nothing is there."""
    path = Path(path)
    if path.is_file():
        from dovetail.compiler.models.gguf_model import open_gguf  # noqa: PLC0415 - loads the package gguf

        return open_gguf(path)
    if not path.is_dir():
        raise SpecError(f"{path} is neither a Hugging Face model directory nor a GGUF file")
    if is_adapter(path):
        return AdapterDirectory(path, ModelDirectory(find_base(path)))
    return ModelDirectory(path)


def has_weights(path: Path) -> bool:
    """Tell whether a GGUF file, or a directory of a model, has its weights with it."""
    files = (path / SINGLE_FILE, path / INDEX_FILE, path / ADAPTER_WEIGHTS)
    return any(file.is_file() for file in files) or (path.is_file() and path.suffix != ".json")


def read_json(source: ModelSource, name: str) -> Config | None:
    """Return a small JSON file of a model, None where it has none."""
    data = source.file(name)
    if data is None:
        return None
    where = str(source.path / name)
    return Config(where, parse_json_object(data, where))


def end_ids(source: ModelSource) -> list[int]:
    """Return the token that a tokenizer ends texts with, none where it is no added token of it.

    Nor of a GGUF file, whose generation_config.json is made of its tokenizer.
    """
    settings = None if source.path.is_file() else read_json(source, TOKENIZER_CONFIG)
    found = read_json(source, TOKENIZER) if settings else None
    listed = found.values.get("added_tokens") if found else None
    if settings is None or not isinstance(listed, list):
        return []
    end = settings.values.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    tokens = (token for token in listed if isinstance(token, dict))
    ids = (token.get("id") for token in tokens if end and token.get("content") == end)
    return [i for i in ids if type(i) is int]


def without_lengths(tokenizer: Mapping[str, Any]) -> bytes | None:
    """Return a tokenizer without the lengths that it cuts and fills texts to; None: it has none.

    They are those of its training, and llguidance would follow them.
    """
    if not any(map(tokenizer.get, lengths := ("truncation", "padding"))):
        return None
    return json.dumps({**tokenizer, **dict.fromkeys(lengths)}).encode()
