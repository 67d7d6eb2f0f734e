"""The kernel libraries that all artifacts on a machine share: where they lie, and what they have.

A store is a folder with a folder for each target; a library in it is `<key>.so` beside `<key>.json`
(a `SharedLibrary`), written last. Libraries never change: kernels of another text are in another
library. There are two stores: the package's own, which a wheel may carry, and the cache's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from dovetail.ir.artifact import KernelEntry, KernelIndex
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import MissingKernelsError

BUNDLED = Path(__file__).parent / "libraries"
"""The store that a wheel carries; a checkout has none."""


class SharedLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """What a library of a store has. requests: what each kernel of `index` was asked for by."""

    sha256: str
    requests: tuple[str, ...]
    index: KernelIndex


def cached_store() -> Path:
    """Return the store to which libraries are added when they are first needed."""
    return cache_directory() / "kernels"


def read_libraries(
    target: str, stores: Sequence[Path] | None = None
) -> Iterator[tuple[Path, SharedLibrary]]:
    """Yield each whole library for `target` with its path: by default the package's own first.

    What cannot be read, or is not what it says it is, is passed over.
    """
    for store in (BUNDLED, cached_store()) if stores is None else stores:
        for description in sorted((store / target).glob("*.json")):
            path = description.with_suffix(".so")
            try:
                library = msgspec.json.decode(description.read_bytes(), type=SharedLibrary)
                if hashlib.sha256(path.read_bytes()).hexdigest() == library.sha256:
                    yield path, library
            except (OSError, msgspec.DecodeError, UnicodeDecodeError):
                continue


def find_shared(artifact: Path, target: str, kernels: Iterable[KernelEntry]) -> dict[str, Path]:
    """Return the library of each kernel that an artifact has not itself, by the kernel's name.

    Raises MissingKernelsError where this machine has not all of them.
    """
    wanted = {(kernel.name, kernel.shared): kernel for kernel in kernels if kernel.shared}
    found: dict[str, Path] = {}
    for path, library in read_libraries(target) if wanted else ():
        for entry in library.index.kernels:
            if wanted.pop((entry.name, entry.shared), None):
                found[entry.name] = path
        if not wanted:
            break
    if wanted:
        raise MissingKernelsError(artifact, target, tuple(wanted.values()))
    return found
