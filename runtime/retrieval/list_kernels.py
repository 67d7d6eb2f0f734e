"""The kernels of an index folder that scan its lists on the CPU at hand.

In: the folder. Out: the library of the best target that runs here, checked against the manifest.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dovetail.ir.artifact import KernelIndex
from dovetail.ir.index_file import IndexManifest
from dovetail.runtime.isa import allowed_targets
from dovetail.runtime.library import KernelLibrary
from dovetail.runtime.retrieval.manifest import check_file, damaged, read_manifest
from dovetail.topology.hardware import read_hardware


def open_list_kernels(folder: Path) -> KernelLibrary | None:
    """Return the library, None where the folder has none that runs here.

    Raises ArtifactError where it is missing or not the one that the manifest lists.
    """
    manifest = read_manifest(folder)
    allowed = allowed_targets(read_hardware())
    target = next((t for t in allowed if t in manifest.targets), None)
    if target is None:
        return None
    return KernelLibrary(*_read_kernels(folder, manifest, target))


def _read_kernels(folder: Path, manifest: IndexManifest, target: str) -> tuple[Path, KernelIndex]:
    name = f"kernels/{target}/index.json"
    try:
        kernels = msgspec.json.decode(
            _listed(folder, manifest, name).read_bytes(), type=KernelIndex
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(folder, name, f"cannot be decoded ({error})") from None
    return _listed(folder, manifest, f"kernels/{target}/{kernels.library}"), kernels


def _listed(folder: Path, manifest: IndexManifest, name: str) -> Path:
    """Return the path of a file whose contents are those that the manifest lists."""
    if name not in manifest.files:
        raise damaged(folder, "manifest.json", f"lists no {name}")
    check_file(folder, manifest, name, contents=True)
    return folder / name
