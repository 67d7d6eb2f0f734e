"""Remembers generated C text by everything it was generated from, since lowering takes seconds.

In: what asks for the text. Out: the text and its kernel entries, from `<build cache>/text` where
the same request met the same generator before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec

import dovetail.codegen
import dovetail.ir
from dovetail.ir.artifact import KernelEntry

SUFFIXES = frozenset({".py", ".dk", ".c", ".h", ".cuh", ".j2", ".lark"})


class UnitText(msgspec.Struct, frozen=True, kw_only=True):
    """The C text of a library and the index entries of its kernels."""

    source: str
    kernels: tuple[KernelEntry, ...]


def remember_text(request: Any, cache: Path, generate: Callable[[], UnitText]) -> UnitText:
    """Return `generate()`, or what it returned for an equal `request` (JSON-like) before.

    A cache that cannot be read or written is as good as an empty one.
    """
    key = hashlib.sha256(msgspec.json.encode([generator_digest(), request])).hexdigest()
    path = cache / "text" / f"{key}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=UnitText)
    text = generate()
    with contextlib.suppress(OSError):
        _write(path, msgspec.json.encode(text))
    return text


@lru_cache
def generator_digest() -> str:
    """Return a hash over every file that takes part in generating C text."""
    digest = hashlib.sha256()
    for package in (dovetail.codegen, dovetail.ir):
        root = Path(package.__path__[0])
        for file in sorted(f for f in root.rglob("*") if f.suffix in SUFFIXES):
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(data)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
