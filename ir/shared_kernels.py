"""The kernel libraries that all artifacts on a machine share: where they lie, and what they have.

A store is a folder with a folder for each target; a library in it is `<key>.so` beside `<key>.json`
(a `SharedLibrary`), written last. Libraries never change: kernels of another text are in another
library. There are two stores: the package's own, which a wheel may carry, and the cache's.
A wheel's libraries are compressed, to a fifth: those for the machine at hand go to the cache.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from dovetail.ir.artifact import KernelEntry, KernelIndex
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import MissingKernelsError
from dovetail.ir.files import write_whole

BUNDLED = Path(__file__).parent / "libraries"
"""The store that a wheel carries; a checkout has none."""
PACKED = ".so.xz"


class SharedLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """What a library of a store has. requests: what each kernel of `index` was asked for by."""

    sha256: str
    requests: tuple[str, ...]
    index: KernelIndex


def cached_store() -> Path:
    """Return the store to which libraries are added when they are first needed."""
    return cache_directory() / "kernels"


def read_libraries(
    target: str,
    stores: Sequence[Path] | None = None,
    wanted: Callable[[SharedLibrary], bool] = lambda _: True,
) -> Iterator[tuple[Path, SharedLibrary]]:
    """Yield each whole library for `target` with its path: by default the package's own first.

    What cannot be read, or is not what it says it is, is passed over. Only those that are `wanted`
    are read as a whole.
    """
    for store in (BUNDLED, cached_store()) if stores is None else stores:
        for description in sorted((store / target).glob("*.json")):
            path, packed = description.with_suffix(".so"), description.with_suffix(PACKED)
            try:
                library = msgspec.json.decode(description.read_bytes(), type=SharedLibrary)
                if not wanted(library):
                    continue
                if packed.exists():
                    path = cached_store() / target / path.name
                    _unpack(packed, path, library.sha256)
                if _is_whole(path, library.sha256):
                    yield path, library
            except (OSError, msgspec.DecodeError, UnicodeDecodeError, lzma.LZMAError, EOFError):
                continue


def pack_libraries(store: Path) -> None:
    """Compress the libraries of a store."""
    for path in store.glob("*/*.so"):
        write_whole(path.with_suffix(PACKED), lzma.compress(path.read_bytes()))
        path.unlink()


def _unpack(packed: Path, path: Path, sha256: str) -> None:
    if not _is_whole(path, sha256):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lzma.decompress(packed.read_bytes()))


def _is_whole(path: Path, sha256: str) -> bool:
    return path.exists() and _hash(path, *_version(path)) == sha256


def _version(path: Path) -> tuple[int, int]:
    """Return what changes with a file: a process that compiles often reads each file once."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4096)
def _hash(path: Path, *_changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_shared(artifact: Path, target: str, kernels: Iterable[KernelEntry]) -> dict[str, Path]:
    """Return the library of each kernel that an artifact has not itself, by the kernel's name.

    Raises MissingKernelsError where this machine has not all of them.
    """
    wanted = {(kernel.name, kernel.shared): kernel for kernel in kernels if kernel.shared}
    found: dict[str, Path] = {}

    def has_some(library: SharedLibrary) -> bool:
        return any((entry.name, entry.shared) in wanted for entry in library.index.kernels)

    for path, library in read_libraries(target, wanted=has_some) if wanted else ():
        for entry in library.index.kernels:
            if wanted.pop((entry.name, entry.shared), None):
                found[entry.name] = path
        if not wanted:
            break
    if wanted:
        raise MissingKernelsError(artifact, target, tuple(wanted.values()))
    return found
