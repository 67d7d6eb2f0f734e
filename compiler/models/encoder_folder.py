"""Where the parts of a text encoder lie: in a folder as of sentence-transformers, or a GGUF file.

In: a path. Out: an `EncoderFolder`, which reads small files by name; whether it is one at all.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.compiler.families.encoders import ENCODER_FAMILIES, LABELLED
from dovetail.compiler.families.ranking_decoders import ranks, read_answers, read_token_ids
from dovetail.compiler.files.config import Config, parse_json, parse_json_object
from dovetail.compiler.models.embedding_decoders import EMBEDDING_DECODERS, read_ending_tokenizer
from dovetail.compiler.models.source import (
    CONFIG,
    TOKENIZER,
    ModelDirectory,
    ModelSource,
    open_model,
    read_json,
)
from dovetail.ir.errors import SpecError

MODULES, SENTENCE_CONFIG = "modules.json", "sentence_bert_config.json"
MODULE_KINDS = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
"""Modules of sentence-transformers, in the order in which rows go through them; the last one stands
behind a whole decoder."""


@dataclass(frozen=True, slots=True)
class EncoderFolder:
    """Where the parts of a model lie: `transformer` has config.json, weights and tokenizer.

    files: all of them, by their paths from the root on. pooling: the folder of its settings; None
    without modules.json. dense: those of layers behind it. unit: vectors are normed. scores: the
    folder of what the head of a decoder is asked.
    """

    files: ModelSource
    root: Path
    transformer: Path
    pooling: Path | None = None
    dense: tuple[Path, ...] = ()
    unit: bool = False
    scores: Path | None = None

    def read(self, where: Path, name: str) -> Config:
        """Return a JSON file of a folder, without keys where it is not there."""
        path = (where / name).relative_to(self.root).as_posix()
        return read_json(self.files, path) or Config(str(where / name), {})

    def config(self) -> Config:
        """Return config.json."""
        return self.read(self.transformer, CONFIG)

    @property
    def source(self) -> ModelSource:
        """What weights and tokenizer are read from."""
        if self.root.is_file():
            from dovetail.compiler.models.gguf_model import GgufModel  # noqa: PLC0415 - loads gguf

            assert isinstance(self.files, GgufModel)
            return replace(self.files, answers=self.answers)
        return ModelDirectory(self.transformer, self.dense, self.answers)

    def tokenizer(self) -> bytes | None:
        """Return tokenizer.json with what else is done to texts: their letters may become small."""
        source = self.source
        data = read_ending_tokenizer(source) if self.decodes else source.file(TOKENIZER)
        if data is None or not self.read(self.transformer, SENTENCE_CONFIG).flag("do_lower_case"):
            return data
        found = parse_json_object(data, str(self.transformer / TOKENIZER))
        steps = [{"type": "Lowercase"}, *filter(None, [found.get("normalizer")])]
        normalizer = {"type": "Sequence", "normalizers": steps}
        return json.dumps({**found, "normalizer": normalizer}, ensure_ascii=False).encode()

    @property
    def answers(self) -> tuple[int, ...]:
        """The tokens whose rows of the head make a score; none where it has other ends."""
        config = self.config()
        if self.scores:
            return read_token_ids(self.read(self.scores, CONFIG))
        if not (_is(config, EMBEDDING_DECODERS) and ranks(config, self.names(config))):
            return ()
        file = (self.transformer / TOKENIZER).relative_to(self.root).as_posix()
        return read_answers(config, self.root / file, self.files.file(file))

    @property
    def decodes(self) -> bool:
        """Whether it is a decoder that is an encoder."""
        config = self.config()
        if not _is(config, EMBEDDING_DECODERS):
            return False
        told = self.pooling or self.scores or self.labelled
        return bool(told) or ranks(config, self.names(config))

    @property
    def labelled(self) -> bool:
        """Whether it is a classifier."""
        return any(name.endswith(LABELLED) for name in self.config().texts("architectures"))

    def names(self, config: Config) -> tuple[str, ...]:
        """Return what the model may be called: as its folder, at the hub, as its files say."""
        hub = self.root.parent.parent.name  # models--ORG--NAME/snapshots/COMMIT
        return self.root.name, hub, Path(config.text("_name_or_path", "-")).name


def is_encoder(path: str | Path) -> bool:
    """Tell whether a directory or GGUF file holds a text encoder rather than one that generates.

    A decoder is one where modules.json names a pooling or a score, or where it classifies or ranks.
    """
    if not Path(path).exists():
        return False
    folder = open_folder(Path(path))
    config = folder.config()
    return config.has("architectures") and (folder.decodes or _is(config, ENCODER_FAMILIES))


def _is(config: Config, known: Collection[str]) -> bool:
    return any(name in known for name in config.texts("architectures"))


def open_folder(root: Path) -> EncoderFolder:
    """Read modules.json, if there. Raises SpecError for modules that are not computed."""
    files: ModelSource = ModelDirectory(root) if root.is_dir() else open_model(root)
    data = files.file(MODULES)
    if data is None:
        return EncoderFolder(files, root, root)
    modules = _read_modules(root / MODULES, data)
    kinds, last = [kind for kind, _ in modules], MODULE_KINDS[-1]
    wrong = last in kinds and kinds != [MODULE_KINDS[0], last]
    wrong |= any(kinds.count(kind) > 1 for kind in MODULE_KINDS[:2])
    if wrong or set(kinds) - set(MODULE_KINDS) or kinds != sorted(kinds, key=MODULE_KINDS.index):
        raise SpecError(
            f"{root / MODULES}: the modules {', '.join(kinds)} are not supported; "
            f"{', '.join(MODULE_KINDS)} are, in this order, the first two at most once"
        )
    transformers, poolings, dense, units, scores = (
        tuple(root / path for kind, path in modules if kind == each) for each in MODULE_KINDS
    )
    transformer, pooling = (*transformers, root)[0], (*poolings, None)[0]
    return EncoderFolder(files, root, transformer, pooling, dense, bool(units), (*scores, None)[0])


def _read_modules(file: Path, data: bytes) -> list[tuple[str, str]]:
    """Return (last part of the type, folder) of each module."""
    listed = parse_json(data, str(file))
    found = []
    for item in listed if isinstance(listed, list) else [None]:
        kind, path = (item.get(k) if isinstance(item, dict) else None for k in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(path, str):
            raise SpecError(f"{file} must be a list of modules, each with a type and a path")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise SpecError(f"{file}: the path {path!r} leads out of the model")
        found.append((kind.rsplit(".", 1)[-1], path))
    return found
