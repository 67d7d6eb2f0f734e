"""Single kernels of an artifact for torch, JAX, numpy or TVM programs, through the tvm-ffi C ABI.

In: an artifact. Out: checked, zero-copy functions. The serving path does not come here: importing
`tvm_ffi` loads torch where it is installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dovetail.errors import SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.topology.hardware import read_hardware

if TYPE_CHECKING:
    from tvm_ffi import Module


def kernels(path: str | os.PathLike[str]) -> Module:
    """Return the kernels of the artifact at `path` that this machine runs best.

    `kernels("app.dove")["rmsnorm"](T, H, x, ldx, w, eps, out, ldo, 0, 1)`: the parameters stand in
    kernels/<target>/index.json in this order; a thread number and count come last. Arrays are
    contiguous CPU tensors of any library with DLPack. A wrong argument is a TypeError.

    Raises:
        ArtifactError: the artifact is damaged or does not fit this machine.
        SpecError: apache-tvm-ffi is not installed.
    """
    artifact = open_artifact(path, read_hardware())
    try:
        from tvm_ffi import load_module  # noqa: PLC0415
    except ImportError:
        raise SpecError("single kernels need tvm-ffi: pip install 'dovetail[ffi]'") from None
    return load_module(str(artifact.library))
