"""Opens an index folder: manifest, vectors mapped from their file, documents.

In: the path of what `dovetail index build` wrote. Out: a `Collection`; every fault is an
`ArtifactError` that names the file and the command that mends it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.index_file import DOCUMENTS, OFFSETS, VECTORS, IndexManifest
from dovetail.runtime.index.build import read_index
from dovetail.runtime.index.documents import open_documents
from dovetail.runtime.index.manifest import check_file, damaged, read_manifest
from dovetail.runtime.retrieval.collection import Collection

HASHED_AT_ONCE = 512 << 20
"""Bytes whose sha256 is checked while an index is opened: about a second, smaller files first."""


def open_index(path: str | os.PathLike[str]) -> Collection:
    """Open the index at `path`; vectors and documents stay in their files until they are read.

    Checks the format, the size of every file, and sha256 of HASHED_AT_ONCE bytes; `check_rest` does
    what is left. Raises ArtifactError: anything is missing, damaged, too new, or does not fit.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    left = left_over(manifest)
    for name in dict.fromkeys((VECTORS, DOCUMENTS, OFFSETS, *manifest.files)):
        check_file(folder, manifest, name, contents=name not in left)
    try:
        index = read_index(folder / VECTORS)
    except SpecError as error:
        raise damaged(folder, VECTORS, str(error)) from None
    store = open_documents(folder / DOCUMENTS, folder / OFFSETS)
    expected = (manifest.dim, manifest.clusters, manifest.codes, manifest.metric)
    if (index.dim, index.clusters, index.codes, index.metric) != expected:
        raise damaged(folder, VECTORS, "is of another kind than the manifest says")
    if not len(index) == len(store) == manifest.documents:
        raise damaged(folder, DOCUMENTS, "holds more or fewer documents than there are vectors")
    if len(store) and int(index.base.ids[-1]) != len(store) - 1:
        raise damaged(folder, VECTORS, "has ids outside the documents")
    return Collection(index, store, manifest.embedder)


def is_still(path: str | os.PathLike[str], manifest: IndexManifest) -> bool:
    """Tell whether the index at `path` is the one of `manifest`: none was written in its place."""
    with suppress(ArtifactError):
        return read_manifest(Path(path)) == manifest
    return False


def left_over(manifest: IndexManifest) -> tuple[str, ...]:
    """Return the files of an index whose sha256 is not checked while it is opened."""
    names = sorted(manifest.files, key=lambda name: manifest.files[name].bytes)
    ends = accumulate(manifest.files[name].bytes for name in names)
    return tuple(name for name, end in zip(names, ends, strict=True) if end > HASHED_AT_ONCE)


def check_rest(path: str | os.PathLike[str], manifest: IndexManifest) -> None:
    """Check the sha256 of the files that `open_index` left, which may take minutes.

    Raises ArtifactError that names the first damaged one, unless the index is another one by then.
    """
    for name in left_over(manifest):
        try:
            check_file(Path(path), manifest, name, contents=True)
        except ArtifactError:
            if is_still(path, manifest):
                raise
            return
