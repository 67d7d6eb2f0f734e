"""Remembers generated C text by everything it was generated from, since lowering takes seconds.

In: what asks for the text. Out: the text and what is known of it, from `<build cache>/text` where
the same request met the same generator before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

import dovetail.codegen
import dovetail.ir
from dovetail.ir.files import write_whole

SUFFIXES = frozenset({".py", ".dk", ".c", ".h", ".cuh", ".j2", ".lark"})
Text = TypeVar("Text")


def remember_text(
    request: Any, cache: Path, kind: type[Text], generate: Callable[[], Text]
) -> Text:
    """Return `generate()`, or what it returned for an equal `request` (JSON-like) before.

    `kind` is its type. A cache that cannot be read or written is as good as an empty one.
    """
    path = text_path(request, cache)
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    text = generate()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(text))
    return text


def text_path(request: Any, cache: Path) -> Path:
    """Return where the text of a request is, if it is remembered."""
    key = hashlib.sha256(msgspec.json.encode([generator_digest(), request])).hexdigest()
    return cache / "text" / f"{key}.json"


def generator_digest() -> str:
    """Return a hash over every file that takes part in generating C text."""
    return digest_sources(dovetail.codegen, dovetail.ir)


@lru_cache
def digest_sources(*packages: ModuleType) -> str:
    """Return a hash over every source file of some packages."""
    digest = hashlib.sha256()
    for package in packages:
        root = Path(package.__path__[0])
        for file in sorted(f for f in root.rglob("*") if f.suffix in SUFFIXES):
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
