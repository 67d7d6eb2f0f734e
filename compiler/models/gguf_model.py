"""A GGUF file as a model directory: the same files by the same names, made of its metadata.

In: a path. Out: a `GgufModel`, which is a `ModelSource`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dovetail.compiler.families.score_row import with_score
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.files.config import Config
from dovetail.compiler.files.gguf_file import GgufFile, read_gguf
from dovetail.compiler.models.gguf_config import gguf_config
from dovetail.compiler.models.gguf_encoder import DENSE, dense, modules, pooling
from dovetail.compiler.models.gguf_tensors import gguf_checkpoint
from dovetail.compiler.models.gguf_tokenizer import (
    generation_config,
    tokenizer_config,
    tokenizer_json,
)

_FILES: dict[str, Callable[[GgufFile], object]] = {
    "config.json": gguf_config,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
    "generation_config.json": generation_config,
    "modules.json": modules,
    "1_Pooling/config.json": pooling,
    **{f"{i}_Dense/config.json": partial(dense, name=name) for i, name in enumerate(DENSE, 2)},
}


@dataclass(frozen=True)
class GgufModel:
    """The model of a GGUF file; each part is made when it is first asked for.

    answers: as of a ModelDirectory.
    """

    header: GgufFile
    answers: tuple[int, ...] = ()
    _files: dict[str, bytes | None] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> Path:
        """The file; the first, where the model has several."""
        return self.header.path

    def config(self) -> Config:
        """Return the metadata as config.json."""
        return Config(str(self.path), self._config)

    def file(self, name: str) -> bytes | None:
        """Return a small file made of the metadata, None for one that it does not tell."""
        if name not in self._files:
            made = _FILES[name](self.header) if name in _FILES else None
            text = None if made is None else json.dumps(made, ensure_ascii=False).encode()
            self._files[name] = text
        return self._files[name]

    def checkpoint(self) -> Checkpoint:
        """Return the tensors by their Hugging Face names."""
        found = gguf_checkpoint(self.header, self._config)
        return with_score(found, self.answers) if self.answers else found

    @cached_property
    def _config(self) -> dict[str, Any]:
        return gguf_config(self.header)


def open_gguf(path: Path) -> GgufModel:
    """Read the header of a GGUF file; SpecError where it is none."""
    return GgufModel(read_gguf(path))
