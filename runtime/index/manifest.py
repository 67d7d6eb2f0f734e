"""The manifest of an index folder, the files it lists, its kernels; needs no faiss.

In: a folder. Out: an `IndexManifest`, a `KernelLibrary`; every fault is an `ArtifactError` that
names the file and the command that mends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import ArtifactError
from dovetail.ir.files import read_json
from dovetail.ir.index_file import INDEX_MAJOR, IndexManifest
from dovetail.runtime.artifact import find_damage
from dovetail.runtime.machine.isa import allowed_targets
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.topology.hardware import read_hardware

MANIFEST = "manifest.json"

T = TypeVar("T")


class _Kind(msgspec.Struct):
    kind: str
    format_major: int


def read_manifest(folder: Path) -> IndexManifest:
    """Return the manifest of an index; ArtifactError where there is none that we read."""
    path = folder / MANIFEST
    try:
        found = read_json(path, _Kind)
    except (FileNotFoundError, ValueError):
        raise ArtifactError(
            f"{folder} is not an index; run `dovetail index build CORPUS -o {folder}` to make one"
        ) from None
    if found.kind != "index" or found.format_major != INDEX_MAJOR:
        raise ArtifactError(
            f"{path}: {found.kind} of format {found.format_major} is not the index format "
            f"{INDEX_MAJOR} this version reads; run `dovetail index build` again"
        )
    return _read(folder, MANIFEST, IndexManifest)


def check_file(folder: Path, manifest: IndexManifest, name: str, *, contents: bool) -> None:
    """Raise ArtifactError where a file's size, or with `contents` its hash, is not as listed."""
    if name not in manifest.files:
        raise damaged(folder, MANIFEST, f"lists no {name}")
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise damaged(folder, name, "leads out of the index")
    if problem := find_damage(path, manifest.files[name], contents=contents):
        raise damaged(folder, name, problem)


def open_list_kernels(folder: Path) -> KernelLibrary | None:
    """Return the library of the best target that runs here, None where the folder has none.

    Raises ArtifactError where it is missing or not the one that the manifest lists.
    """
    manifest = read_manifest(folder)
    allowed = allowed_targets(read_hardware())
    target = next((t for t in allowed if t in manifest.targets), None)
    if target is None:
        return None
    name = f"kernels/{target}/index.json"
    check_file(folder, manifest, name, contents=True)
    kernels = _read(folder, name, KernelIndex)
    library = f"kernels/{target}/{kernels.library}"
    check_file(folder, manifest, library, contents=True)
    return KernelLibrary(folder / library, kernels)


def _read(folder: Path, name: str, kind: type[T]) -> T:
    try:
        return read_json(folder / name, kind)
    except (FileNotFoundError, ValueError) as error:
        raise damaged(folder, name, str(error)) from None


def damaged(folder: Path, file: str, problem: str) -> ArtifactError:
    """Return the error for a file of an index that is not what it should be."""
    return ArtifactError(
        f"{folder / file}: {problem}; run `dovetail index build CORPUS -o {folder}` to write it "
        "again"
    )
