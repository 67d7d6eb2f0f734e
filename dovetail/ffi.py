"""Single kernels of an artifact for torch, JAX, numpy or TVM programs, through the tvm-ffi C ABI.

In: an artifact, or what `dovetail kernel build` wrote. Out: checked, zero-copy functions. The
serving path does not come here: importing `tvm_ffi` loads torch where it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dovetail.errors import ArtifactError, SpecError
from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import install
from dovetail.loading import open_ready
from dovetail.runtime.machine.isa import supports
from dovetail.topology.hardware import HardwareSpec, read_hardware

if TYPE_CHECKING:
    from tvm_ffi.core import Function

INDEX = "index.json"


class Kernels:
    """Kernels by name, of the libraries that have them: `kernels["rmsnorm"]`."""

    def __init__(self, homes: Mapping[str, Path]) -> None:
        try:
            from tvm_ffi import load_module  # noqa: PLC0415
        except ImportError:
            raise SpecError(
                f"kernels are called through tvm-ffi, which is not installed: {install('ffi')}"
            ) from None

        modules = {path: load_module(str(path)) for path in dict.fromkeys(homes.values())}
        self._modules = {name: modules[path] for name, path in homes.items()}

    def __getitem__(self, name: str) -> Function:
        """Return a kernel; AttributeError where there is none of this name."""
        if name not in self._modules:
            raise AttributeError(f"there is no kernel {name!r}")
        return self._modules[name][name]

    __getattr__ = __getitem__


def kernels(path: str | os.PathLike[str], *, trust: bool = False) -> Kernels:
    """Return the kernels of the artifact at `path` that this machine runs best; trust: see `load`.

    `path` may also be a directory that `dovetail kernel build` wrote, whose library is loaded
    without a word.

    `kernels("app.dove")["rmsnorm"](T, H, x, ldx, w, eps, out, ldo, 0, 1)`: the parameters stand in
    kernels/<target>/index.json in this order; a thread number and count come last. Arrays are
    contiguous CPU tensors of any library with DLPack, as large as the sizes say. A wrong argument
    is a TypeError; what lies in arrays of ids, tables or slots is not checked.

    Raises:
        ArtifactError: the artifact is damaged or does not fit this machine.
    """
    folder, hardware = Path(path), read_hardware()
    if (folder / INDEX).is_file():
        return Kernels(_built_kernels(folder, hardware))
    artifact = open_ready(folder, hardware, trust=trust)
    own = {} if artifact.own is None else {k.name: artifact.own for k in artifact.kernels.kernels}
    return Kernels({**own, **artifact.shared})


def _built_kernels(folder: Path, hardware: HardwareSpec) -> dict[str, Path]:
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
    library = folder.absolute() / Path(index.library).name
    return {kernel.name: library for kernel in index.kernels}
