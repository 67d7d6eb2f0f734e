"""Loads a kernel library and gives out the addresses of its kernels.

In: a .so file and its KernelIndex. Out: `KernelLibrary`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import ArtifactError
from dovetail.runtime.machine import abi


class KernelLibrary:
    """Loaded libraries: tape entries by kernel name; `c` is the first library."""

    def __init__(
        self, path: Path, index: KernelIndex, shared: Mapping[str, Path] | None = None
    ) -> None:
        """Load `path`, and the library of each kernel that `shared` names.

        ArtifactError where one is no library, of another ABI, or lacks a kernel.
        """
        self.path, self.index = path, index
        if index.abi != abi.ABI:
            raise self._error(f"was built for kernel ABI {index.abi}, this version has {abi.ABI}")
        self._homes = shared or {}
        self._loaded: dict[Path, Any] = {
            p: self._load(p) for p in dict.fromkeys((path, *self._homes.values()))
        }
        self.c: Any = self._loaded[path]
        self.kernels = {kernel.name: kernel for kernel in index.kernels}
        self._addresses = {name: self._address(name) for name in self.kernels}

    def entry(self, kernel: str) -> int:
        """Return the address of `dt_entry_<kernel>`; ArtifactError where there is none."""
        if kernel in abi.COLLECTIVES:
            return self._address(kernel)
        try:
            return self._addresses[kernel]
        except KeyError:
            raise self._error(f"has no kernel {kernel!r}") from None

    def slots(self, kernel: str) -> tuple[str, ...]:
        """Return the names of the operands `kernel` takes from a tape, in order."""
        if kernel in abi.COLLECTIVES:
            return abi.COLLECTIVES[kernel]
        return tuple(p.name for p in self.kernels[kernel].params if p.kind == "slot")

    def _load(self, path: Path) -> Any:
        try:
            library = abi.declare(ctypes.CDLL(str(path.resolve())))
        except (OSError, AttributeError) as error:
            raise self._error(f"cannot be loaded ({error})", path) from None
        found = library.dt_abi()
        if found != abi.ABI:
            raise self._error(f"has kernel ABI {found}, this version has {abi.ABI}", path)
        return library

    def _address(self, kernel: str) -> int:
        try:
            home = self._loaded[self._homes.get(kernel, self.path)]
            function = getattr(home, f"dt_entry_{kernel}")
        except AttributeError:
            raise self._error(f"lacks the kernel {kernel!r}") from None
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def _error(self, problem: str, path: Path | None = None) -> ArtifactError:
        return ArtifactError(
            f"{path or self.path}: {problem}; run `dovetail compile MODEL` again for this machine"
        )
