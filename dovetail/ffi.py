"""Single kernels of an artifact for torch, JAX, numpy or TVM programs, through the tvm-ffi C ABI.

In: an artifact, or what `dovetail kernel build` wrote. Out: checked, zero-copy functions. The
serving path does not come here: importing `tvm_ffi` loads torch where it is installed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dovetail.errors import ArtifactError
from dovetail.ir.artifact import KernelIndex
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.isa import supports
from dovetail.topology.hardware import HardwareSpec, read_hardware

if TYPE_CHECKING:
    from tvm_ffi import Module

INDEX = "index.json"


def kernels(path: str | os.PathLike[str]) -> Module:
    """Return the kernels of the artifact at `path` that this machine runs best.

    `path` may also be a directory that `dovetail kernel build` wrote.

    `kernels("app.dove")["rmsnorm"](T, H, x, ldx, w, eps, out, ldo, 0, 1)`: the parameters stand in
    kernels/<target>/index.json in this order; a thread number and count come last. Arrays are
    contiguous CPU tensors of any library with DLPack, as large as the sizes say. A wrong argument
    is a TypeError; what lies in arrays of ids, tables or slots is not checked.

    Raises:
        ArtifactError: the artifact is damaged or does not fit this machine.
    """
    folder, hardware = Path(path), read_hardware()
    if (folder / INDEX).is_file():
        library = _built_library(folder, hardware)
    else:
        library = open_artifact(folder, hardware).library
    from tvm_ffi import load_module  # noqa: PLC0415

    return load_module(str(library))


def _built_library(folder: Path, hardware: HardwareSpec) -> Path:
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=KernelIndex)
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(
            f"{folder / INDEX}: cannot be read ({error}); run `dovetail kernel build` again"
        ) from None
    if not supports(index.target, hardware):
        raise ArtifactError(
            f"{folder}: holds kernels for {index.target}, which this CPU cannot run; "
            "run `dovetail kernel build` on this machine"
        )
    return folder.absolute() / Path(index.library).name
